"""Compare the article's figures with sabia's: python plan_maritaca_report.py FOLDER.

FOLDER has one RUN.json for each run that examples/plan_maritaca.toml names, as
`sabia plan-cluster --json` prints it. Exit 1 if a figure differs without a reason in that file.
"""

import json
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).with_name("plan_maritaca.toml")
WIDTHS = (43, 12, 10, 0)


@dataclass(frozen=True)
class Compared:
    """One figure: the article's as printed, sabia's, the difference and its reason."""

    part: str
    what: str
    article: str
    sabia: float
    difference: str
    why: str

    @property
    def unexplained(self) -> bool:
        """Whether the two differ without a reason."""
        return bool(self.difference) and not self.why


def value_at(reports: dict[str, Any], location: str) -> float:
    """The number at RUN:path, path being keys and list positions with dots between."""
    run, path = location.split(":")
    value = reports[run]
    for step in path.split("."):
        value = value[int(step)] if isinstance(value, list) else value[step]
    return float(value)


def compare(figure: dict[str, Any], reports: dict[str, Any]) -> Compared:
    """Sabia's figure, and by how much it is outside what the article prints."""
    sabia = value_at(reports, figure["at"]) / figure.get("scale", 1)
    if "over" in figure:
        sabia /= value_at(reports, figure["over"])
    article, within = figure["article"], figure.get("within", 0)
    low, high = article if isinstance(article, list) else (article, article)
    slack = within * (1 + 1e-9) + 1e-9
    off = sabia - low if sabia < low - slack else sabia - high if sabia > high + slack else 0.0
    shown = f"{high:g}" if low == high else f"{low:g} to {high:g}" if low else f"at most {high:g}"
    why = figure.get("why", "") if off else ""
    return Compared(figure["part"], figure["what"], shown, sabia, f"{off:+.3g}" if off else "", why)


def short(value: float) -> str:
    """Four digits: 45.37, 0.5444, 151, 45,370."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def row(*cells: str) -> str:
    """The first cell left, the others right."""
    first, *others = zip(cells, WIDTHS, strict=True)
    line = first[0].ljust(first[1]) + "".join(cell.rjust(width) for cell, width in others[:-1])
    return f"{line}  {others[-1][0]}".rstrip()


def lines(figures: list[Compared]) -> list[str]:
    """The comparison, part by part, and a summary."""
    table, part = [row("", "ARTICLE", "SABIA", "DIFFERENCE")], ""
    for figure in figures:
        if figure.part != part:
            part = figure.part
            table += ["", part]
        cells = (figure.article, short(figure.sabia), figure.difference)
        table.append(row("  " + figure.what, *cells))
        table += textwrap.wrap(figure.why, 92, initial_indent="      ", subsequent_indent="      ")
    differ = [figure for figure in figures if figure.difference]
    alike = len(figures) - len(differ)
    summary = (
        f"{len(figures)} figures: {alike} are equal to the article's or in its range, "
        f"{len(differ)} differ, each for the reason given below it."
    )
    return [*table, "", summary]


def load(folder: Path) -> list[Compared]:
    """All figures of the TOML file with the reports of `folder`."""
    figures = tomllib.loads(FIGURES.read_text(encoding="utf-8"))["figure"]
    reports = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return [compare(figure, reports) for figure in figures]


def main() -> int:
    """Print the comparison of the folder that is named."""
    figures = load(Path(sys.argv[1]))
    print("\n".join(lines(figures)))
    unexplained = [figure.what for figure in figures if figure.unexplained]
    if unexplained:
        print(
            f"plan_maritaca: figures that differ without a reason: {', '.join(unexplained)}",
            file=sys.stderr,
        )
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
