"""One's own machine: a chip that chips.toml has not, from a TOML file (`--machine FILE`).

Keys are those of chips.toml, with units in their names, and of these:
- `measured_tflops`: the best BF16 matrix product that was measured, TFLOP/s. With `bf16_tflops`,
  the peak of the data sheet, it gives the ceiling of products; alone it stands for the peak;
- `usd_per_chip_hour`: the price, in US dollars;
- `name`: by default that of the file.
`memory_mib`, what the driver reports, is that of `hbm_gb` where it is absent, and the other way
round. `sabia plan-cluster --measure` writes such a file on the machine that it runs on.
"""

import dataclasses
from datetime import date
from pathlib import PurePath
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.files import read_toml
from sabia.core.plan.chips import SCALED, Chip, chip_of_entry, load_chips

FAMILIES = ("GPU", "TPU", "CPU", "chip")
TEXTS = {"name", "family", "source"}
WHOLE = {"node_chips", "scale_up_chips", "torus_axes"}
NUMBERS = WHOLE | SCALED.keys() | {"measured_tflops", "power_w", "usd_per_chip_hour"}
LARGEST = 1e9


@dataclasses.dataclass(frozen=True)
class Machine:
    """A chip of one's own and its price in US dollars per hour; None where the file has none."""

    chip: Chip
    usd_per_chip_hour: float | None


def load_machine(path: str) -> Machine:
    """The machine of the TOML file at `path`. Raises UsageError in one line."""
    entry = read_toml("--machine", path)
    return machine_of(entry, PurePath(path).stem, f"--machine: {path[:80]}")


def machine_of(entry: dict[str, Any], name: str, where: str) -> Machine:
    """The machine of the keys of a file. Raises UsageError naming a key, beginning with `where`."""
    unknown = sorted(entry.keys() - TEXTS - NUMBERS - {"date"})
    if unknown:
        known = ", ".join(sorted(TEXTS | NUMBERS | {"date"}))
        raise UsageError(f"{where}: unknown key {unknown[0][:40]!r} (expected some of {known})")
    for key, value in entry.items():
        _check(f"{where}: {key}", key, value)
    own = {"name": name[:40], "family": "GPU", "source": "--machine"} | entry
    if own["name"].lower() in load_chips():
        raise UsageError(f"{where}: name {own['name']!r} is a chip on file (expected another name)")
    measured, usd = own.pop("measured_tflops", None), own.pop("usd_per_chip_hour", None)
    sold, reported = own.get("hbm_gb"), own.get("memory_mib")
    if sold is None and reported is not None:
        own["hbm_gb"] = reported * (2**20 / 1e9)
    elif sold is not None:
        own.setdefault("memory_mib", sold * (1e9 / 2**20))
    own.setdefault("bf16_tflops", measured)
    missing = [key for key in ("bf16_tflops", "hbm_gb", "node_chips") if own.get(key) is None]
    if missing:
        alone = " or measured_tflops" if missing[0] == "bf16_tflops" else ""
        raise UsageError(f"{where}: {missing[0]}{alone} is missing (expected a number)")
    if measured is not None:
        peak = own["bf16_tflops"]
        if measured > peak:
            words = f"{measured:g} (expected at most bf16_tflops {peak:g})"
            raise UsageError(f"{where}: measured_tflops {words}")
        own["matmul_ceiling"] = measured / peak
    own.setdefault("scale_up_chips", own["node_chips"])
    own["memory_source"] = own["source"]
    own.setdefault("date", None)
    return Machine(chip_of_entry(own.pop("name"), own), usd)


def _check(where: str, key: str, value: Any) -> None:
    if key == "date":
        right, expected = isinstance(value, date), "a date such as 2026-11-24"
    elif key == "family":
        right, expected = value in FAMILIES, f"one of {', '.join(FAMILIES)}"
    elif key in TEXTS:
        right = isinstance(value, str) and value.isprintable() and 0 < len(value) <= 200
        expected = "a short text"
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        right = number and 0 < value <= LARGEST
        expected = f"a number above 0 and at most {LARGEST:g}"
        if key in WHOLE:
            right, expected = right and value == int(value), f"a whole {expected[2:]}"
    if not right:
        raise UsageError(f"{where}: {str(value)[:60]!r} (expected {expected})")
