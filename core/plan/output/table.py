"""A plan as text: its inputs, one row per deadline, a verdict.

Chips are shown rounded up (the exact 63.01 is in the `nodes` line and in JSON). This module only
formats; every figure comes from the plan. The texts of lines are in data/lines.txt.
"""

import re
import string
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from sabia.core.plan import compute
from sabia.core.plan.catalogue import read_text
from sabia.core.plan.money.prices import DAY_S, cost_usd_per_day, format_rate, short_money
from sabia.core.plan.planner import Plan, Run
from sabia.core.plan.request import PlanRequest
from sabia.core.units import format_bytes, format_count, format_duration

WIDTH = 80  # columns of a terminal, where it does not say
LABEL = re.compile(r"[a-z][a-z ]{8} (?=\S)")
Cell = str | Callable[[Mapping[str, Any]], str]


def render(request: PlanRequest, plan: Plan) -> str:
    """The whole report, lines joined."""
    best, chip, prices = plan.best, plan.cluster.chip, plan.cluster.prices
    head = ["DEADLINE", "BY COMPUTE", "BY MEMORY", "USE", "FINISHES"]
    head += [(p.named_rate if p.tier else f"at {p.named_rate}").upper() for p in prices]
    rows = [
        [
            format_duration(row.deadline_s),
            f"{compute.whole_chips(row.compute_min_chips):,}",
            f"{row.memory_min_chips:,}",
            f"{row.chips:,}",
            span(row.finishes_s) + ("" if row.meets_deadline else " late"),
            *(short_money(plan.cost_usd(price, row)) for price in prices),
        ]
        for row in plan.rows
    ]
    lines = [*_header(request, plan), *columns(head, rows), f"verdict   {verdict(plan)}"]
    if prices:
        costs = ", ".join(
            f"${cost_usd_per_day(best.chips, price.usd_per_chip_hour):,.0f} {price.label}"
            for price in prices
        )
        lines.append(f"per day   {best.chips} {chip.name.upper()}: {costs}")
    elif request.refused_price:
        lines.append(f"price     none: {request.refused_price}")
    if not plan.problem:
        size, exact = chip.node_chips, [row.compute_min_chips for row in plan.rows]
        figures = {
            "exact": " / ".join(f"{chips:.2f}" for chips in exact),
            "whole": " / ".join(str(compute.whole_nodes(chips, size)) for chips in exact),
            "memory": compute.whole_nodes(plan.memory_min_chips, size),
        }
        lines.append(words("nodes", figures, size=size))
    if request.assumed:
        lines.append(f"assumed   {'; '.join(request.assumed)}")
    return "\n".join(lines)


def table_of(cells: Mapping[str, Cell], rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines of a table of figures.

    cells: head of a column → its text, as a format of the figures ("{chips:,}") or a function.
    """
    return columns(list(cells), [texts_of(cells, row) for row in rows])


def texts_of(cells: Mapping[str, Cell], row: Mapping[str, Any] | None) -> list[str]:
    """The texts of one row; '-' in each column where there is none."""
    if row is None:
        return ["-"] * len(cells)
    return [cell(row) if callable(cell) else worded(cell, row) for cell in cells.values()]


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: first column left, the others right, two spaces between.

    The head takes several lines where one would make the table wider than WIDTH.
    """
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    if sum(widths) + 2 * (len(head) - 1) > WIDTH:
        bodies = [max((len(row[i]) for row in rows), default=1) for i in range(len(head))]
        cells = [_stacked(cell, body) for cell, body in zip(head, bodies, strict=True)]
        depth = max(map(len, cells))
        heads = list(zip(*([""] * (depth - len(cell)) + cell for cell in cells), strict=True))
        return _aligned([*heads, *rows])
    return _aligned([head, *rows])


def _stacked(cell: str, least: int) -> list[str]:
    """The words of a cell in lines as wide as the column's other cells, or its longest word."""
    width = max(least, *map(len, cell.split()), 1)
    return textwrap.wrap(cell, width, break_on_hyphens=False) or [""]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def wrapped(text: str, width: int) -> str:
    """The report for a terminal: labelled lines wrap under their text, and a command goes on
    after a backslash. Tables stay as they are."""
    lines = []
    for line in text.split("\n"):
        label = LABEL.match(line)
        if label is None or len(line) <= width:
            lines.append(line)
            continue
        command = line.startswith("command")
        parts = textwrap.wrap(
            line, width - 2 * command, subsequent_indent=" " * label.end(),
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        lines += [part + " \\" for part in parts[:-1]] if command else parts[:-1]
        lines.append(parts[-1])
    return "\n".join(lines)


def percent(share: float) -> str:
    """0.4 → 40%, 0.001 → 0.1%."""
    return f"{share * 100:g}%"


def span(seconds: float) -> str:
    """Days with one decimal ('7.0d'); shorter times in their own unit."""
    return f"{seconds / DAY_S:.1f}d" if seconds >= DAY_S else format_duration(seconds)


def short_time(seconds: float) -> str:
    """40 min, 12 s, 0.3 s."""
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 2 else f"{seconds:.1f} s"


def tons(value: float) -> str:
    """173 t, 8.9 t, 12 kg."""
    if value < 1:
        return f"{value * 1e3:.0f} kg"
    return f"{value:,.0f} t" if value >= 10 else f"{value:.1f} t"


FORMATS: dict[str, Callable[[Any], str]] = {
    "money": short_money, "rate": format_rate, "span": span, "time": short_time,
    "percent": percent, "count": format_count, "count1": partial(format_count, digits=1),
    "count2": partial(format_count, digits=2), "bytes": format_bytes, "duration": format_duration,
    "tons": tons, "power": lambda value: f"{value:.3g}".replace("e+", "e"),
    "days": lambda seconds: f"{seconds / DAY_S:.2f}d",
    "minutes": lambda seconds: f"{seconds / 60:.0f} min",
}  # fmt: skip


class _Words(string.Formatter):
    def format_field(self, value: Any, spec: str) -> Any:
        return FORMATS[spec](value) if spec in FORMATS else super().format_field(value, spec)


@cache
def _lines() -> dict[str, str]:
    lines = (line for line in read_text("lines.txt").split("\n") if line and line[0] != "#")
    return {name: text for name, _, text in (line.partition(" = ") for line in lines)}


def worded(text: str, figures: Mapping[str, Any]) -> str:
    """A text with figures in {}, each in a format of Python or of FORMATS."""
    return _Words().vformat(text, (), figures)


def words(name: str, figures: Mapping[str, Any] | None = None, **more: Any) -> str:
    """The line `name` of data/lines.txt with its figures, and more of them."""
    return worded(_lines()[name], {**(figures or {}), **more})


def _header(request: PlanRequest, plan: Plan) -> list[str]:
    run, cluster = plan.run, plan.cluster
    convention = _convention(run)
    counted, active = format_count(run.matmul_params, 2), format_count(run.active_params, 2)
    if counted != active and run.flops_per_token is None:
        convention += f", N = {counted} without the input lookup"
    model = words("counts", run=run, assumed="assumed " * run.origin.startswith("assumed"))
    peak, sustained = cluster.chip.bf16_flops_per_s / 1e15, cluster.flops_per_chip_s / 1e15
    mfu = f"{cluster.mfu:.0%} predicted" if plan.problem else percent(cluster.mfu)
    speed = words("rate", chip=cluster.chip, peak=peak, sustained=sustained, mfu=mfu)
    # memory of the cluster with the activations of the whole batch, or of the fullest chip
    held, name = words("state", run=run), cluster.chip.name.upper()
    if plan.problem and plan.best.layout:
        each, limit = plan.best.layout.memory.total, plan.problem.memory_limit_bytes
        given = {"best": plan.best, "chip": name, "each": each, "limit": limit}
        memory_line = words("memory_layout", given, state=held)
    else:
        memory_line = words("memory", run=run, state=held)
    width, hours = max(len(model), len(speed)) + 3, plan.chip_hours
    given = {"width": width, "chip_hours": hours, "family": cluster.chip.family}
    return [
        words("model", given, model=model, flops=run.train_flops, convention=convention),
        words("speed", given, speed=speed),
        memory_line,
    ]


def _convention(run: Run) -> str:
    """The convention for FLOPs, which every MFU refers to."""
    attention = {"palm": "attention in full", "causal": "half of attention"}.get(run.convention)
    if run.adapter_params is not None:
        words = f"LoRA with {format_count(run.adapter_params, 2)} trained"
        return f"{words}, {attention or 'without attention'}"
    if attention:
        return f"{run.convention}: {attention}"
    return "4ND, LoRA" if run.lora else "6ND"


def verdict(plan: Plan) -> str:
    """One or two sentences: the chips, what limits them, the time and the lowest cost."""
    best, name = plan.best, plan.cluster.chip.name.upper()
    least_usd = min((plan.cost_usd(price) for price in plan.cluster.prices), default=None)
    bill = "" if least_usd is None else f", {short_money(least_usd)}"
    weeks = f" ({best.finishes_s / DAY_S / 7:.1f} weeks)" if best.finishes_s > 60 * DAY_S else ""
    days = best.finishes_s / DAY_S
    took = f"{days:.1f} days{weeks}" if days >= 1 else format_duration(best.finishes_s)
    with_stops = " with interruptions" if best.expected else ""
    done = f"finishes in {took}{with_stops}{bill}."
    least = plan.accumulated_min_chips
    hold = f"With gradient accumulation {least} hold{'' if least > 1 else 's'} the state."
    if plan.problem:
        several = plan.searched and plan.searched.sizes > 1
        hold = f"No layout fits on fewer than {least}." if several else ""
    if plan.cluster.chips or (plan.problem and not plan.searched):
        # the deadlines that it does not meet, and how it uses its memory
        late = [row for row in plan.rows if not row.meets_deadline]
        needed = (f"{format_duration(r.deadline_s)} would need {r.chips_needed}." for r in late)
        if best.chips < plan.memory_min_chips:
            run, cluster = plan.run, plan.cluster
            free = best.chips * cluster.hbm_bytes - run.state_bytes
            live = max(0, int(free // run.live_bytes(1)))
            passes = -(-run.batch_tokens // live)
            hold = words("accumulate", most=plan.memory_min_chips, live=live, passes=passes)
        return " ".join([f"given {best.chips} {name}: {done}", *needed, hold]).rstrip()
    if best.bound == "memory":
        return f"memory-bound: {best.chips} {name}, {done} {hold}"
    within = format_duration(best.deadline_s)
    return f"compute-bound: {best.chips} {name} for {within}, {done} {hold}"
