"""The plan of a run on a cluster at a given MFU: chips, time and cost for each deadline.

For each deadline the number of chips is the larger of two: those that compute needs to finish in
time, and those that hold the state and the whole batch's activations. `chips` fixes it instead.
With interruptions (`Cluster.stops`) the end of a run is its expected one, on any number of chips. A
plan that is not possible raises Infeasible, naming the smallest change that makes it possible.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sabia.core.errors import Infeasible, UsageError
from sabia.core.plan import compute, memory
from sabia.core.plan.chips import Chip
from sabia.core.plan.counting.counts import ModelCounts
from sabia.core.plan.memory import StateRecipe
from sabia.core.plan.money.prices import DAY_S, HOUR_S, Price, cost_usd
from sabia.core.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from sabia.core.plan.device.search import SearchResult
    from sabia.core.plan.device.search_rules import SearchProblem
    from sabia.core.plan.device.survey import TimedLayout
    from sabia.core.plan.stops.failures import StopForecast, StopModel


@dataclass(frozen=True, kw_only=True)
class Run(ModelCounts):
    """The training run: the model's counts (`matmul_params` cost operations), tokens, batch.

    flops_per_token: by `convention`; None: 6 (LoRA: 4) for each of `matmul_params`.
    adapter_params: trained parameters of LoRA adapters; None where they are not counted.
    """

    tokens: float
    sequence: int
    batch_tokens: float
    recipe: StateRecipe
    lora: bool = False
    convention: str = "6nd"
    flops_per_token: float | None = None
    adapter_params: int | None = None

    @property
    def state_bytes(self) -> float:
        """Weights, gradients and optimizer state, over the cluster."""
        frozen = self.params * self.recipe.bytes_per_param
        return frozen + (self.adapter_params or 0) * memory.ADAPTERS.bytes_per_param

    @property
    def checkpoint_bytes(self) -> float:
        """Size of a checkpoint; with LoRA it contains only the adapters."""
        if self.adapter_params is not None:
            return self.adapter_params * memory.ADAPTERS.durable
        return self.params * self.recipe.durable

    @property
    def activation_bytes(self) -> float:
        """Activations of the whole batch at the same time."""
        return self.live_bytes(self.batch_tokens)

    def live_bytes(self, tokens: float) -> float:
        """Inputs of all layers of `tokens`, with full recomputation."""
        return self.layers * self.hidden * tokens * memory.ACTIVATION_BYTES

    @property
    def total_bytes(self) -> float:
        """State and activations."""
        return self.state_bytes + self.activation_bytes

    @property
    def optimizer_steps(self) -> float:
        """Updates of the weights."""
        return self.tokens / self.batch_tokens

    @property
    def kind(self) -> str:
        """'sparse' where not all parameters are active for a token, else 'dense'."""
        return "sparse" if self.active_params < self.params else "dense"

    @property
    def usual_mfu(self) -> compute.MfuRange:
        """What models of its kind usually reach."""
        return compute.MFU_RANGES[self.kind]

    @property
    def train_flops(self) -> float:
        """FLOPs of the whole run."""
        if self.flops_per_token is not None:
            return self.flops_per_token * self.tokens
        return compute.train_flops(self.matmul_params, self.tokens, self.lora)


@dataclass(frozen=True)
class Cluster:
    """The rented chips: kind, memory, MFU, prices, and what interrupts them.

    chips: None where the plan chooses it. stops: None where no interruptions are planned.
    """

    chip: Chip
    hbm_bytes: float
    mfu: float
    prices: tuple[Price, ...]
    chips: int | None = None
    stops: "StopModel | None" = None

    @property
    def flops_per_chip_s(self) -> float:
        """Sustained rate of one chip."""
        return self.chip.bf16_flops_per_s * self.mfu


@dataclass(frozen=True)
class DeadlineRow:
    """One deadline: chips that compute and memory need, chips used, and the time of the run.

    work_s: the run without interruptions; expected: with them, where they are planned. `layout`:
    the layout, where the plan predicts speed by layouts.
    """

    deadline_s: float
    compute_min_chips: float
    memory_min_chips: int
    chips: int
    work_s: float
    mfu: float
    expected: "StopForecast | None" = None
    layout: "TimedLayout | None" = None

    @property
    def finishes_s(self) -> float:
        """Seconds from the start to the end, with the planned interruptions."""
        return self.work_s if self.expected is None else self.expected.wall_s

    @property
    def chip_s(self) -> float:
        """Chip-seconds that are billed."""
        return self.chips * self.work_s if self.expected is None else self.expected.billed_chip_s

    @property
    def layout_words(self) -> str | None:
        """The layout as a value for --fixed-layout; None without layouts."""
        return None if self.layout is None else self.layout.layout.described

    @property
    def bound(self) -> str:
        """What needs the most chips: 'memory' or 'compute'."""
        return "memory" if self.chips_needed == self.memory_min_chips else "compute"

    @property
    def chips_needed(self) -> int:
        """Chips that meet this deadline with the whole batch in memory at once."""
        return max(compute.whole_chips(self.compute_min_chips), self.memory_min_chips)

    @property
    def meets_deadline(self) -> bool:
        """Whether the run ends in time, with a tolerance for the last bits of the division."""
        return self.finishes_s <= self.deadline_s * (1 + 1e-9)


@dataclass(frozen=True)
class Plan:
    """A run on a cluster, one row per deadline in the order of the caller.

    problem: where speed is predicted by layouts; searched: their search, None if one was fixed.
    """

    run: Run
    cluster: Cluster
    work_chip_s: float
    state_min_chips: int
    accumulated_min_chips: int
    memory_min_chips: int
    rows: tuple[DeadlineRow, ...]
    problem: "SearchProblem | None" = None
    searched: "SearchResult | None" = None

    @property
    def chip_hours(self) -> float:
        """Chip-hours of the run."""
        return self.work_chip_s / HOUR_S

    @property
    def best(self) -> DeadlineRow:
        """The smallest cluster that meets its deadline; among equals the first."""
        return min((row for row in self.rows if row.meets_deadline), key=lambda row: row.chips)

    def cost_usd(self, price: Price, row: DeadlineRow | None = None) -> float:
        """The cost of the whole run by `row` (default: the best)."""
        return cost_usd((row or self.best).chip_s, price.usd_per_chip_hour)


def plan(run: Run, cluster: Cluster, deadlines_s: list[float]) -> Plan:
    """Plan `run` on `cluster` for each deadline.

    Raises UsageError, and Infeasible, naming a fix, if no deadline can be met or given chips cannot
    hold the run.
    """
    planned = by_mfu(run, cluster, deadlines_s)
    longest = max(planned.rows, key=lambda row: row.deadline_s)
    least, chips, name = planned.accumulated_min_chips, longest.chips, cluster.chip.name
    fix = max(least, compute.whole_chips(longest.compute_min_chips))
    if chips < least:
        need = format_bytes(run.state_bytes)
        raise Infeasible(
            f"--chips: {chips} {name} of {format_bytes(cluster.hbm_bytes)} cannot hold {need} of "
            f"state and one sequence (expected {least} or more); use --chips {fix}"
        )
    if not any(row.meets_deadline for row in planned.rows):
        soonest_s = end_on(run, cluster, fix, planned.work_chip_s / fix)[0]
        enough = fix > chips and soonest_s <= longest.deadline_s * (1 + 1e-9)
        raise no_deadline_met(longest, name, f"--chips {fix} or " if enough else "")
    return planned


def by_mfu(run: Run, cluster: Cluster, deadlines_s: list[float]) -> Plan:
    """The plan, also where no deadline can be met. Raises UsageError."""
    check(run, cluster, deadlines_s)
    work_chip_s, rows = run.train_flops / cluster.flops_per_chip_s, []

    def held(tokens: float) -> int:
        return compute.whole_chips((run.state_bytes + run.live_bytes(tokens)) / cluster.hbm_bytes)

    least = held(0), held(run.sequence), held(run.batch_tokens)
    for deadline_s in deadlines_s:
        exact = work_chip_s / deadline_s
        if cluster.stops:
            exact = fewest_chips(run, cluster, work_chip_s, deadline_s)
        chips = cluster.chips or max(compute.whole_chips(exact), least[-1])
        work_s = work_chip_s / chips
        expected = expected_end(run, cluster, chips, work_s)
        figures = (deadline_s, exact, least[-1], chips, work_s, cluster.mfu, expected)
        rows.append(DeadlineRow(*figures))
    return Plan(run, cluster, work_chip_s, *least, tuple(rows))


def expected_end(run: Run, cluster: Cluster, chips: int, work_s: float) -> "StopForecast | None":
    """The forecast of `work_s` of work on `chips`; None where no interruptions are planned.

    Raises UsageError, and Infeasible where the run makes no progress.
    """
    if cluster.stops is None:
        return None
    from sabia.core.plan.stops.failures import StoppedRun, forecast

    return forecast(StoppedRun(cluster.stops, cluster.chip, chips, run.checkpoint_bytes, work_s))


def end_on(run: Run, cluster: Cluster, chips: int, work_s: float) -> tuple[float, float]:
    """(seconds until the end, billed chip-seconds); inf where the run makes no progress."""
    try:
        expected = expected_end(run, cluster, chips, work_s)
    except Infeasible:
        return math.inf, math.inf
    return (expected.wall_s, expected.billed_chip_s) if expected else (work_s, chips * work_s)


def end_in(run: Run, cluster: Cluster, row: "TimedLayout") -> tuple[float, float]:
    """The same for the run in a layout."""
    return end_on(run, cluster, row.chips, run.optimizer_steps * row.step_s)


DOUBLINGS = 20


def fewest_chips(run: Run, cluster: Cluster, work_chip_s: float, deadline_s: float) -> int:
    """Fewest chips that are expected to end in time with interruptions; the fastest if none are.

    More chips do the work sooner, but fail more often: the expected end falls, and then rises.
    """

    def end_s(chips: int) -> float:
        return end_on(run, cluster, chips, work_chip_s / chips)[0]

    least = compute.whole_chips(work_chip_s / deadline_s)
    tried = [least << doubling for doubling in range(DOUBLINGS)]
    enough = next((chips for chips in tried if end_s(chips) <= deadline_s), None)
    if enough is None:
        near = min(tried, key=end_s)
        enough = _lowest(end_s, max(least, near // 2), near * 2)
        if end_s(enough) > deadline_s:
            return enough
    low, high = max(least - 1, enough // 2), enough  # `low` is late
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if end_s(middle) <= deadline_s else (middle, high)
    return high


def _lowest(of: Callable[[int], float], low: int, high: int) -> int:
    """The whole number from `low` to `high` at which `of`, which falls and then rises, is least."""
    while high - low > 2:
        third = (high - low) // 3
        low, high = (low, high - third) if of(low + third) <= of(high - third) else (
            low + third, high,
        )  # fmt: skip
    return min(range(low, high + 1), key=of)


def check(run: Run, cluster: Cluster, deadlines_s: list[float]) -> None:
    """Raise UsageError on numbers that no run can have, which one option alone may have."""
    positive = {
        "--tokens": run.tokens,
        "--mfu": cluster.mfu,
        "--deadline": min(deadlines_s),
        "--price": min((price.usd_per_chip_hour for price in cluster.prices), default=1),
    }
    for flag, value in positive.items():
        if not value > 0:
            raise UsageError(f"{flag}: {value:g} (expected more than 0)")
    if run.batch_tokens > run.tokens:
        raise UsageError(
            f"--batch-tokens: {format_count(run.batch_tokens)} is more than all --tokens "
            f"{format_count(run.tokens)} (expected many batches in a run)"
        )
    if run.batch_tokens < run.sequence:
        raise UsageError(
            f"--batch-tokens: {run.batch_tokens:g} is less than one sequence of {run.sequence} "
            "tokens (expected at least --seq)"
        )


def no_deadline_met(row: DeadlineRow, name: str, other: str = "", more: str = "") -> Infeasible:
    """The error for a plan that is always late. row: of the longest deadline.

    other, more: what else helps, before and after the deadline that its chips meet.
    """
    with_stops = " with interruptions" if row.expected else ""
    days = -(-row.finishes_s // DAY_S)
    return Infeasible(
        f"--deadline: {row.chips} {name} take {format_duration(row.finishes_s)}{with_stops}, which "
        f"meets no deadline (longest is {format_duration(row.deadline_s)}); use {other}--deadline "
        f"{days:.0f}d{more}"
    )
