"""A plan by predicted speed: from parallel layouts, instead of a given MFU.

`--search` finds the best layout on `--chips`, or the cheapest number of chips that meets each
deadline. `--fixed-layout` predicts the step time of one layout; with `--search` it fixes these
values and the search chooses the others. Returns a Plan (planner.py) whose rows have layouts.

The plan of one run: at a given utilization, or by the predicted speed of a layout.
"""

from dataclasses import replace
from datetime import date
from functools import partial
from typing import Any

from sabia.core.errors import Infeasible, UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan import planner
from sabia.core.plan.device import search_rules
from sabia.core.plan.device.layout import Workload, find_stack, stack_on
from sabia.core.plan.device.search import SearchResult, search
from sabia.core.plan.device.search_fixes import coarse
from sabia.core.plan.device.search_rules import SearchProblem
from sabia.core.plan.device.survey import TimedLayout, priced
from sabia.core.plan.memory import RECIPES
from sabia.core.plan.planner import DeadlineRow, Plan
from sabia.core.plan.request import PlanRequest, build
from sabia.core.units import format_bytes

SLOWEST_MFU = 0.1  # lower MFU is not planned for; this bounds the numbers of chips to search
MOST_CHIPS = 65536


def plan(request: PlanRequest) -> Plan:
    """The plan by predicted speed. Raises UsageError, Infeasible."""
    calm = replace(request.cluster, chips=None, stops=None)
    base = planner.by_mfu(request.run, calm, request.deadlines_s)
    problem, searched = question_of(request), None
    if request.settings.search:
        given = request.cluster.chips
        counts = [given] if given else _counts(request, problem)
        searched = search(problem, counts, request.settings.value("objective"))
    # with the state of the software, and the batch in whole rows
    recipe, batch_tokens = problem.workload.recipe, problem.workload.batch_tokens
    run = replace(request.run, recipe=recipe, batch_tokens=batch_tokens)
    cluster, chosen = request.cluster, _chosen(request, run, problem, searched)
    pairs = zip(chosen, request.deadlines_s, strict=True)
    rows = tuple(row_of(run, cluster, searched, *pair) for pair in pairs)
    if not any(row.meets_deadline for row in rows):
        row = max(rows, key=lambda row: row.deadline_s)
        more = ", or omit --chips" if searched and cluster.chips else ""
        raise planner.no_deadline_met(row, cluster.chip.name, more=more)
    least = rows[0].memory_min_chips
    held: dict[str, Any] = {"memory_min_chips": least, "accumulated_min_chips": least}
    planned = replace(base, run=run, rows=rows, problem=problem, searched=searched, **held)
    cluster, best = replace(cluster, mfu=planned.best.mfu), planned.best
    return replace(planned, cluster=cluster, work_chip_s=best.chips * best.work_s)


def question_of(request: PlanRequest) -> SearchProblem:
    """The workload, the chip, the software, and the fixed values of the layout."""
    settings, chip = request.settings, request.cluster.chip
    if settings.hbm is not None:
        chip = replace(chip, usable_hbm_bytes=float(settings.hbm))
    stack = stack_on(settings.value("stack"), chip)
    given = workload_of(request), chip, stack
    return SearchProblem(*given, pinned_of(settings), settings.utilisation)


def workload_of(request: PlanRequest) -> Workload:
    """One step of the run; the batch is in whole rows that chips can divide (`round_rows`).

    The state recipe is the given one, else that of the software.
    """
    run, settings = request.run, request.settings
    if run.lora and run.adapter_params is None:
        raise UsageError(
            "--lora: the size of the adapters is missing; give --lora-rank, as --lora-rank 16"
        )
    own = settings.state_recipe or run.lora
    usual = () if own else find_stack(settings.value("stack")).can.recipes
    # with a fixed layout exactly the given rows, if they are whole
    rows = run.batch_tokens / run.sequence
    exact = rows == int(rows) and settings.fixed_layout and not settings.search
    return Workload(
        architecture=request.architecture,
        sequence=run.sequence,
        batch_rows=int(rows) if exact else round_rows(rows),
        recipe=RECIPES[usual[0]] if usual else run.recipe,
        precision=settings.value("precision"),
        adapter_params=run.adapter_params,
    )


def round_rows(rows: float) -> int:
    """Rows near `rows` that chips can divide: within 5 %, and divisible by a power of two.

    4M tokens in rows of 8192 are 488.3 rows, not a whole number, and 64M in rows of 4096 are 15625,
    not divisible by any even number of chips: they become 512 and 16384. 96 rows stay 96.
    """
    if rows == int(rows) and (int(rows) & -int(rows)) * 64 >= rows:
        return int(rows)
    step = 1 << max(0, int(rows).bit_length())
    while step > 1 and abs(round(rows / step) * step / rows - 1) > 0.05:
        step //= 2
    return max(1, round(rows / step) * step)


def pinned_of(settings: PlanOptions) -> dict[str, object]:
    """Fixed fields of a layout: --fixed-layout, --micro-batch, --recompute."""
    pinned = search_rules.parse_fields(settings.fixed_layout) if settings.fixed_layout else {}
    for name in ("micro_batch", "recompute"):
        value, flag = getattr(settings, name), name.replace("_", "-")
        if value is not None and pinned.setdefault(name, value) != value:
            raise UsageError(
                f"--{flag}: {value} (--fixed-layout has {flag}={pinned[name]}; omit one of them)"
            )
    return pinned


def _chosen(
    request: PlanRequest, run: planner.Run, problem: SearchProblem, searched: SearchResult | None
) -> list[TimedLayout]:
    """Per deadline: the fixed layout, the best on the given chips, or the cheapest in time."""
    deadlines = request.deadlines_s
    if searched is None:
        fixed = priced(problem, search_rules.fixed_layout(problem, request.cluster.chips))
        if fixed.memory.total > problem.memory_limit_bytes:
            largest = max(fixed.memory.terms, key=lambda term: term.bytes)
            raise Infeasible(
                f"--fixed-layout: needs {format_bytes(fixed.memory.total)} per chip, most of it "
                f"for {largest.name} ({format_bytes(largest.bytes)}), but only "
                f"{problem.utilisation:.0%} of {format_bytes(problem.chip.usable_hbm_bytes)} may "
                "be used; add --search to search the fields that the layout does not set"
            )
        return [fixed] * len(deadlines)
    if request.cluster.chips:
        return [searched.best] * len(deadlines)
    return searched.cheapest_in_time(deadlines, partial(planner.end_in, run, request.cluster))


def _counts(request: PlanRequest, problem: SearchProblem) -> list[int]:
    """Numbers of chips to search: up to what the shortest deadline needs at SLOWEST_MFU."""
    run, peak, soonest_s = request.run, problem.chip.bf16_flops_per_s, min(request.deadlines_s)
    needed = run.train_flops / (peak * SLOWEST_MFU) / soonest_s
    if request.cluster.stops:
        needed = planner.fewest_chips(run, request.cluster, needed * soonest_s, soonest_s)
    held = run.state_bytes / problem.memory_limit_bytes
    limit = min(MOST_CHIPS, max(2 * needed, 16 * held, problem.chip.node_chips))
    return coarse(problem.chip, int(limit)) or coarse(problem.chip, MOST_CHIPS)[:1]


def row_of(
    run: planner.Run, cluster: planner.Cluster, searched: SearchResult | None, chosen: TimedLayout,
    deadline_s: float,
) -> DeadlineRow:  # fmt: skip
    """The row of a layout for a deadline."""
    work_s, chips = run.optimizer_steps * chosen.step_s, chosen.chips
    expected = planner.expected_end(run, cluster, chips, work_s)
    return DeadlineRow(
        deadline_s=deadline_s,
        compute_min_chips=(expected.wall_s if expected else work_s) * chips / deadline_s,
        memory_min_chips=min(row.chips for row in (searched.front if searched else (chosen,))),
        chips=chips,
        work_s=work_s,
        mfu=run.train_flops / (work_s * chips * cluster.chip.bf16_flops_per_s),
        expected=expected,
        layout=chosen,
    )


def plan_of(
    settings: PlanOptions, priced: bool = True, today: date | None = None
) -> tuple[PlanRequest, Plan]:
    """The request with all defaults, and its plan. Raises UsageError, Infeasible.

    Tables, comparisons, lists of runs and plots all use this function, so that the same options
    have the same plan everywhere. `priced`: as for `build`.
    """
    request = build(settings, priced, today)
    if settings.search or settings.fixed_layout:
        return request, plan(request)
    return request, planner.plan(request.run, request.cluster, request.deadlines_s)
