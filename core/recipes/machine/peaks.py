"""The peaks of a training run's device: of its MFU, and of its gemm_share."""

from dataclasses import dataclass

from sabia.core import notes, units
from sabia.core.plan.chips import chip_of_device
from sabia.core.train.peak import device_name, measure_peak_flops


@dataclass(frozen=True)
class Peaks:
    """FLOP/s of one device: given or of its data sheet, and of a measured product; 0: none."""

    published: float
    measured: float
    description: str


def find_peaks(backend: str, precision: str, given: float, *, warns: bool = True) -> Peaks:
    """The peaks for a precision's name; a `given` one replaces both, so that nothing is measured.

    Warns if the measured peak is above the data sheet's.
    """
    if given:
        return Peaks(given, 0.0, f"MFU is of {units.format_count(given)}FLOP/s per device (given)")
    name = device_name(backend)
    measured, chip = measure_peak_flops(backend, precision), chip_of_device(name)
    share = (
        f"gemm_share is of {units.format_count(measured)}FLOP/s per device (measured by a matrix "
        "product here)"
    )
    if chip is None:
        why = f"no MFU, because no data sheet of {name} is on file (--peak-flops gives its peak)"
        return Peaks(0.0, measured, f"{share}; {why}")
    published = chip.bf16_flops_per_s / chip.devices
    peak = f"{units.format_count(published)}FLOP/s per device (BF16 peak of {chip.name})"
    if warns and measured > published:
        notes.warn(
            f"{name}: a matrix product was measured at {units.format_count(measured)}FLOP/s, "
            f"expected at most {peak}; disregard gemm_share, and give --peak-flops if the device "
            "is not this chip"
        )
    return Peaks(published, measured, f"MFU is of {peak}, {share}")
