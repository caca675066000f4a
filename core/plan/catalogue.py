"""Read the data files (data/*.toml) and check each entry.

Every fact that changes over time (a chip's rate, a price) is data with a source and a date, never
code. An entry without either is an error, and so is an unknown key: a misspelt field would
otherwise be ignored silently.
"""

import functools
import os
import tomllib
from datetime import date
from typing import Any

from sabia.core.errors import BadData

DATA = os.path.join(os.path.dirname(__file__), "data")


@functools.cache
def read_data(name: str) -> dict[str, Any]:
    """The file `name` of `data/`, parsed once; callers must not change it."""
    with open(os.path.join(DATA, name), "rb") as file:
        return tomllib.load(file)


def check_entry(
    file: str, label: str, entry: dict[str, Any], required: set[str], optional: set[str]
) -> None:
    """Raise BadData unless `entry` has all required keys, no unknown one, and a real date."""
    missing = sorted(required - entry.keys())
    unknown = sorted(entry.keys() - required - optional)
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has unknown {', '.join(unknown)}"
        raise BadData(f"{file}: {label} {what} (expected {', '.join(sorted(required))})")
    if "date" in required and not isinstance(entry["date"], date):
        raise BadData(f"{file}: {label} date is {entry['date']!r} (expected YYYY-MM-DD)")


def median(values: list[float]) -> float:
    """The median; the statistics module takes longer to import than to run."""
    ordered, half = sorted(values), len(values) // 2
    return (ordered[half] + ordered[~half]) / 2
