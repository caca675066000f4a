"""Peaks of MFU and gemm_share: data sheet, given, measured."""

import pytest

from sabia.core.recipes.machine import peaks
from sabia.core.recipes.machine.peaks import find_peaks


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A device of this name and measured speed."""
    device: dict[str, object] = {"name": "NVIDIA H100 80GB HBM3", "flops": 7e14}
    monkeypatch.setattr(peaks, "device_name", lambda backend: device["name"])
    monkeypatch.setattr(peaks, "measure_peak_flops", lambda backend, precision: device["flops"])
    return device


def test_the_peak_of_a_known_device_is_its_data_sheet(
    measured: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    peak = find_peaks("torch", "bf16", 0.0)
    assert (peak.published, peak.measured) == (989e12, 7e14)
    assert "BF16 peak of h100" in peak.description
    assert "warning" not in capsys.readouterr().err


def test_a_given_peak_replaces_both(measured: dict[str, object]) -> None:
    peak = find_peaks("torch", "bf16", 1e12)
    assert (peak.published, peak.measured) == (1e12, 0.0)


def test_a_device_without_a_data_sheet_has_no_mfu(measured: dict[str, object]) -> None:
    measured["name"] = "NVIDIA H100 NVL"
    peak = find_peaks("torch", "bf16", 0.0)
    assert (peak.published, peak.measured) == (0.0, 7e14)
    assert "no MFU" in peak.description


@pytest.mark.parametrize("warns", [True, False])
def test_a_product_faster_than_the_data_sheet_warns(
    measured: dict[str, object], capsys: pytest.CaptureFixture[str], warns: bool
) -> None:
    measured["flops"] = 1.1e15
    find_peaks("jax", "fp32", 0.0, warns=warns)
    assert ("at 1.1P" in capsys.readouterr().err) == warns
