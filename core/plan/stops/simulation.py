"""Monte Carlo simulation of a run with interruptions: the distribution of its time and cost.

Simulates the process of process.py. Each start is one step for any number of saves: the time to the
next interruption is exponential, and the number of durable saves by then is a division. A run with
a hundred interruptions takes a hundred steps, so thousands of runs take a second. The same seed
gives the same results.
"""

import math
from bisect import bisect_right, insort
from dataclasses import dataclass
from random import Random

from sabia.core.plan.stops.process import Process


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of one value over all runs; `error`: standard error of the mean."""

    mean: float
    p50: float
    p95: float
    error: float


@dataclass(frozen=True)
class Simulated:
    """Results of `runs` simulated runs; seconds. `stops`: failures and preemptions."""

    runs: int
    seed: int
    wall_s: Spread
    billed_s: Spread
    stops: Spread
    cuts: Spread


@dataclass
class Course:
    """One simulated run, up to the current step."""

    exposed_s: float = 0.0
    unbilled_wait_s: float = 0.0
    repair_wait_s: float = 0.0
    stops: int = 0
    cuts: int = 0

    @property
    def billed_s(self) -> float:
        """Time in which the cluster is billed."""
        return self.exposed_s + self.repair_wait_s

    @property
    def wall_s(self) -> float:
        """From the first start to the last durable save."""
        return self.billed_s + self.unbilled_wait_s


def simulate(process: Process, runs: int, seed: int = 0) -> Simulated:
    """Simulate `process` `runs` times.

    The caller must ensure that the process makes progress (its expectation is finite).
    """
    rng = Random(seed)
    courses = [course(process, rng) for _ in range(runs)]

    def over_runs(field: str) -> Spread:
        return spread([float(getattr(each, field)) for each in courses])

    return Simulated(runs, seed, *map(over_runs, ("wall_s", "billed_s", "stops", "cuts")))


def spread(values: list[float]) -> Spread:
    """Mean, median, 95th percentile (nearest rank) and the mean's standard error."""
    ordered, count = sorted(values), len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, count - 1)
    p50, p95 = (ordered[math.ceil(share * count) - 1] for share in (0.50, 0.95))
    return Spread(mean, p50, p95, error=math.sqrt(variance / count))


def course(process: Process, rng: Random) -> Course:
    """Simulate one run: start after start, until the last save is durable."""
    if process.peer_copies:
        return _mirrored(process, rng)
    run, away = Course(), list[float]()
    left, head_s = process.segments, process.upload_s
    full, length_s, rate = process.segments_a_job, process.segment_s, process.rate
    while True:
        jobs = min(left, full)
        end_s = head_s + jobs * length_s
        stop_s = rng.expovariate(rate) if rate else math.inf
        if stop_s >= end_s:
            run.exposed_s += end_s
            left -= jobs
            if not left:
                return run
            run.cuts += 1
            run.unbilled_wait_s += _wait(process.queue_s, rng)
        else:
            run.exposed_s += stop_s
            left -= max(0, int((stop_s - head_s) / length_s))
            _bring_back(process, run, away, _fails(process, rng), rng)
        head_s = process.restart_s + process.upload_s


def _mirrored(process: Process, rng: Random) -> Course:
    """Simulate one run with peer copies: saves survive failures, not preemptions."""
    run, away = Course(), list[float]()
    taken, stored_at, head_s, rate = 0, 0.0, 0.0, process.rate
    while True:
        begin_s = run.exposed_s
        stop_s = begin_s + rng.expovariate(rate) if rate else math.inf
        more = process.segments - taken
        if stop_s < math.inf:
            more = min(more, max(0, int((stop_s - begin_s - head_s) / process.segment_s)))
        if more:
            taken += more
            stored_at = begin_s + head_s + more * process.segment_s + process.upload_s
        if taken == process.segments and stored_at <= stop_s:
            run.exposed_s = stored_at
            return run
        run.exposed_s = stop_s
        fails = _fails(process, rng)
        if not fails and stored_at > stop_s:
            taken, stored_at = taken - 1, stop_s
        _bring_back(process, run, away, fails, rng)
        head_s = process.restart_s


def _fails(process: Process, rng: Random) -> bool:
    """Whether an interruption is a failure of one node, not a preemption of all."""
    return rng.random() * process.rate < process.failure_rate


def _bring_back(process: Process, run: Course, away: list[float], fails: bool, rng: Random) -> None:
    """Wait for machines after an interruption. away: end times of the repairs of failed nodes."""
    run.stops += 1
    if not fails:
        run.unbilled_wait_s += _wait(process.capacity_wait_s, rng)
    elif process.repair_s:
        del away[: bisect_right(away, run.billed_s)]
        insort(away, run.billed_s + _wait(process.repair_s, rng))
        if len(away) > process.spare_nodes:
            run.repair_wait_s += away.pop(0) - run.billed_s


def _wait(mean_s: float, rng: Random) -> float:
    return rng.expovariate(1 / mean_s) if mean_s else 0.0
