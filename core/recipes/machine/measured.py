"""Measure the machine that this process runs on, for `sabia plan-cluster --measure`.

The result has the keys of a `--machine` file (core/plan/machine.py):
- the BF16 matrix product, in the arithmetic that training uses (machine/peaks.py), of one device;
- the memory bandwidth: a copy within the device reads and writes each byte;
- GPUs: a copy from device to device, and from pinned memory of the host to the device;
- the network: the rates of the host's active ports in /sys (InfiniBand, else Ethernet), a share for
  each device. It is not measured: that needs two hosts.
A GPU whose data sheet is on file gets its peaks and power from there. What cannot be measured here
is left out, and a comment says so. On a host without a GPU the device is all cores of this process.
"""

import os
import platform
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

from sabia.core.plan.chips import SCALED, Chip, chip_of_device
from sabia.core.recipes.machine.peaks import best_seconds, device_name, measure_peak_flops

COPIED = {"cpu": 1 << 28, "cuda": 1 << 30}  # bytes; larger than caches
ROUNDS = 8
FROM_DATA_SHEET = ("bf16_tflops", "fp8_tflops", "fp4_tflops", "int8_tops", "power_w")
SYSTEM = Path("/sys/class")


def measured_machine() -> dict[str, object]:
    """Keys and values of a machine file; about 3 seconds."""
    import torch

    gpu = torch.cuda.is_available()
    kind = "cuda" if gpu else "cpu"
    count = torch.cuda.device_count() if gpu else 1
    label = device_name("torch") if gpu else platform.processor() or platform.machine()
    machine: dict[str, Any] = {
        "name": f"my-{kind if not gpu else label}".lower().replace(" ", "-")[:40],
        "family": "GPU" if gpu else "CPU",
        "node_chips": count,
        "memory_mib": _memory(kind) // 2**20,
        "measured_tflops": _digits(measure_peak_flops("torch", "bf16") / 1e12),
        "hbm_tb_s": _digits(2 * _copies(kind, kind) / 1e12),
    }
    if known := chip_of_device(label):
        machine |= _data_sheet(known)
    if gpu:
        machine["pcie_gb_s"] = _digits(_copies("host", "cuda") / 1e9)
        if count > 1:
            machine["scale_up_gb_s"] = _digits(_copies("cuda:0", "cuda:1") / 1e9)
    if rate := network_rate(SYSTEM):
        machine["nic_gb_s"] = _digits(rate / count / 1e9)
    source = f"sabia plan-cluster --measure on {label}, {platform.node()}"
    return machine | {"source": source[:200], "date": date.today()}


def as_toml(machine: dict[str, Any]) -> str:
    """The text of the file."""
    lines = ["# A machine for sabia plan-cluster --machine; man sabia-plan-cluster"]
    for key, value in machine.items():
        if isinstance(value, str):
            value = '"' + value.replace("\\", "/").replace('"', "'") + '"'
        lines.append(f"{key} = {value}")
    wanted = {
        "bf16_tflops": "the peak of the data sheet",
        "scale_up_gb_s": "a device's links inside the host, one way",
        "nic_gb_s": "a device's share of the network of its host, one way",
        "power_w": "of a device with its memory",
        "usd_per_chip_hour": "what a device costs per hour",
    }
    lines += [f"# {key} =   # {words}" for key, words in wanted.items() if key not in machine]
    return "\n".join(lines)


def _data_sheet(chip: Chip) -> dict[str, float]:
    values = {}
    for key in FROM_DATA_SHEET:
        field, unit = SCALED.get(key, (key, 1))
        if (value := getattr(chip, field)) is not None:
            values[key] = value / unit / chip.devices
    return values


def _memory(kind: str) -> int:
    import torch

    if kind == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _copies(source: str, target: str) -> float:
    """Bytes per second of the best of some copies; `host`: pinned memory."""
    import torch

    size = COPIED["cpu" if target == "cpu" else "cuda"]
    gpu = target != "cpu"
    begin = torch.ones(size, dtype=torch.uint8, device="cpu" if source == "host" else source)
    begin = begin.pin_memory() if source == "host" else begin
    end = torch.empty_like(begin, device=target)

    def copy() -> None:
        end.copy_(begin, non_blocking=True)
        if gpu:
            for device in {begin.device, end.device}:
                if device.type == "cuda":
                    torch.cuda.synchronize(device)

    return size / best_seconds(copy, ROUNDS)


def network_rate(system: Path) -> float:
    """Bytes per second of all active InfiniBand ports, else Ethernet ports; 0: none is known.

    system: /sys/class. A port of a bond or a bridge is counted once, as it has a device of its own.
    """
    gigabits = [
        float(_text(port / "rate").split()[0])
        for port in sorted(system.glob("infiniband/*/ports/*"))
        if "ACTIVE" in _text(port / "state") and _text(port / "rate")
    ]
    if not gigabits:
        ports = (port for port in sorted(system.glob("net/*")) if (port / "device").exists())
        gigabits = [speed / 1e3 for speed in _speeds(ports)]
    return sum(gigabits) * 1e9 / 8


def _speeds(ports: Iterable[Path]) -> Iterable[float]:
    """Megabits per second of the ports that are up and report a rate."""
    for port in ports:
        text = _text(port / "speed").strip()
        if text.isdigit() and int(text) > 0:
            yield float(text)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _digits(value: float) -> float:
    """Three significant digits."""
    return float(f"{value:.3g}")
