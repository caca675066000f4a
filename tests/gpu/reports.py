"""Text from the results of the GPU run: summary, dated report, comparison with older results."""

import json
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from cases import RESULTS, read_rows

Row = Mapping[str, Any]
BAD = ("failed", "crashed", "timeout")
# figures of which more is better, or less; others are not compared
BETTER = {
    "tokens_per_s": 1, "mfu": 1, "mfu_6nd": 1, "gain": 1, "ratio_to_peer": 1, "tflops": 1,
    "peak_bytes": -1, "idle_share": -1, "difference": -1, "step_s": -1, "seconds_per_layer": -1,
    "error_time": -1, "error_memory": -1,
}  # fmt: skip
COMPARED = {"difference", "of", "elements", "values"}  # figures of cases that compare results
SPARSE = 0.4  # share of filled cells below which a table has one column of figures
NOTICEABLE = 0.03  # relative change; the noise of repeated runs is below it


def last(rows: Iterable[Row]) -> list[Row]:
    """The result of each case, without those that have none."""
    results = {(r["part"], r["case"]): r for r in rows if r["status"] != "started"}
    return list(results.values())


def parts_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Results by part, in their order."""
    parts: dict[str, list[Row]] = {}
    for row in last(rows):
        parts.setdefault(row["part"], []).append(row)
    return parts


def exit_text(code: int) -> str:
    """How a process ended."""
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with exit status {code}"


def summary(rows: Sequence[Row]) -> str:
    """Cases by status of each part, then every case that does not hold."""
    lines = []
    for part, results in parts_of(rows).items():
        counts = {s: sum(r["status"] == s for r in results) for s in ("ok", "skipped", *BAD)}
        text = ", ".join(f"{n} {status}" for status, n in counts.items() if n)
        lines.append(f"{part:12} {text} ({sum(r['seconds'] for r in results):.0f} s)")
    for row in last(rows):
        if row["status"] in BAD:
            lines.append(f"{row['status']}: {row['part']}: {row['case']}: {row['message']}")
    return "\n".join(lines) or "no results"


def report(rows: Sequence[Row], today: str = "") -> str:
    """A dated section in Markdown: the environment, then a table per part."""
    today = today or date.today().isoformat()
    parts = parts_of(rows)
    machine = next(iter(parts.get("environment", [])), None)
    figures = machine["figures"] if machine else {}
    name = figures.get("device", "unknown device")
    lines = [f"## GPU run on {name}, {today}", "", "`python tests/gpu/run.py --out DIR`", ""]
    for part, results in parts.items():
        lines += [f"### {part}", "", *_table(results), ""]
    return "\n".join(lines)


def _table(results: Sequence[Row]) -> list[str]:
    columns = list(dict.fromkeys(key for row in results for key in row["figures"]))
    if columns and set(columns) <= COMPARED:
        return _condensed(results)
    nested = {key for key in columns for row in results if _is_nested(row["figures"].get(key))}
    return [
        *_plain_table(results, [c for c in columns if c not in nested]),
        *_lists(results, nested),
    ]


def _is_nested(value: Any) -> bool:
    """Whether a figure is too long for a cell: objects, such as the gaps of a trace."""
    return isinstance(value, dict) or (
        isinstance(value, list) and any(isinstance(one, dict) for one in value)
    )


def _lists(results: Sequence[Row], nested: Collection[str]) -> list[str]:
    """The nested figures of each case, an object a line."""
    lines = []
    for row in results:
        for key in (key for key in row["figures"] if key in nested):
            value = row["figures"][key]
            lines += ["", f"{row['case']}: {key}", ""]
            for one in value if isinstance(value, list) else [value]:
                words = [f"{k} {_cell(v)}" for k, v in one.items()]
                lines.append(f"- {', '.join(words)}")
    return lines


def _plain_table(results: Sequence[Row], columns: Sequence[str]) -> list[str]:
    cells = sum(key in row["figures"] for row in results for key in columns)
    if cells < len(columns) * len(results) * SPARSE:
        lines = ["| case | | figures |", "| --- | --- | --- |"]
        for row in results:
            figures = row["figures"]
            text = ", ".join(f"{key} {_cell(figures[key])}" for key in columns if key in figures)
            lines.append(f"| {row['case']} | {_status(row)} | {text} |")
        return lines
    lines = [f"| case | | {' | '.join(columns)} |", f"| --- | --- |{' --- |' * len(columns)}"]
    for row in results:
        figures = [_cell(row["figures"].get(key)) for key in columns]
        lines.append(f"| {' | '.join([row['case'], _status(row), *figures])} |")
    return lines


def _status(row: Row) -> str:
    return _escaped(row["status"] if not row["message"] else f"{row['status']}: {row['message']}")


def _condensed(results: Sequence[Row]) -> list[str]:
    """Cases by status and the largest difference of each group, then those that do not hold."""
    groups: dict[str, list[Row]] = {}
    for row in results:
        groups.setdefault(row["case"].split(" / ")[0], []).append(row)
    lines = ["| cases | ok | skipped | failed | largest difference |", "| --- |" + " --- |" * 4]
    for name, rows in groups.items():
        held = [row for row in rows if row["status"] == "ok"]
        skipped = sum(row["status"] == "skipped" for row in rows)
        worst = max((row["figures"].get("difference", 0.0) for row in held), default=0.0)
        numbers = (len(held), skipped, len(rows) - len(held) - skipped, _cell(worst))
        lines.append(f"| {name} | {' | '.join(map(str, numbers))} |")
    bad = [row for row in results if row["status"] in BAD]
    return lines + ([""] if bad else []) + [f"- {row['case']}: {_status(row)}" for row in bad]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and abs(value) >= 10000:
        return f"{value:,}"
    if isinstance(value, list | dict):
        return _escaped(json.dumps(value))
    return _escaped(str(value))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def comparison(old: Sequence[Row], new: Sequence[Row]) -> str:
    """What became better or worse, by case."""
    before = {(r["part"], r["case"]): r for r in last(old)}
    lines, common = [], 0
    for row in last(new):
        earlier = before.get((row["part"], row["case"]))
        if earlier is None:
            continue
        common += 1
        name = f"{row['part']}: {row['case']}"
        if (row["status"] in BAD) != (earlier["status"] in BAD):
            word = "worse" if row["status"] in BAD else "better"
            lines.append(f"{word}: {name}: {earlier['status']} → {row['status']}")
        for key, sign in BETTER.items():
            pair = earlier["figures"].get(key), row["figures"].get(key)
            if not all(isinstance(value, int | float) and value for value in pair):
                continue
            change = pair[1] / pair[0] - 1
            if abs(change) > NOTICEABLE and (key != "difference" or abs(change) > 1):
                word = "better" if change * sign > 0 else "worse"
                lines.append(f"{word}: {name}: {key} {pair[0]:.4g} → {pair[1]:.4g} ({change:+.0%})")
    lines.sort(key=lambda line: line.startswith("better"))
    return "\n".join([f"{common} cases in both results", *lines])


def write_report(out: Path) -> None:
    """Write report.md from the results in a folder."""
    (out / "report.md").write_text(report(read_rows(out / RESULTS)))
