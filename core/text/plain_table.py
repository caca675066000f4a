"""Small reports: aligned tables, sparklines, and values for JSON without NaN."""

import math
from collections.abc import Sequence
from typing import Any

BARS = "▁▂▃▄▅▆▇█"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table in aligned columns: the first one left-aligned, the others right-aligned."""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    first, *widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = ""
    for name, *values in cells:
        aligned = (value.rjust(width) for value, width in zip(values, widths, strict=True))
        text += "  ".join([name.ljust(first), *aligned]).rstrip() + "\n"
    return text


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def sparkline(counts: Sequence[float]) -> str:
    """One bar per count, scaled to the largest; a space for 0."""
    top = max(counts, default=0) or 1
    return "".join(BARS[min(int(8 * c / top), 7)] if c else " " for c in counts)


def plain(value: object) -> Any:
    """The value with null for NaN and infinite numbers, which JSON does not have."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
