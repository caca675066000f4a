"""The report of an evaluation: an HTML page with charts and tables, and a table for a terminal.

The page is self-contained (inline SVG, no script, no external resource) and at most about one
megabyte: examples are truncated, and only the most changed items of a comparison are shown.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sabia.core import page, svg
from sabia.core.bench import verdict_table
from sabia.core.bench.metrics import NO_ANSWER, metric_of
from sabia.core.bench.pages import item_browser
from sabia.core.bench.result_summary import Comparison, Result, Summary
from sabia.core.bench.score_rows import Score
from sabia.core.bench.statistics import Interval, interval_text
from sabia.core.bench.verdict_rows import VerdictRow

EXAMPLES = 3  # changed items shown in full for each comparison
EXAMPLE_CHARACTERS = 1_200
COMPARISONS_WITH_EXAMPLES = 12
IDS_SHOWN = 12
SHARES = "mean of shares"


def render(
    summary: Summary, scores: Sequence[Score], title: str, facts: Sequence[tuple[str, str]] = (),
    verdicts: Sequence[VerdictRow] = (), checks: Sequence[Mapping[str, Any]] = (),
    first: Sequence[str] = (),
) -> str:  # fmt: skip
    """The HTML page. facts: names and values of settings, listed at the end; checks: figures of
    judged scores, see `judged_checks`; first: sections before the others."""
    items = {r.task: r.items for r in summary.results}
    models, tasks = len(summary.models), len(summary.tasks)
    lead = (
        f"{models} {'model' if models == 1 else 'models'}, {tasks} "
        f"{'task' if tasks == 1 else 'tasks'}, {sum(items.values()):,} items. Intervals are 95 %; "
        "the method of each is given beside it."
    )
    parts = []
    if summary.results:
        parts = [page.paragraph(lead), *first]
        parts += [page.section("Results", [*_charts(summary), _results_table(summary)])]
    if summary.comparisons:
        parts.append(page.section("Models compared item by item", _comparisons(summary, scores)))
    parts += item_browser.section(scores, summary.headlines)
    judged = verdict_table.sections(verdicts)
    if checks:
        cells = [[_short(value) for value in check.values()] for check in checks]
        names = [name.replace("_", " ") for name in checks[0]]
        note = "rank correlations of the score with length and format within items, the share of "
        note += "formatted lines, and answers that hold what ends their part of the judge's prompt"
        judged.append(page.table(names, cells, note))
    if judged:
        parts.append(page.section("Rubric items and judges", judged))
    if facts:
        parts.append(page.section("Settings", [page.table(["what", "value"], facts)]))
    return page.page(title, parts)


def _short(value: object) -> Any:
    return f"{value:.3f}" if isinstance(value, float) else value


def _charts(summary: Summary) -> list[str]:
    """A bar chart for each unit among the headline metrics."""
    units: dict[str, list[str]] = {}
    for task, name in summary.headlines.items():
        units.setdefault(metric_of(name).unit or name, []).append(task)
    charts = []
    for unit, tasks in units.items():
        groups = []
        for task in tasks:
            results = [r for model in summary.models if (r := summary.result(model, task))]
            ends = ((r.model, r.interval.value, r.interval.low, r.interval.high) for r in results)
            if results:
                label = f"{task} ({summary.headlines[task]})"
                groups.append(svg.BarGroup(label, [svg.Bar(*end) for end in ends]))
        if groups:
            span = (0.0, 1.0) if unit == "share" else None
            name = "Accuracy" if unit == "share" else unit.capitalize()
            charts.append(page.figure(svg.bar_chart(groups, f"{name} by task", unit, span)))
    return charts


def value_text(result: Result) -> str:
    """A value with its interval: `0.512 [0.489, 0.535]`."""
    i = result.interval
    if result.maximum is not None:
        return f"{interval_text(i, '.2f')} of {result.maximum:g}"
    if result.items == 1 and i.method.startswith("bootstrap"):
        return f"{i.value:.4g} (one item: no interval)"
    return interval_text(i, ".4g")


def _results_table(summary: Summary) -> str:
    rows: list[list[Any]] = []
    for r in summary.results:
        metric = r.metric + (" *" if summary.headlines[r.task] == r.metric else "")
        counts = [r.items, f"{r.samples_per_item:g}", r.no_answer or "", r.no_verdict or ""]
        more = [bounds_text(r), _number(r.detectable), r.interval.method.replace("_", " ")]
        rows.append([r.task, r.model, metric, value_text(r), *counts, *more])
    means = [("all tasks", model, SHARES, i) for model, i in summary.overall.items()]
    for name, model, what, i in [*mean_rows(summary), *means]:
        method = i.method.replace("_", " ")
        rows.append([name, model, what, interval_text(i, ".4g"), *[""] * 6, method])
    columns = ["task", "model", "metric", "value [95 %]", "items", "samples", "no answer",
               "no verdict", "missing: wrong – right", "detectable", "interval"]  # fmt: skip
    note = (
        "* headline metric of its task. Samples without an answer or a verdict are not in the "
        "value: beside it is what it would be if all of them were wrong, and if all were right. "
        "Detectable is the smallest difference to another model that is found in 80 % of the cases "
        "if the two are not compared item by item."
    )
    return page.table(columns, rows, note)


def bounds_text(result: Result) -> str:
    """The value if all missing samples were wrong, and if all were right."""
    if result.bounds is None:
        return ""
    wrong, right = result.bounds
    return f"{wrong:.4g} – {'?' if math.isnan(right) else f'{right:.4g}'}"


def mean_rows(summary: Summary) -> list[tuple[str, str, str, Interval]]:
    """(name of a capability or group, model, what its value is, the mean over its tasks)."""
    rows = [
        (f"capability {name}", model, SHARES, interval)
        for name, by_model in summary.capabilities.items()
        for model, interval in by_model.items()
    ]
    return rows + [
        (f"group {one.group}", one.model, f"mean of {one.metric}", one.interval)
        for one in summary.groups
    ]


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else ""


def _comparisons(summary: Summary, scores: Sequence[Score]) -> list[str]:
    rows = [_comparison_row(c) for c in summary.comparisons]
    columns = ["task", "metric", "from", "to", "difference [95 %]", "detectable", "worse",
               "better", "items", "p", "p (Holm)", "test"]  # fmt: skip
    note = (
        "Difference is the second model minus the first, over the same items and samples; worse "
        "and better count samples (items, where each has one). McNemar's exact test for one "
        "yes/no sample an item, otherwise Student's t, by clusters of items. Detectable is the "
        "smallest difference that is found in 80 % of such comparisons."
    )
    parts = [page.table(columns, rows), page.paragraph(note, quiet=True)]
    details: dict[tuple[str, str, str], Mapping[str, Any]] = {}
    for score in scores:  # the detail of the first sample of each model, task and item
        if score.detail is not None:
            details.setdefault((score.model, score.task, score.item_id), score.detail)
    shown = [c for c in summary.comparisons if c.worse or c.better][:COMPARISONS_WITH_EXAMPLES]
    for c in shown:
        parts += _examples(c, details)
    return parts


def _comparison_row(c: Comparison) -> list[Any]:
    return [
        c.task, c.metric, c.model_a, c.model_b, interval_text(c.paired.difference, "+.4g"),
        _number(c.paired.detectable), c.paired.regressed, c.paired.fixed, c.paired.items,
        _p(c.paired.p_value), _p(c.p_holm),
        c.paired.test.replace("_", " "),
    ]  # fmt: skip


def _p(value: float) -> str:
    if math.isnan(value):
        return ""
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


Details = Mapping[tuple[str, str, str], Mapping[str, Any]]


def _examples(c: Comparison, details: Details) -> list[str]:
    parts = [f"<h3>{page.text(f'{c.task}: {c.model_a} → {c.model_b}')}</h3>"]
    for name, ids in (("worse", c.worse), ("better", c.better)):
        if ids:
            more = f" and {len(ids) - IDS_SHOWN} more" if len(ids) > IDS_SHOWN else ""
            parts.append(page.paragraph(f"{name}: {', '.join(ids[:IDS_SHOWN])}{more}"))
    for item in (*c.worse[:EXAMPLES], *c.better[:EXAMPLES]):
        before, after = (details.get((m, c.task, item)) for m in (c.model_a, c.model_b))
        if before or after:
            parts.append(page.preformatted(_example(item, c, before or {}, after or {})))
    return parts


def _example(item: str, c: Comparison, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    lines = [f"item {item}"]
    if question := before.get("question") or after.get("question"):
        lines.append(question)
    lines += [f"— {c.model_a}: {_answer_text(before)}", f"— {c.model_b}: {_answer_text(after)}"]
    if (answer := before.get("answer", after.get("answer"))) is not None:
        lines.append(f"— right answer: {answer}")
    text = "\n".join(lines)
    return text if len(text) <= EXAMPLE_CHARACTERS else text[:EXAMPLE_CHARACTERS] + "…"


def _answer_text(detail: Mapping[str, Any]) -> str:
    if detail.get(NO_ANSWER):
        return f"(no answer: {detail[NO_ANSWER]})"
    for name in ("response", "chosen"):
        if name in detail:
            return str(detail[name]).strip()
    return "(no answer kept)"


def terminal_table(summary: Summary, verdicts: Sequence[VerdictRow] = ()) -> str:
    """The headline results, the comparisons and the rubric items as plain text."""
    missing = any(r.missing for r in summary.results)
    more = ["missing", "wrong – right"] if missing else []
    rows = [["task", "model", "metric", "value [95 %]", "items", "samples", "detectable", *more]]
    for r in summary.results:
        if summary.headlines[r.task] == r.metric:
            counts = [str(r.items), f"{r.samples_per_item:g}", _number(r.detectable)]
            missed = [str(r.missing or ""), bounds_text(r)] if missing else []
            rows.append([r.task, r.model, r.metric, value_text(r), *counts, *missed])
    for name, model, what, i in mean_rows(summary):
        rows.append([name, model, what, interval_text(i, ".4g"), *[""] * (len(rows[0]) - 4)])
    lines = aligned(rows)
    if summary.comparisons:
        pairs = [
            ["task", "from → to", "difference [95 %]", "detectable", "worse", "better", "p (Holm)"]
        ]
        for c in summary.comparisons:
            row = _comparison_row(c)
            pair = f"{c.model_a} → {c.model_b}"
            pairs.append([c.task, pair, *map(str, row[4:8]), _p(c.p_holm)])
        lines += ["", *aligned(pairs)]
    if rows := verdict_table.terminal_lines(verdicts):
        lines = [*(lines if summary.results else []), "", *aligned(rows)]
    return "\n".join(lines)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns begin at the same place."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
