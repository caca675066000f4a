"""Markdown for model cards: tables, shares, and what is said where nothing is known."""

import os
import re
from collections.abc import Iterable, Sequence

from sabia.core.recipes.report.card_content import Shares, largest_first

UNKNOWN = "not recorded"
FILL_IN = "**[to be filled in by the provider]**"


def table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table; empty cells say that nothing is recorded."""
    lines = [_row(names), _row(["---"] * len(names))]
    return [*lines, *(_row([_cell(one) for one in row]) for row in rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return plain(str(value)) if value not in ("", None) else UNKNOWN


def plain(text: str) -> str:
    """A text of one line that Markdown shows as it is."""
    return re.sub(r"([\\`|<>*_\[\]])", r"\\\1", " ".join(text.split()))


def shares_table(title: str, shares: Shares, most: int | None = None) -> list[str]:
    """Names with their documents and shares of all bytes, the largest first."""
    ordered = largest_first(shares)
    total = sum(one.size for _, one in ordered)
    rows = [(name, one.documents, share(one.size, total)) for name, one in ordered[:most]]
    lines = table([title, "documents", "share of text bytes"], rows)
    if len(ordered) > len(rows):
        lines.append(f"\n{len(ordered) - len(rows):,} more are not listed.")
    return lines


def share(part: float, whole: float) -> str:
    """A percentage."""
    return f"{part / whole:.2%}" if whole else UNKNOWN


def flops(count: float) -> str:
    """FLOPs in powers of ten."""
    return f"{count:.3g} FLOP"


def short_path(path: str) -> str:
    """A path below the current folder without that."""
    return path.removeprefix(f"{os.getcwd()}/")
