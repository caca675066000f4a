"""Results over the checkpoints of a run: models whose names differ in their last number only."""

import re
from collections.abc import Iterable, Mapping

from sabia.core import page, svg
from sabia.core.bench.result_summary import Summary, unit_key
from sabia.core.bench.statistics import Interval

LEAST = 3  # checkpoints that make a curve
_NUMBERED = re.compile(r"(.*?)(\d+)$")


def runs(models: Iterable[str]) -> dict[str, list[tuple[int, str]]]:
    """(number, model) of the checkpoints of each run, in their order."""
    numbered_runs: dict[str, list[tuple[int, str]]] = {}
    for model in models:
        if match := _NUMBERED.match(model):
            numbered_runs.setdefault(match[1], []).append((int(match[2]), model))
    return {
        name: sorted(numbered)
        for name, numbered in numbered_runs.items()
        if len({number for number, _ in numbered}) >= LEAST
    }


def section(summary: Summary) -> list[str]:
    """A chart for each task and capability over the checkpoints, none where there are no runs."""
    curves: list[tuple[str, str, Mapping[str, Interval]]] = []  # title, unit, value by model
    for task, metric in summary.headlines.items():
        results = {model: summary.result(model, task) for model in summary.models}
        values = {model: r.interval for model, r in results.items() if r and r.items}
        curves.append((f"{task} ({metric})", unit_key(metric).replace("_", " "), values))
    for name, by_model in summary.capabilities.items():
        curves.append((f"capability {name}", "share", by_model))
    charts, by_run = [], runs(summary.models)
    for title, unit, by_model in curves:
        lines = [
            svg.Series(run.rstrip("-_./ ") or "run", points)
            for run, numbered in by_run.items()
            if len(points := [(float(number), by_model[model].value)
                              for number, model in numbered if model in by_model]) >= LEAST
        ]  # fmt: skip
        if lines:
            charts.append(page.figure(svg.line_chart(lines, title, "checkpoint", unit)))
    return [page.section("Over checkpoints", charts)] if charts else []
