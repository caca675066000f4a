"""Accelerators by name: peak rate, memory, node size, and bandwidth to host and network.

The figures are data (chips.toml) with source and date. Peaks are dense BF16. Memory has two values:
the marketed size, by which the article's table counts, and the bytes that the driver reports, which
layouts must fit (H100: 80 GB sold, 81,559 MiB = 85.5 GB there).
"""

import datetime
import re
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.options.option import unknown
from sabia.core.plan.catalogue import read_data

# key of chips.toml → field of Chip, and the factor to the field's unit; other keys are fields
SCALED = {
    "bf16_tflops": ("bf16_flops_per_s", 1e12),
    "fp8_tflops": ("fp8_flops_per_s", 1e12),
    "fp4_tflops": ("fp4_flops_per_s", 1e12),
    "int8_tops": ("int8_flops_per_s", 1e12),
    "hbm_gb": ("hbm_bytes", 1e9),
    "memory_mib": ("usable_hbm_bytes", 2**20),
    "hbm_tb_s": ("hbm_bytes_per_s", 1e12),
    "pcie_gb_s": ("host_bytes_per_s", 1e9),
    "nic_gb_s": ("network_bytes_per_s", 1e9),
    "scale_up_gb_s": ("scale_up_bytes_per_s", 1e9),
    "scale_up_chips": ("scale_up_domain", 1),
}


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator; rates are per second, `None` where no public figure exists.

    scale_up_bytes_per_s: unidirectional bandwidth of a chip inside its scale-up domain of
    `scale_up_domain` chips (a switch, or all links of a torus of `torus_axes` dimensions; 0 where
    there is no torus). network_bytes_per_s: the chip's share of its host's network. matmul_ceiling:
    best measured BF16 matrix product over the peak. device_names: a pattern of the names that torch
    and JAX report for one of the chip's `devices`. `fp8`, `fp4`: None also where the chip has no
    such units.
    """

    name: str
    family: str
    bf16_flops_per_s: float
    hbm_bytes: float
    usable_hbm_bytes: float
    memory_source: str
    node_chips: int
    host_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    source: str
    date: datetime.date | None
    fp8_flops_per_s: float | None = None
    fp4_flops_per_s: float | None = None
    int8_flops_per_s: float | None = None
    hbm_bytes_per_s: float | None = None
    scale_up_bytes_per_s: float | None = None
    scale_up_domain: int = 1
    torus_axes: int = 0
    matmul_ceiling: float | None = None
    fp8_matmul_ceiling: float | None = None
    power_w: float | None = None
    device_names: str = ""
    devices: int = 1


NAMES = {field: key for key, (field, _) in SCALED.items()}


def load_chips() -> dict[str, Chip]:
    """All chips by name."""
    return {name: chip_of_entry(name, entry) for name, entry in read_data("chips.toml").items()}


def chip_of_entry(name: str, entry: dict[str, Any]) -> Chip:
    """The chip of an entry with the keys of chips.toml."""
    figures = {key: value for key, value in entry.items() if key not in SCALED}
    scaled = {field: entry[key] * unit for key, (field, unit) in SCALED.items() if key in entry}
    return Chip(name=name, **figures, **scaled)


def find_chip(name: str, flag: str = "--chip") -> Chip:
    """The chip `name`, in any case; `v5p` means `tpu-v5p`. Raises UsageError naming `flag`."""
    chips = load_chips()
    wanted = name.strip().lower()
    for key in (wanted, f"tpu-{wanted}"):
        if key in chips:
            return chips[key]
    raise unknown(flag, wanted, chips)


def chip_of_device(name: str) -> Chip | None:
    """The chip whose device torch or JAX calls `name`; None where the catalogue has none."""
    chips = load_chips().values()
    return next((c for c in chips if name and re.fullmatch(c.device_names, name)), None)


def known(chip: Chip, field: str) -> float:
    """A figure of the chip. Raises UsageError naming its key where it is not on file."""
    value = getattr(chip, field)
    if value is None:
        raise UsageError(
            f"--chip: no {NAMES.get(field, field)} of {chip.name} is on file (expected a chip that "
            "has it, or a --machine file with it)"
        )
    return value
