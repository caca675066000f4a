"""The plan of a run on a cluster at a given MFU: chips, time and cost for each deadline.

For each deadline the number of chips is the larger of two: those that compute needs to finish in
time, and those that hold the state and the whole batch's activations. `chips` fixes it instead. A
plan that is not possible raises Infeasible, naming the smallest change that makes it possible.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sabia.core.errors import Infeasible, UsageError
from sabia.core.plan import compute, memory
from sabia.core.plan.chips import Chip
from sabia.core.plan.memory import StateRecipe
from sabia.core.plan.money import bills
from sabia.core.plan.money.prices import Price
from sabia.core.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from sabia.core.plan.device.search import PlannedLayouts
    from sabia.core.plan.device.survey import TimedLayout


@dataclass(frozen=True)
class Run:
    """The training run: parameters (`matmul_params` cost operations), tokens, batch, shape.

    flops_per_token: by `convention`; None: 6 (LoRA: 4) for each of `matmul_params`.
    adapter_params: trained parameters of LoRA adapters; None where they are not counted.
    """

    params: float
    active_params: float
    matmul_params: float
    tokens: float
    sequence: int
    batch_tokens: float
    layers: int
    hidden: int
    recipe: StateRecipe
    lora: bool = False
    convention: str = "6nd"
    flops_per_token: float | None = None
    adapter_params: int | None = None

    @property
    def state_bytes(self) -> float:
        """Weights, gradients and optimizer state, over the cluster."""
        frozen = memory.state_bytes(self.params, self.recipe)
        return frozen + memory.state_bytes(self.adapter_params or 0, memory.ADAPTERS)

    @property
    def checkpoint_bytes(self) -> float:
        """Size of a checkpoint; with LoRA it contains only the adapters."""
        if self.adapter_params is not None:
            return self.adapter_params * memory.ADAPTERS.durable
        return self.params * self.recipe.durable

    @property
    def activation_bytes(self) -> float:
        """Activations of the whole batch at the same time."""
        return memory.activation_bytes(self.layers, self.hidden, self.batch_tokens)

    @property
    def train_flops(self) -> float:
        """FLOPs of the whole run."""
        if self.flops_per_token is not None:
            return self.flops_per_token * self.tokens
        return compute.train_flops(self.matmul_params, self.tokens, self.lora)


@dataclass(frozen=True)
class Cluster:
    """The rented chips: kind, memory, MFU, prices; `chips`: None where the plan chooses it."""

    chip: Chip
    hbm_bytes: float
    mfu: float
    prices: tuple[Price, ...]
    chips: int | None = None

    @property
    def flops_per_chip_s(self) -> float:
        """Sustained rate of one chip."""
        return self.chip.bf16_flops_per_s * self.mfu


@dataclass(frozen=True)
class DeadlineRow:
    """One deadline: chips that compute and memory need, chips used, and the time of the run.

    `layout`: the layout, where the plan predicts speed by layouts.
    """

    deadline_s: float
    compute_min_chips: float
    memory_min_chips: int
    chips: int
    finishes_s: float
    mfu: float
    layout: "TimedLayout | None" = None

    @property
    def chip_s(self) -> float:
        """Chip-seconds of the run."""
        return self.chips * self.finishes_s

    @property
    def bound(self) -> str:
        """What needs the most chips: 'memory' or 'compute'."""
        return "memory" if self.memory_bound else "compute"

    @property
    def chips_needed(self) -> int:
        """Chips that meet this deadline with the whole batch in memory at once."""
        return max(compute.whole_chips(self.compute_min_chips), self.memory_min_chips)

    @property
    def meets_deadline(self) -> bool:
        """Whether the run ends in time, with a tolerance for the last bits of the division."""
        return self.finishes_s <= self.deadline_s * (1 + 1e-9)

    @property
    def memory_bound(self) -> bool:
        """Whether memory needs at least as many chips as the deadline."""
        return self.memory_min_chips >= compute.whole_chips(self.compute_min_chips)


@dataclass(frozen=True)
class Plan:
    """A run on a cluster, one row per deadline in the order of the caller."""

    run: Run
    cluster: Cluster
    work_chip_s: float
    state_min_chips: int
    accumulated_min_chips: int
    memory_min_chips: int
    rows: tuple[DeadlineRow, ...]
    layouts: "PlannedLayouts | None" = None

    @property
    def chip_hours(self) -> float:
        """Chip-hours of the run."""
        return self.work_chip_s / bills.HOUR_S

    @property
    def best(self) -> DeadlineRow:
        """The smallest cluster that meets its deadline; among equals the first."""
        return min((row for row in self.rows if row.meets_deadline), key=lambda row: row.chips)

    def cost_usd(self, price: Price, row: DeadlineRow | None = None) -> float:
        """The cost of the whole run by `row` (default: the best)."""
        return bills.cost_usd((row or self.best).chip_s, price.usd_per_chip_hour)


def plan(run: Run, cluster: Cluster, deadlines_s: list[float]) -> Plan:
    """Plan `run` on `cluster` for each deadline. Raises UsageError, Infeasible."""
    check(run, cluster, deadlines_s)
    work_chip_s = run.train_flops / cluster.flops_per_chip_s
    sequence_bytes = memory.activation_bytes(run.layers, run.hidden, run.sequence)

    def hold(live_bytes: float) -> int:
        return memory.chips_to_hold(run.state_bytes + live_bytes, cluster.hbm_bytes)

    memory_min_chips = hold(run.activation_bytes)
    rows = []
    for deadline_s in deadlines_s:
        exact = work_chip_s / deadline_s
        chips = cluster.chips or max(compute.whole_chips(exact), memory_min_chips)
        run_s = work_chip_s / chips
        rows.append(DeadlineRow(deadline_s, exact, memory_min_chips, chips, run_s, cluster.mfu))
    least_chips = hold(0), hold(sequence_bytes), memory_min_chips
    planned = Plan(run, cluster, work_chip_s, *least_chips, tuple(rows))
    if cluster.chips:
        refuse_infeasible(planned, cluster.chips)
    return planned


def check(run: Run, cluster: Cluster, deadlines_s: list[float]) -> None:
    """Raise UsageError on numbers that no run can have."""
    positive = {
        "--params": run.params, "--active": run.active_params, "--tokens": run.tokens,
        "--layers": run.layers, "--hidden": run.hidden, "--hbm": cluster.hbm_bytes,
        "--mfu": cluster.mfu, "--deadline": min(deadlines_s),
        "--chips": 1 if cluster.chips is None else cluster.chips,
        "--price": min((price.usd_per_chip_hour for price in cluster.prices), default=1),
    }  # fmt: skip
    for flag, value in positive.items():
        if not value > 0:
            raise UsageError(f"{flag}: {value:g} (expected more than 0)")
    if run.active_params > run.params:
        raise UsageError(
            f"--active: {run.active_params:g} is more than --params {run.params:g} "
            "(expected at most all of them)"
        )
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


def refuse_infeasible(planned: Plan, chips: int) -> None:
    """Raise Infeasible if `chips` cannot hold the run or meet any deadline, naming a fix."""
    cluster, longest = planned.cluster, max(planned.rows, key=lambda row: row.deadline_s)
    on_time = compute.whole_chips(longest.compute_min_chips)
    fix = max(planned.accumulated_min_chips, on_time)
    name, have = cluster.chip.name, f"--chips: {chips}"
    if chips < planned.accumulated_min_chips:
        need = format_bytes(planned.run.state_bytes)
        raise Infeasible(
            f"{have} {name} of {format_bytes(cluster.hbm_bytes)} cannot hold {need} of state and "
            f"one sequence (expected {planned.accumulated_min_chips} or more); use --chips {fix}"
        )
    if not any(row.meets_deadline for row in planned.rows):
        takes = format_duration(longest.finishes_s)
        days = -(-longest.finishes_s // bills.DAY_S)
        raise Infeasible(
            f"{have} {name} take {takes}, which meets no deadline (longest is "
            f"{format_duration(longest.deadline_s)}); use --chips {fix} or --deadline {days:.0f}d"
        )
