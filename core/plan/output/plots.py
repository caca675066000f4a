"""Charts of a plan: chips and cost against the deadline, memory by term, the Pareto front.

The figures come from the functions of the plan, at more deadlines than the table has. Charts are
made by core.svg; `document` joins them in one self-contained SVG or HTML file.
"""

import math
import os
import re
from collections.abc import Sequence
from functools import partial

from sabia.core import page, svg
from sabia.core.errors import UsageError
from sabia.core.plan import placed, planner
from sabia.core.plan.money.prices import DAY_S, Price, cost_usd
from sabia.core.plan.output.several import SummaryRow
from sabia.core.plan.planner import DeadlineRow, Plan
from sabia.core.plan.request import PlanRequest
from sabia.core.svg import Bar, BarGroup, Series

POINTS = 40
FORMS = (".svg", ".html")
_GAP = 16


def check_form(path: str) -> None:
    """Raise UsageError on a file format that is not supported."""
    if path.endswith(".png"):
        more = "a browser or rsvg-convert converts an SVG to PNG"
        raise UsageError(f"--plot: {path} (expected .svg or .html; {more})")
    if not path.endswith(FORMS):
        raise UsageError(f"--plot: {path} (expected a name that ends in .svg or .html)")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise UsageError(f"--plot: {folder} is not a directory (expected one that exists)")


def of_plan(request: PlanRequest, plan: Plan) -> list[str]:
    """Charts of one plan, as SVG elements."""
    charts = []
    if not (plan.cluster.chips or (plan.problem and not plan.searched)):
        charts += _by_deadline(request, plan)
    charts.append(_memory_by_term(plan))
    return charts + ([_pareto(plan)] if plan.searched else [])


def _by_deadline(request: PlanRequest, plan: Plan) -> list[str]:
    """Chips and, with prices, cost."""
    rows = _replanned(plan, _spread([s / DAY_S for s in request.deadlines_s]))
    charts = [svg.line_chart(_chip_lines(rows), "Chips by deadline", "deadline, days", "chips")]
    if plan.cluster.prices:
        lines = [_cost_line(plan, rows, price) for price in plan.cluster.prices]
        top = max(y for line in lines for _, y in line.points if math.isfinite(y))
        axes = "Cost by deadline", "deadline, days", "US dollars"
        charts.append(svg.line_chart(lines, *axes, y_range=(0, top)))
    return charts


def _spread(days: list[float]) -> list[float]:
    """POINTS deadlines, evenly spaced by ratio, around the requested ones."""
    low, high = math.log(min(days) / 2), math.log(max(days) * 2)
    return [math.exp(low + (high - low) * n / (POINTS - 1)) for n in range(POINTS)]


def _replanned(plan: Plan, days: list[float]) -> list[DeadlineRow]:
    """The plan's rows for other deadlines."""
    deadlines_s, given = [day * DAY_S for day in days], (plan.run, plan.cluster)
    if plan.searched is None:
        return list(planner.by_mfu(*given, deadlines_s).rows)
    chosen = plan.searched.cheapest_in_time(deadlines_s, partial(planner.end_in, *given))
    pairs = zip(chosen, deadlines_s, strict=True)
    return [placed.row_of(*given, plan.searched, *pair) for pair in pairs]


def _chip_lines(rows: list[DeadlineRow]) -> list[Series]:
    by_day = [(row.deadline_s / DAY_S, row) for row in rows]
    if rows[0].layout:
        used = [(day, float(r.chips) if r.meets_deadline else math.nan) for day, r in by_day]
        return [Series("cheapest layout in time", used)]
    lines = {"by compute": "compute_min_chips", "by memory": "memory_min_chips", "used": "chips"}
    return [
        Series(name, [(day, getattr(row, field)) for day, row in by_day])
        for name, field in lines.items()
    ]


def _cost_line(plan: Plan, rows: list[DeadlineRow], price: Price) -> Series:
    name = f"{price.label} ${price.usd_per_chip_hour:g}" if price.tier else price.label
    costs = [plan.cost_usd(price, row) if row.meets_deadline else math.nan for row in rows]
    days = [row.deadline_s / DAY_S for row in rows]
    return Series(name, list(zip(days, costs, strict=True)))


def _memory_by_term(plan: Plan) -> str:
    """Bytes on the fullest chip of the best layout, or of the cluster with the whole batch."""
    if plan.best.layout:
        terms = plan.best.layout.memory.terms
        bars = {term.name: float(term.bytes) / 1e9 for term in terms if term.bytes}
        title, label = "Memory of the fullest chip, by term", "GB"
    else:
        run, parts = plan.run, ("weights", "gradients", "optimizer")
        bars = {part: run.params * getattr(run.recipe, part) / 1e12 for part in parts}
        bars["activations of the batch"] = run.activation_bytes / 1e12
        title, label = "Memory of the cluster, by term", "TB"
    ordered = sorted(bars.items(), key=lambda term: -term[1])
    groups = [BarGroup(name, [Bar(label, value)]) for name, value in ordered]
    return svg.bar_chart(groups, title, label)


def _pareto(plan: Plan) -> str:
    """Pareto-optimal layouts in time and cost, up to twice the longest deadline."""
    assert plan.searched is not None
    longest = 2 * max(row.deadline_s for row in plan.rows)
    rates = [price.usd_per_chip_hour for price in plan.cluster.prices]
    unit = "US dollars, lowest price" if rates else "chip-hours"

    def point(end_s: float, billed_s: float) -> tuple[float, float]:
        return end_s / DAY_S, cost_usd(billed_s, min(rates, default=1.0))

    given, shown = (plan.run, plan.cluster), list[tuple[float, float]]()
    for end in sorted(planner.end_in(*given, row) for row in plan.searched.front):
        if not shown or end[1] < shown[-1][1]:
            shown.append(end)
    near = [end for end in shown if end[0] <= longest] or shown[:1]
    lines = [Series("Pareto-optimal layouts", [point(*end) for end in near])]
    chosen = {row.chips: point(row.finishes_s, row.chip_s) for row in plan.rows}
    lines += [Series(f"chosen: {chips:,} chips", [at]) for chips, at in sorted(chosen.items())]
    return svg.line_chart(lines, "Pareto front of layouts", "days", unit)


def of_several(named: Sequence[tuple[str, SummaryRow]]) -> list[str]:
    """Charts of several plans: days and cost of each."""
    made = [(name, row) for name, row in named if not row["error"]]
    days = [BarGroup(name, [Bar("days", row["finishes_s"] / DAY_S)]) for name, row in made]
    billed = [(name, row["costs_usd"]) for name, row in made if row["costs_usd"]]
    costs = [BarGroup(name, [Bar(*bill) for bill in bills.items()]) for name, bills in billed]
    charts = [svg.bar_chart(days, "Days", "days")]
    return charts + ([svg.bar_chart(costs, "Cost", "US dollars", form=",.0f")] if costs else [])


def of_rows(rows: Sequence[SummaryRow], name: str, value: str, title: str) -> list[str]:
    """A chart of one column of rows."""
    groups = [BarGroup(str(row[name]), [Bar(value, float(row[value]))]) for row in rows]
    return [svg.bar_chart(groups, title, value, form=",.0f")]


def document(path: str, title: str, text: str, charts: Sequence[str]) -> str:
    """The text of the file at `path`: HTML with the plan's table, or one SVG with all charts."""
    if not charts:
        raise UsageError("--plot: this output has no charts (expected without --plot)")
    if path.endswith(".html"):
        return page.page(title, [page.preformatted(text), *map(page.figure, charts)])
    return _one_svg(charts)


def _one_svg(charts: Sequence[str]) -> str:
    """Charts one below the other on white, with colours instead of CSS variables.

    Not every SVG renderer supports variables.
    """
    parts, y = [], 0
    for chart in charts:
        height = re.search(r'height="(\d+)"', chart)
        assert height is not None
        parts.append(chart.replace("<svg ", f'<svg y="{y}" ', 1))
        y += int(height[1]) + _GAP
    colours = dict(re.findall(r"--([\w-]+): (#\w+)", page.STYLE.partition("@media")[0]))
    rules = "\n".join(re.findall(r"(?m)^svg.*$", page.STYLE))
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{svg.WIDTH}" height="{y}" '
        f'viewBox="0 0 {svg.WIDTH} {y}">\n<style>{rules}</style>\n'
        f'<rect width="{svg.WIDTH}" height="{y}" fill="var(--back)"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )
    return re.sub(r"var\(--([\w-]+)\)", lambda match: colours[match[1]], text)
