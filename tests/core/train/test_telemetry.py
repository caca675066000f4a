"""Metrics files: one history whatever was killed; speed and MFU by their definitions."""

import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sabia.core.ops.precision import PRECISIONS
from sabia.core.recipes.machine import peaks
from sabia.core.recipes.machine.peaks import measure_peak_flops, peak_dtype
from sabia.core.train import telemetry
from sabia.core.train.telemetry import Meter, RunLog, metrics_path, read_rows


def test_rows_are_in_the_file_at_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.write({"step": 1, "loss": 2.5})
    assert read_rows(metrics_path(tmp_path)) == [{"step": 1, "loss": 2.5}]
    log.close()


def test_resume_drops_what_was_past_the_checkpoint(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    for step in range(6):
        log.write({"step": step})
    log.close()
    with open(metrics_path(tmp_path), "a") as file:
        file.write('{"step": 6, "lo')  # the kill came here
    RunLog(tmp_path, resume_step=3).close()
    assert [row["step"] for row in read_rows(metrics_path(tmp_path))] == [0, 1, 2, 3]
    RunLog(tmp_path).close()
    assert read_rows(metrics_path(tmp_path)) == []


def test_each_process_has_its_file(tmp_path: Path) -> None:
    RunLog(tmp_path, 3).close()
    assert [p.name for p in tmp_path.iterdir()] == ["metrics-0003.jsonl"]


def test_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(monotonic=lambda: now[0]))
    meter = Meter(10.0, 8.0, published_peak=1e5, measured_peak=4e4)
    meter.start()
    meter.tokens += 1000
    now[0] += 2.0
    found = meter.read()
    assert found == {"tokens_per_s": 500.0, "mfu": 0.05, "mfu_6nd": 0.04, "gemm_share": 0.125}
    assert meter.tokens == 0


def test_a_share_above_1_warns_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(monotonic=lambda: now[0]))
    leading, other = (Meter(10.0, 8.0, measured_peak=100.0, warned=w) for w in (False, True))
    for _ in range(2):
        for meter in (leading, other):
            meter.start()
            meter.tokens += 30
        now[0] += 2.0
        assert [meter.read()["gemm_share"] for meter in (leading, other)] == [1.5, 1.5]
    assert capsys.readouterr().err.count("gemm_share is 1.50") == 1


def test_measured_peak_is_that_of_a_machine() -> None:
    for backend in ("torch", "jax"):
        assert 1e8 < measure_peak_flops(backend, "fp32") < 1e16


def test_the_measured_product_is_of_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = []
    monkeypatch.setattr(torch, "mm", lambda a, b: factors.extend([a, b]))
    measure_peak_flops("torch", "fp32")
    assert all(0.9 < factor.std() < 1.1 for factor in factors)
    monkeypatch.setattr(peaks, "_rate", lambda product, size: inspect.getclosurevars(product))
    square = measure_peak_flops("jax", "fp32").nonlocals["square"]
    assert 0.9 < square.std() < 1.1


def test_only_fp32_is_measured_against_products_in_fp32() -> None:
    found = {name: peak_dtype(name) for name in PRECISIONS}
    assert found.pop("fp32") == "float32" and set(found.values()) == {"bfloat16"}
