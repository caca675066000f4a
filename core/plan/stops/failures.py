"""Failures, preemptions and checkpoints: the checkpoint interval, and the time and cost of a run.

D is the time that a save blocks the chips, M the mean time between interruptions, U the time of the
upload to storage in the background.

- `daly`: τ = √(2DM)·(1 + ⅓√(D/2M) + D/18M) − D for D < 2M, else M: higher order (Daly, FGCS
  22(3), 2006, equation 37), for synchronous saves.
- background uploads: max(U / copies, √(2DM)) (core.save_interval, as in the trainer): at most
  `copies` uploads at the same time; a second one helps only if storage has the bandwidth for both.

Interruptions are Poisson: failures of `chips` chips at a daily rate, and preemptions of the whole
cluster, with a common mean time M. One failed chip interrupts the whole job. With a spare node it
continues at once; after a preemption it may wait for capacity. A checkpoint of C bytes blocks the
chips for D = C / chips · (1 / PCIe + 1 / FILE) while each process writes its share to files in host
memory, as the trainer does, and then uploads for
U = C / min(chips · network, bucket) in the background. Only one upload runs at a time, so the best
interval, √(2DM), is never shorter than U. The newest durable checkpoint is U older than the newest
copy, so an interruption loses τ/2 + U of work, and R for the restart. A synchronous save blocks the
chips for D + U instead and loses τ/2 + D. process.py has the expected wall time, billed time and
numbers of interruptions and job limits, and simulation.py a Monte Carlo simulation of them.

A preemptible cluster is interrupted more often and needs more time for the same run. It is cheaper
iff p_spot · E_spot < p_od · E_od, where E is the expected billed time (process.py), each with its
own best interval. E_spot decreases with the time between preemptions: at one value both costs are
equal.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from sabia.core.errors import Infeasible, UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.chips import Chip, known
from sabia.core.plan.elementwise import rounded_up
from sabia.core.plan.money.prices import DAY_S, cost_usd
from sabia.core.plan.stops.process import Expectation, Process, Waits, divided, expectation
from sabia.core.save_interval import best_interval_s


def daly(offload_s: float, mean_s: float) -> float:
    """Higher-order optimum for a save that the chips wait for, seconds."""
    if offload_s >= 2 * mean_s:
        return mean_s
    part = offload_s / (2 * mean_s)
    return best_interval_s(offload_s, 0, mean_s) * (1 + math.sqrt(part) / 3 + part / 9) - offload_s


def copies_held(upload_s: float, interval_s: float) -> int:
    """Checkpoints in host memory at the same time: ⌈U/τ⌉."""
    return max(1, int(rounded_up(upload_s / interval_s)))


# bytes per second of a process that writes and hashes files (tests/bench/RESULTS.md)
FILE_BYTES_PER_S = 1e9
WINDOW_S = 3 * DAY_S
LONGEST_WALL = 100


# option → field of StopModel with its value
OPTIONS = {
    "failure_rate": "failures_per_chip_day", "preempt": "preemption_s", "restart": "restart_s",
    "spot_share": "spot_share", "capacity_wait": "capacity_wait_s", "repair": "repair_s",
    "spare_nodes": "spare_nodes", "job_limit": "job_limit_s", "queue": "queue_s",
    "save_stall": "stall_s", "synchronous": "synchronous", "checkpoint_copies": "copies",
    "peer_copies": "peer_copies",
}  # fmt: skip


@dataclass(frozen=True)
class StopModel(Waits):
    """Interruptions of a run, and the speed of saves and restarts.

    `failures_per_chip_day` is a share (0.001 = 0.1 %), `preemption_s` the mean time between
    preemptions of the whole cluster (None: never). A save blocks the chips for `stall_s` (None: the
    time of a copy to host memory and into files). `copies` checkpoints may upload at the same time.
    `spot_share` is the price of a preemptible chip as a share of the on-demand price.
    """

    failures_per_chip_day: float = PlanOptions.assumed("failure_rate")
    preemption_s: float | None = None
    restart_s: float = round(PlanOptions.assumed("restart"))
    bucket_bytes_per_s: float = PlanOptions.assumed("bucket_gbps") * 1e9
    spot_share: float = PlanOptions.assumed("spot_share")
    stall_s: float | None = None
    synchronous: bool = False
    copies: int = PlanOptions.assumed("checkpoint_copies")

    @classmethod
    def of(cls, settings: PlanOptions) -> "StopModel":
        """The interruptions of the options; others have the defaults of this class."""
        given: dict[str, Any] = {field: getattr(settings, name) for name, field in OPTIONS.items()}
        if settings.bucket_gbps is not None:
            given["bucket_bytes_per_s"] = settings.bucket_gbps * 1e9
        if settings.spot:
            given["spot_share"] = 1.0
        return cls(**{name: value for name, value in given.items() if value is not None})

    def __post_init__(self) -> None:
        """Check times and shares that must be above 0."""
        positive = {"--preempt": self.preemption_s, "--spot-share": self.spot_share}
        for flag, value in (positive | {"--job-limit": self.job_limit_s}).items():
            if value is not None and not value > 0:
                raise UsageError(f"{flag}: {value:g} (expected more than 0)")


@dataclass(frozen=True)
class StoppedRun:
    """`work_s` seconds of work on `chips` of `chip`, with checkpoints of `checkpoint_bytes`."""

    model: StopModel
    chip: Chip
    chips: int
    checkpoint_bytes: float
    work_s: float

    @property
    def mean_time_between_stops_s(self) -> float:
        """Mean time between failures or preemptions; inf if there are none."""
        model = self.model
        return mean_time_between(self.chips, model.failures_per_chip_day, model.preemption_s)


@dataclass(frozen=True)
class Saving:
    """How a cluster saves: the blocking time D, the upload time U, and the interval; seconds."""

    offload_s: float
    upload_s: float
    interval_s: float


@dataclass(frozen=True)
class StopForecast(Saving, Expectation):
    """Expected values of a run with interruptions, and how it saves; seconds, bytes.

    `billed_chips`: with spare nodes.
    """

    chips: int
    mean_time_between_failures_s: float
    mean_time_between_stops_s: float
    failure_probability: float
    checkpoint_bytes: float
    work_s: float
    node_mean_time_between_failures_s: float
    host_copies: int
    host_bytes_per_chip: float
    lost_per_stop_s: float
    billed_chips: int

    @property
    def goodput(self) -> float:
        """Share of wall time that is work."""
        return self.work_s / self.wall_s

    @property
    def billed_chip_s(self) -> float:
        """Billed chip-seconds."""
        return self.billed_s * self.billed_chips


def mean_time_between(chips: int, per_chip_day: float, preemption_s: float | None) -> float:
    """Mean seconds between failures or preemptions; inf if there are none."""
    rate = chips * per_chip_day / DAY_S + (1 / preemption_s if preemption_s else 0)
    return 1 / rate if rate else math.inf


def failure_probability(mean_s: float, window_s: float) -> float:
    """Probability of at least one failure within `window_s`."""
    return -math.expm1(-window_s / mean_s)


def saving(run: StoppedRun) -> Saving:
    """D, U and the best interval. Raises UsageError on unknown bandwidths of the chip."""
    model, chip, mean_s = run.model, run.chip, run.mean_time_between_stops_s
    each, offload_s = run.checkpoint_bytes / run.chips, model.stall_s
    if offload_s is None:
        offload_s = each / known(chip, "host_bytes_per_s") + each / FILE_BYTES_PER_S
    network = run.chips * known(chip, "network_bytes_per_s")
    upload_s = run.checkpoint_bytes / min(network, model.bucket_bytes_per_s)
    if model.synchronous:
        offload_s, upload_s = offload_s + upload_s, 0.0
    if math.isinf(mean_s):
        interval_s = run.work_s
    elif model.synchronous:
        interval_s = daly(offload_s, mean_s)
    else:
        interval_s = best_interval_s(offload_s, upload_s, mean_s, model.copies)
    if model.job_limit_s is not None:
        longest_s = model.job_limit_s - model.restart_s - upload_s - offload_s
        interval_s = min(interval_s, longest_s) if longest_s > 0 else interval_s
    return Saving(offload_s, upload_s, interval_s)


def process_of(run: StoppedRun, saved: Saving) -> Process:
    """The random process of a run. Raises Infeasible on a short job limit."""
    model, lead_s = run.model, run.model.restart_s + saved.upload_s
    lengths = run.work_s, saved.interval_s, saved.offload_s, lead_s
    segments, segment_s = divided(*lengths, model.job_limit_s)
    waits: dict[str, Any] = {each.name: getattr(model, each.name) for each in fields(Waits)}
    return Process(
        segments=segments,
        segment_s=segment_s,
        upload_s=saved.upload_s,
        failure_rate=run.chips * model.failures_per_chip_day / DAY_S,
        preemption_rate=1 / model.preemption_s if model.preemption_s else 0.0,
        restart_s=model.restart_s,
        **waits,
    )


def forecast(run: StoppedRun) -> StopForecast:
    """Checkpoint interval, expected wall time and billed time of a run.

    Raises UsageError if the chip's host or network bandwidth is unknown, Infeasible if the run
    makes no progress between interruptions.
    """
    model, chips, work_s, saved = run.model, run.chips, run.work_s, saving(run)
    expected, mean_s = expectation(process_of(run, saved)), run.mean_time_between_stops_s
    if not expected.exposed_s <= LONGEST_WALL * work_s:
        raise Infeasible(
            f"checkpoints: an interruption every {mean_s / 60:.0f} min leaves no progress (the "
            f"upload of a save takes {saved.upload_s / 60:.0f} min); use a higher --bucket-gbps or "
            "--preempt"
        )
    if not expected.wall_s <= LONGEST_WALL * work_s:
        raise Infeasible(
            f"interruptions: waits for machines are {expected.wall_s / work_s - 1:.0f} times the "
            "work; use --spare-nodes, a shorter --capacity-wait or a longer --job-limit"
        )
    per_day, copies = model.failures_per_chip_day, copies_held(saved.upload_s, saved.interval_s)
    failures_s = mean_time_between(chips, per_day, None)
    # an interruption loses half an interval and the time of the newest save
    lag_s = saved.upload_s or saved.offload_s
    if model.peer_copies:
        lag_s = saved.upload_s * (mean_s / model.preemption_s if model.preemption_s else 0.0)
    return StopForecast(
        chips=chips,
        mean_time_between_failures_s=failures_s,
        mean_time_between_stops_s=mean_s,
        failure_probability=failure_probability(failures_s, WINDOW_S),
        checkpoint_bytes=run.checkpoint_bytes,
        work_s=work_s,
        node_mean_time_between_failures_s=mean_time_between(run.chip.node_chips, per_day, None),
        host_copies=copies,
        host_bytes_per_chip=copies * (1 + model.peer_copies) * run.checkpoint_bytes / chips,
        lost_per_stop_s=saved.interval_s / 2 + lag_s,
        billed_chips=chips + model.spare_nodes * run.chip.node_chips,
        **vars(saved),
        **vars(expected),
    )


SHORTEST_S, LONGEST_S = 1.0, 1e10
BISECTIONS = 25  # to a millionth


@dataclass(frozen=True)
class SpotComparison:
    """The cost of the same run on preemptible and on on-demand chips.

    `break_even_preemption_s`: preemptible chips are cheaper if preemptions are further apart; None:
    never, 0: always.
    """

    spot_usd: float
    on_demand_usd: float
    break_even_preemption_s: float | None

    @property
    def saving(self) -> float:
        """Share of the on-demand cost that preemptible chips save; negative if they cost more."""
        return 1 - self.spot_usd / self.on_demand_usd


def without_waits(run: StoppedRun, preemption_s: float | None) -> StoppedRun:
    """The run with another mean time between preemptions (None: none), without capacity waits."""
    return replace(run, model=replace(run.model, preemption_s=preemption_s, capacity_wait_s=0.0))


def compare(run: StoppedRun, spot_rate: float, on_demand_rate: float) -> SpotComparison:
    """Both costs of a run, and the break-even time between preemptions.

    run.model has the preemptions of the preemptible cluster; the on-demand one has none. Raises
    Infeasible if the preemptible run makes no progress.
    """
    steady = forecast(without_waits(run, None))
    on_demand_usd = cost_usd(steady.billed_chip_s, on_demand_rate)

    def excess(preemption_s: float) -> float:
        try:
            expected = forecast(without_waits(run, preemption_s))
        except Infeasible:
            return math.inf
        return cost_usd(expected.billed_chip_s, spot_rate) - on_demand_usd

    spot_usd = cost_usd(forecast(run).billed_chip_s, spot_rate)
    if excess(LONGEST_S) >= 0:
        return SpotComparison(spot_usd, on_demand_usd, None)
    if excess(SHORTEST_S) < 0:
        return SpotComparison(spot_usd, on_demand_usd, 0.0)
    low, high = math.log(SHORTEST_S), math.log(LONGEST_S)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(math.exp(middle)) >= 0 else (low, middle)
    return SpotComparison(spot_usd, on_demand_usd, math.exp(high))
