"""A plan by predicted speed: the layouts that run on some chips, instead of a utilization.

`--search` looks for the best layout on `--chips`, or for the cheapest number of chips that meets
each deadline; `--fixed-layout` times just one (and with `--search` keeps those values and searches
the rest). What comes back is a Plan as planner.py makes it, whose rows hold their layouts.
"""

from dataclasses import dataclass, replace
from typing import Any

from sabia.core.errors import Infeasible, UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan import planner
from sabia.core.plan.device.layout import Workload
from sabia.core.plan.device.search import UTILISATION, Found, Question, priced, search
from sabia.core.plan.device.search import Row as Laid
from sabia.core.plan.device.search_fixes import coarse, described
from sabia.core.plan.device.search_rules import ABILITIES, fixed_layout, parse_fields
from sabia.core.plan.device.stack import stack_on
from sabia.core.plan.memory import StateRecipe, find_recipe
from sabia.core.plan.money.bills import DAY_S
from sabia.core.plan.planner import Plan, Row
from sabia.core.plan.request import Request
from sabia.core.units import format_bytes, format_duration

SLOWEST_MFU = 0.1  # a run this slow is not planned for: it bounds the numbers of chips to look at
MOST_CHIPS = 65536
SHOWN = 8  # layouts in a table


@dataclass(frozen=True)
class Placed:
    """What stands behind a placed plan. found: None where the layout was fixed. room: bytes that a
    device may hold. batch_rows: rows of a step, which layouts divide."""

    question: Question
    found: Found | None
    steps: float
    lora_rank: int | None

    @property
    def sizes(self) -> int:
        """How many numbers of chips were looked at, that something fits on."""
        return len({row.chips for row in self.found.front}) if self.found else 1

    @property
    def batch_rows(self) -> int:
        """Rows of a step."""
        return self.question.workload.batch_rows

    def shown(self, chosen: tuple[Laid, ...]) -> list[Laid]:
        """The layouts to show: of a search the alternatives, the chosen ones among them."""
        if self.found is None:
            return list(chosen[:1])
        others = self.found.ranked if self.sizes == 1 else _thinned(self.found.front)
        rows = {described(row.layout): row for row in (*chosen, *others[:SHOWN])}
        return sorted(rows.values(), key=lambda row: row.step_s)


def plan(asked: Request) -> Plan:
    """The plan by predicted speed. Raises UsageError, Infeasible."""
    base = planner.plan(asked.run, replace(asked.cluster, chips=None), asked.deadlines_s)
    question, found = question_of(asked), None
    if asked.settings.search:
        counts = asked.cluster.chips or _counts(asked, question)
        found = search(question, counts, asked.settings.value("objective"))
    steps = asked.run.tokens / question.workload.batch_tokens
    placed = Placed(question, found, steps, asked.settings.lora_rank)
    chosen = zip(_chosen(asked, placed), asked.deadlines_s, strict=True)
    rows = _in_time(asked, placed, tuple(_row(asked, placed, *pair) for pair in chosen))
    planned = replace(
        base,
        rows=rows,
        placed=placed,
        accumulated_min_chips=rows[0].memory_min_chips,
        memory_min_chips=rows[0].memory_min_chips,
    )
    best, work = planned.best, question.workload
    cluster = replace(asked.cluster, mfu=best.mfu)
    run = replace(asked.run, batch_tokens=work.batch_tokens, recipe=work.recipe)
    return replace(planned, run=run, cluster=cluster, work_chip_s=best.chip_s)


def question_of(asked: Request) -> Question:
    """What a search is asked: the work, the chip, the software, and the values that are fixed."""
    settings, chip = asked.settings, asked.cluster.chip
    if settings.hbm is not None:
        chip = replace(chip, usable_hbm_bytes=float(settings.hbm))
    utilisation = UTILISATION if settings.utilisation is None else settings.utilisation
    stack = stack_on(settings.value("stack"), chip)
    return Question(workload_of(asked), chip, stack, pinned_of(settings), utilisation)


def workload_of(asked: Request) -> Workload:
    """One step of the run; the batch in whole rows that chips can share (`round_rows`)."""
    run = asked.run
    if run.lora and run.adapter_params is None:
        raise UsageError(
            "--lora: the size of the adapters is missing; give --lora-rank, as --lora-rank 16"
        )
    return Workload(
        architecture=asked.architecture,
        sequence=run.sequence,
        batch_rows=batch_rows(asked),
        recipe=_recipe(asked),
        precision=asked.settings.value("precision"),
        adapter_params=run.adapter_params,
    )


def _recipe(asked: Request) -> StateRecipe:
    """How state is held: as said, else as the software does it."""
    settings = asked.settings
    usual = ABILITIES[settings.value("stack")].recipes
    if settings.state_recipe or asked.run.lora or not usual:
        return asked.run.recipe
    return find_recipe(usual[0])


def batch_rows(asked: Request) -> int:
    """Rows of a step: of a fixed layout exactly those asked for, if whole; else rounded."""
    rows = asked.run.batch_tokens / asked.run.sequence
    exact = rows == int(rows) and asked.settings.fixed_layout and not asked.settings.search
    return int(rows) if exact else round_rows(rows)


def round_rows(rows: float) -> int:
    """Rows near `rows` that chips can share: within 5 %, and divisible by a power of two.

    4M tokens in rows of 8192 are 488.3 rows, which nothing divides, and 64M in rows of 4096 are
    15625, which no even number of chips does: 512 and 16384 serve. 96 rows stay 96.
    """
    if rows == int(rows) and (int(rows) & -int(rows)) * 64 >= rows:
        return int(rows)
    step = 1 << max(0, int(rows).bit_length())
    while step > 1 and abs(round(rows / step) * step / rows - 1) > 0.05:
        step //= 2
    return max(1, round(rows / step) * step)


def pinned_of(settings: PlanOptions) -> dict[str, Any]:
    """Fields of a layout that must have a value: --fixed-layout, --micro-batch, --recompute."""
    found = parse_fields(settings.fixed_layout) if settings.fixed_layout else {}
    for name in ("micro_batch", "recompute"):
        value = getattr(settings, name)
        if value is not None and found.setdefault(name, value) != value:
            raise UsageError(
                f"--{name.replace('_', '-')}: {value} (--fixed-layout says {found[name]}; "
                "leave one out)"
            )
    return found


def _chosen(asked: Request, placed: Placed) -> list[Laid]:
    """For each deadline the fixed layout, the best on the given chips, or the cheapest in time."""
    found, deadlines = placed.found, asked.deadlines_s
    if found is None:
        return [_fixed(asked, placed.question)] * len(deadlines)
    if asked.cluster.chips:
        return [found.best] * len(deadlines)
    return [found.cheapest_within(d / placed.steps) or found.fastest for d in deadlines]


def _thinned(front: tuple[Laid, ...]) -> list[Laid]:
    """Of a long front SHOWN layouts, evenly from the fastest to the smallest."""
    if len(front) <= SHOWN:
        return list(front)
    step = (len(front) - 1) / (SHOWN - 1)
    return [front[round(n * step)] for n in range(SHOWN)]


def _counts(asked: Request, question: Question) -> list[int]:
    """Numbers of chips worth looking at: up to what the shortest deadline needs if slow."""
    run, peak = asked.run, question.chip.bf16_flops_per_s
    needed = run.train_flops / (peak * SLOWEST_MFU) / min(asked.deadlines_s)
    held = run.state_bytes / question.room_bytes
    limit = min(MOST_CHIPS, max(2 * needed, 16 * held, question.chip.node_chips))
    return coarse(question.chip, int(limit)) or coarse(question.chip, MOST_CHIPS)[:1]


def _fixed(asked: Request, question: Question) -> Laid:
    """Exactly the given layout."""
    chosen = priced(question, fixed_layout(question, asked.cluster.chips))
    if chosen.memory.total > question.room_bytes:
        raise Infeasible(_too_full(question, chosen))
    return chosen


def _too_full(question: Question, row: Laid) -> str:
    largest = max(row.memory.terms, key=lambda term: term.bytes)
    return (
        f"--fixed-layout: needs {format_bytes(row.memory.total)} a chip, most of it {largest.name} "
        f"({format_bytes(largest.bytes)}); {question.utilisation:.0%} of "
        f"{format_bytes(question.chip.usable_hbm_bytes)} may be filled; add --search to let free "
        "what the layout does not say"
    )


def _row(asked: Request, placed: Placed, chosen: Laid, deadline_s: float) -> Row:
    fitting = placed.found.front if placed.found else (chosen,)
    took_s = placed.steps * chosen.step_s
    chip_s = took_s * chosen.chips
    return Row(
        deadline_s=deadline_s,
        compute_min_chips=chip_s / deadline_s,
        memory_min_chips=min(row.chips for row in fitting),
        chips=chosen.chips,
        finishes_s=took_s,
        mfu=asked.run.train_flops / (chip_s * asked.cluster.chip.bf16_flops_per_s),
        layout=chosen,
    )


def _in_time(asked: Request, placed: Placed, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows, if any is in time; Infeasible with what would be."""
    if any(row.meets_deadline for row in rows):
        return rows
    row = max(rows, key=lambda row: row.deadline_s)
    days = -(-row.finishes_s // DAY_S)
    more = "" if placed.found is None else ", or leave out --chips" * bool(asked.cluster.chips)
    raise Infeasible(
        f"--deadline: {row.chips} {asked.cluster.chip.name} take "
        f"{format_duration(row.finishes_s)}, which meets none (longest is "
        f"{format_duration(row.deadline_s)}); use --deadline {days:.0f}d{more}"
    )
