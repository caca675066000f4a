"""Results over the checkpoints of a run: models whose names differ in their last number only."""

import re
from collections.abc import Iterable

from sabia.core import page, svg
from sabia.core.bench.result_summary import Summary, unit_key

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
    by_run = runs(summary.models)
    charts = []
    for task, metric in summary.headlines.items():
        lines = [
            svg.Series(name.rstrip("-_./ ") or "run", points)
            for name, numbered in by_run.items()
            if len(points := [
                (float(number), result.interval.value)
                for number, model in numbered
                if (result := summary.result(model, task)) and result.items
            ]) >= LEAST
        ]  # fmt: skip
        if lines:
            unit = unit_key(metric).replace("_", " ")
            charts.append(
                page.figure(svg.line_chart(lines, f"{task} ({metric})", "checkpoint", unit))
            )
    for capability, by_model in summary.capabilities.items():
        lines = [
            svg.Series(name.rstrip("-_./ ") or "run", points)
            for name, numbered in by_run.items()
            if len(points := [(float(number), by_model[model].value)
                              for number, model in numbered if model in by_model]) >= LEAST
        ]  # fmt: skip
        if lines:
            title = f"capability {capability}"
            charts.append(page.figure(svg.line_chart(lines, title, "checkpoint", "share")))
    return [page.section("Over checkpoints", charts)] if charts else []
