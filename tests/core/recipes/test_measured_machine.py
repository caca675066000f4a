"""`--measure`: what it writes is a machine that the planner reads; rates are those of NumPy."""

import time
import tomllib
from typing import Any

import numpy as np
import torch
from plan_calls import call

from sabia.core.plan.machine import machine_of
from sabia.core.recipes.machine import measured as measuring


def rate_of(square: Any) -> float:
    """FLOP/s of the product of a square matrix of NumPy or torch with itself, the best of eight."""
    times = []
    for _ in range(8):
        start = time.perf_counter()
        square @ square
        times.append(time.perf_counter() - start)
    return 2 * len(square) ** 3 / min(times)


def test_the_file_is_read_as_a_machine_with_the_rates_of_numpy(tmp_path):
    done = call("--measure")
    assert done.code == 0
    chip = machine_of(tomllib.loads(done.stdout), "lab", "x").chip
    if chip.family == "CPU":
        square = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
        by_numpy, in_bf16 = rate_of(square), rate_of(torch.from_numpy(square).bfloat16())
        # a CPU with AMX multiplies BF16 much faster than NumPy multiplies fp32
        assert by_numpy / 4 < chip.bf16_flops_per_s < 4 * max(by_numpy, in_bf16)
    assert chip.usable_hbm_bytes > 1e9 and chip.hbm_bytes_per_s > 1e8
    path = tmp_path / "lab.toml"
    path.write_text(done.stdout)
    words = "--params 1M --tokens 1M --seq 128 --batch-tokens 1280 --chips 1 --deadline 52w"
    assert call(f"{words} --machine {path} --search").code == 0


def test_measuring_stands_alone():
    done = call("--measure --params 8B")
    assert done.code == 2 and "--params: not together with --measure" in done.stderr


def test_the_network_is_that_of_active_ports(tmp_path):
    assert measuring.network_rate(tmp_path) == 0
    for name, speed, real in (("eth0", "25000", True), ("eth1", "-1", True), ("br0", "9", False)):
        port = tmp_path / "net" / name
        port.mkdir(parents=True)
        (port / "speed").write_text(f"{speed}\n")
        if real:
            (port / "device").mkdir()
    assert measuring.network_rate(tmp_path) == 25e9 / 8
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert measuring.network_rate(tmp_path) == 400e9 / 8


def test_a_device_with_a_data_sheet_has_its_peaks():
    from sabia.core.plan.chips import find_chip

    sheet = measuring._data_sheet(find_chip("h100"))
    assert sheet == {"bf16_tflops": 989, "fp8_tflops": 1979, "int8_tops": 1979, "power_w": 700}
    assert measuring._data_sheet(find_chip("tpu-v7"))["bf16_tflops"] == 2307 / 2


def test_the_text_is_toml_for_any_name():
    machine = {"name": 'a "b" \\ c', "node_chips": 2, "measured_tflops": 1.5}
    assert tomllib.loads(measuring.as_toml(machine))["node_chips"] == 2
