"""Accelerators by name: peak rate, memory, node size, and the way out to host and storage.

The figures are data (chips.toml) with their source and date. Peaks are dense BF16; memory is
kept twice where marketing and programs disagree (B200: 192 GB sold, 180 GB usable).
"""

import datetime
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.options.option import unknown
from sabia.core.plan.catalogue import check_entry, read_data

REQUIRED = {"family", "bf16_tflops", "hbm_gb", "node_chips", "source", "date"}
OPTIONAL = {
    "usable_gb", "pcie_gb_s", "nic_gb_s", "fp8_tflops", "fp4_tflops", "int8_tops", "hbm_tb_s",
    "scale_up_gb_s", "scale_up_chips", "torus_axes", "matmul_ceiling",
    "fp8_matmul_ceiling", "power_w",
}  # fmt: skip


@dataclass(frozen=True)
class Chip:
    """One accelerator; rates per second, `None` where no public figure was found.

    scale_up_bytes_per_s: one way, of a chip inside its fast domain of `scale_up_domain` chips (a
    switch, or all links of a torus of `torus_axes` dimensions; 0 where there is no torus).
    network_bytes_per_s: the chip's share of its host's network. matmul_ceiling: best measured BF16
    matrix product over the peak. `fp8`, `fp4`: None too where the chip has no such units.
    """

    name: str
    family: str
    bf16_flops_per_s: float
    hbm_bytes: float
    usable_hbm_bytes: float
    node_chips: int
    host_bytes_per_s: float | None
    network_bytes_per_s: float | None
    source: str
    date: datetime.date
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


def load_chips(data: dict[str, Any] | None = None) -> dict[str, Chip]:
    """All chips by name; `data` stands in for chips.toml. Raises BadData on a faulty entry."""
    entries = read_data("chips.toml") if data is None else data
    return {name: _chip(name, entry) for name, entry in entries.items()}


def _chip(name: str, entry: dict[str, Any]) -> Chip:
    check_entry("chips.toml", name, entry, REQUIRED, OPTIONAL)
    return Chip(
        name=name,
        family=entry["family"],
        bf16_flops_per_s=entry["bf16_tflops"] * 1e12,
        hbm_bytes=entry["hbm_gb"] * 1e9,
        usable_hbm_bytes=entry.get("usable_gb", entry["hbm_gb"]) * 1e9,
        node_chips=entry["node_chips"],
        host_bytes_per_s=_per_second(entry, "pcie_gb_s"),
        network_bytes_per_s=_per_second(entry, "nic_gb_s"),
        source=entry["source"],
        date=entry["date"],
        fp8_flops_per_s=_per_second(entry, "fp8_tflops", 1e12),
        fp4_flops_per_s=_per_second(entry, "fp4_tflops", 1e12),
        int8_flops_per_s=_per_second(entry, "int8_tops", 1e12),
        hbm_bytes_per_s=_per_second(entry, "hbm_tb_s", 1e12),
        scale_up_bytes_per_s=_per_second(entry, "scale_up_gb_s"),
        scale_up_domain=entry.get("scale_up_chips", 1),
        torus_axes=entry.get("torus_axes", 0),
        matmul_ceiling=entry.get("matmul_ceiling"),
        fp8_matmul_ceiling=entry.get("fp8_matmul_ceiling"),
        power_w=entry.get("power_w"),
    )


def _per_second(entry: dict[str, Any], key: str, unit: float = 1e9) -> float | None:
    return entry[key] * unit if key in entry else None


def find_chip(name: str, flag: str = "--chip") -> Chip:
    """The chip called `name`, in any case; `v5p` finds `tpu-v5p`. UsageError naming `flag`."""
    chips = load_chips()
    wanted = name.strip().lower()
    for key in (wanted, f"tpu-{wanted}"):
        if key in chips:
            return chips[key]
    raise unknown(flag, wanted, chips)


def known(chip: Chip, field: str) -> float:
    """A figure of the chip. Raises UsageError naming the field where the catalogue has none."""
    value = getattr(chip, field)
    if value is None:
        raise UsageError(
            f"--chip: {chip.name} has no published {field} (expected a chip that has one, or a "
            "layout that does not need it)"
        )
    return value
