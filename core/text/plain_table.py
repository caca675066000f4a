"""Small reports for people and for JSON: aligned columns, sparklines, no NaN."""

import math
from collections.abc import Sequence
from typing import Any

BARS = "▁▂▃▄▅▆▇█"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Lines of aligned columns, the first to the left, numbers to the right."""
    cells = [list(head), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in
             zip(row[1:], widths[1:], strict=True))]).rstrip() for row in cells]  # fmt: skip
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def sparkline(counts: Sequence[float]) -> str:
    """One bar a count, the highest for the largest; a blank for none."""
    top = max(counts, default=0) or 1
    return "".join(BARS[min(int(8 * c / top), 7)] if c else " " for c in counts)


def plain(value: Any) -> Any:
    """The value with null for numbers that JSON does not know."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
