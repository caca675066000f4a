"""A plan by predicted speed: from parallel layouts, instead of a given MFU.

`--search` finds the best layout on `--chips`, or the cheapest number of chips that meets each
deadline. `--fixed-layout` predicts the step time of one layout; with `--search` it fixes these
values and the search chooses the others. Returns a Plan (planner.py) whose rows have layouts.
"""

from dataclasses import replace
from typing import Any

from sabia.core.errors import Infeasible, UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan import planner
from sabia.core.plan.device import search_rules
from sabia.core.plan.device.layout import Workload
from sabia.core.plan.device.search import PlannedLayouts, search
from sabia.core.plan.device.search_fixes import coarse
from sabia.core.plan.device.search_rules import SearchProblem
from sabia.core.plan.device.stack import stack_on
from sabia.core.plan.device.survey import TimedLayout, priced
from sabia.core.plan.memory import StateRecipe, find_recipe
from sabia.core.plan.money.bills import DAY_S
from sabia.core.plan.planner import DeadlineRow, Plan
from sabia.core.plan.request import PlanRequest
from sabia.core.units import format_bytes, format_duration

SLOWEST_MFU = 0.1  # lower MFU is not planned for; this bounds the numbers of chips to search
MOST_CHIPS = 65536


def plan(request: PlanRequest) -> Plan:
    """The plan by predicted speed. Raises UsageError, Infeasible."""
    base = planner.plan(request.run, replace(request.cluster, chips=None), request.deadlines_s)
    problem, search_result = question_of(request), None
    if request.settings.search:
        counts = request.cluster.chips or _counts(request, problem)
        search_result = search(problem, counts, request.settings.value("objective"))
    steps = request.run.tokens / problem.workload.batch_tokens
    layouts = PlannedLayouts(problem, search_result, steps, request.settings.lora_rank)
    chosen = zip(_chosen(request, layouts), request.deadlines_s, strict=True)
    rows = _in_time(request, layouts, tuple(_row(request, layouts, *pair) for pair in chosen))
    planned = replace(
        base,
        rows=rows,
        layouts=layouts,
        accumulated_min_chips=rows[0].memory_min_chips,
        memory_min_chips=rows[0].memory_min_chips,
    )
    best, work = planned.best, problem.workload
    cluster = replace(request.cluster, mfu=best.mfu)
    run = replace(request.run, batch_tokens=work.batch_tokens, recipe=work.recipe)
    return replace(planned, run=run, cluster=cluster, work_chip_s=best.chip_s)


def question_of(request: PlanRequest) -> SearchProblem:
    """The workload, the chip, the software, and the fixed values of the layout."""
    settings, chip = request.settings, request.cluster.chip
    if settings.hbm is not None:
        chip = replace(chip, usable_hbm_bytes=float(settings.hbm))
    utilisation = search_rules.UTILISATION if settings.utilisation is None else settings.utilisation
    stack = stack_on(settings.value("stack"), chip)
    return SearchProblem(workload_of(request), chip, stack, pinned_of(settings), utilisation)


def workload_of(request: PlanRequest) -> Workload:
    """One step of the run; the batch is in whole rows that chips can divide (`round_rows`)."""
    run = request.run
    if run.lora and run.adapter_params is None:
        raise UsageError(
            "--lora: the size of the adapters is missing; give --lora-rank, as --lora-rank 16"
        )
    return Workload(
        architecture=request.architecture,
        sequence=run.sequence,
        batch_rows=batch_rows(request),
        recipe=_recipe(request),
        precision=request.settings.value("precision"),
        adapter_params=run.adapter_params,
    )


def _recipe(request: PlanRequest) -> StateRecipe:
    """The state recipe that is given, else that of the software."""
    settings = request.settings
    usual = search_rules.ABILITIES[settings.value("stack")].recipes
    if settings.state_recipe or request.run.lora or not usual:
        return request.run.recipe
    return find_recipe(usual[0])


def batch_rows(request: PlanRequest) -> int:
    """Rows of a step: with a fixed layout exactly those given, if whole; otherwise rounded."""
    rows = request.run.batch_tokens / request.run.sequence
    exact = rows == int(rows) and request.settings.fixed_layout and not request.settings.search
    return int(rows) if exact else round_rows(rows)


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


def pinned_of(settings: PlanOptions) -> dict[str, Any]:
    """Fixed fields of a layout: --fixed-layout, --micro-batch, --recompute."""
    pinned = search_rules.parse_fields(settings.fixed_layout) if settings.fixed_layout else {}
    for name in ("micro_batch", "recompute"):
        value, flag = getattr(settings, name), name.replace("_", "-")
        if value is not None and pinned.setdefault(name, value) != value:
            raise UsageError(
                f"--{flag}: {value} (--fixed-layout has {flag}={pinned[name]}; omit one of them)"
            )
    return pinned


def _chosen(request: PlanRequest, layouts: PlannedLayouts) -> list[TimedLayout]:
    """Per deadline: the fixed layout, the best on the given chips, or the cheapest in time."""
    search_result, deadlines = layouts.search_result, request.deadlines_s
    if search_result is None:
        problem = layouts.problem
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
        return [search_result.best] * len(deadlines)
    return [
        search_result.cheapest_within(d / layouts.steps) or search_result.fastest for d in deadlines
    ]


def _counts(request: PlanRequest, problem: SearchProblem) -> list[int]:
    """Numbers of chips to search: up to what the shortest deadline needs at SLOWEST_MFU."""
    run, peak = request.run, problem.chip.bf16_flops_per_s
    needed = run.train_flops / (peak * SLOWEST_MFU) / min(request.deadlines_s)
    held = run.state_bytes / problem.memory_limit_bytes
    limit = min(MOST_CHIPS, max(2 * needed, 16 * held, problem.chip.node_chips))
    return coarse(problem.chip, int(limit)) or coarse(problem.chip, MOST_CHIPS)[:1]


def _row(
    request: PlanRequest, layouts: PlannedLayouts, chosen: TimedLayout, deadline_s: float
) -> DeadlineRow:
    fitting = layouts.search_result.front if layouts.search_result else (chosen,)
    run_s = layouts.steps * chosen.step_s
    chip_s = run_s * chosen.chips
    return DeadlineRow(
        deadline_s=deadline_s,
        compute_min_chips=chip_s / deadline_s,
        memory_min_chips=min(row.chips for row in fitting),
        chips=chosen.chips,
        finishes_s=run_s,
        mfu=request.run.train_flops / (chip_s * request.cluster.chip.bf16_flops_per_s),
        layout=chosen,
    )


def _in_time(
    request: PlanRequest, layouts: PlannedLayouts, rows: tuple[DeadlineRow, ...]
) -> tuple[DeadlineRow, ...]:
    """The rows, if any meets its deadline; else Infeasible, naming a deadline that can be met."""
    if any(row.meets_deadline for row in rows):
        return rows
    row = max(rows, key=lambda row: row.deadline_s)
    days = -(-row.finishes_s // DAY_S)
    more = ", or omit --chips" if layouts.search_result and request.cluster.chips else ""
    raise Infeasible(
        f"--deadline: {row.chips} {request.cluster.chip.name} take "
        f"{format_duration(row.finishes_s)}, which meets none (longest is "
        f"{format_duration(row.deadline_s)}); use --deadline {days:.0f}d{more}"
    )
