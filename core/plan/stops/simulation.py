"""Monte Carlo of a run that is stopped, saved and brought back: the spread of its time and bill.

Draws the process of process.py. A start is one step, whatever its number of saves: the time to the
next stop is exponential, and how many saves were durable by then is a division. A run of a hundred
stops takes a hundred steps, so thousands of runs take a second. Same seed, same figures.
"""

import math
from bisect import bisect_right, insort
from dataclasses import dataclass
from random import Random

from sabia.core.errors import UsageError
from sabia.core.plan.stops.process import Process


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of one figure over all runs; `error` is the mean's standard error."""

    mean: float
    p50: float
    p95: float
    error: float


@dataclass(frozen=True)
class Simulated:
    """What `runs` courses of a process took; seconds. `stops` are failures and preemptions."""

    runs: int
    seed: int
    wall_s: Spread
    billed_s: Spread
    stops: Spread
    cuts: Spread


@dataclass
class Course:
    """One course of a process, as far as it is drawn."""

    exposed_s: float = 0.0
    unbilled_wait_s: float = 0.0
    repair_wait_s: float = 0.0
    stops: int = 0
    cuts: int = 0

    @property
    def billed_s(self) -> float:
        """Time in which the cluster is held and paid for."""
        return self.exposed_s + self.repair_wait_s

    @property
    def wall_s(self) -> float:
        """From the first start to the last durable save."""
        return self.billed_s + self.unbilled_wait_s


def simulate(process: Process, runs: int, seed: int = 0) -> Simulated:
    """Draw `runs` courses of `process`. Raises UsageError on no runs.

    The caller makes sure that the process makes progress (its expectation is finite and sane).
    """
    if runs < 1:
        raise UsageError(f"--simulate: {runs} (expected 1 run or more)")
    chance = Random(seed)
    courses = [course(process, chance) for _ in range(runs)]
    return Simulated(
        runs=runs,
        seed=seed,
        wall_s=spread([each.wall_s for each in courses]),
        billed_s=spread([each.billed_s for each in courses]),
        stops=spread([float(each.stops) for each in courses]),
        cuts=spread([float(each.cuts) for each in courses]),
    )


def spread(values: list[float]) -> Spread:
    """Mean, median, 95th percentile (nearest rank) and the mean's standard error."""
    ordered, count = sorted(values), len(values)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, count - 1)
    return Spread(
        mean=mean,
        p50=ordered[math.ceil(0.50 * count) - 1],
        p95=ordered[math.ceil(0.95 * count) - 1],
        error=math.sqrt(variance / count),
    )


def course(process: Process, chance: Random) -> Course:
    """Draw one course: start after start, until the last save is durable."""
    if process.peer_copies:
        return _mirrored(process, chance)
    found, away = Course(), list[float]()
    left, head_s = process.segments, process.upload_s
    full, length_s, rate = process.segments_a_job, process.segment_s, process.rate
    while True:
        jobs = min(left, full)
        end_s = head_s + jobs * length_s
        stop_s = chance.expovariate(rate) if rate else math.inf
        if stop_s >= end_s:
            found.exposed_s += end_s
            left -= jobs
            if not left:
                return found
            found.cuts += 1
            found.unbilled_wait_s += _wait(process.queue_s, chance)
        else:
            found.exposed_s += stop_s
            left -= max(0, int((stop_s - head_s) / length_s))
            _bring_back(process, found, away, _fails(process, chance), chance)
        head_s = process.restart_s + process.upload_s


def _mirrored(process: Process, chance: Random) -> Course:
    """Draw one course with peer copies: what was taken survives failures, not preemptions."""
    found, away = Course(), list[float]()
    taken, stored_at, head_s, rate = 0, 0.0, 0.0, process.rate
    while True:
        begin_s = found.exposed_s
        stop_s = begin_s + chance.expovariate(rate) if rate else math.inf
        more = process.segments - taken
        if stop_s < math.inf:
            more = min(more, max(0, int((stop_s - begin_s - head_s) / process.segment_s)))
        if more:
            taken += more
            stored_at = begin_s + head_s + more * process.segment_s + process.upload_s
        if taken == process.segments and stored_at <= stop_s:
            found.exposed_s = stored_at
            return found
        found.exposed_s = stop_s
        fails = _fails(process, chance)
        if not fails and stored_at > stop_s:
            taken, stored_at = taken - 1, stop_s
        _bring_back(process, found, away, fails, chance)
        head_s = process.restart_s


def _fails(process: Process, chance: Random) -> bool:
    """Whether a stop is a failure of one node, rather than a preemption of all."""
    return chance.random() * process.rate < process.failure_rate


def _bring_back(
    process: Process, found: Course, away: list[float], fails: bool, chance: Random
) -> None:
    """Wait for machines after a stop. `away` are the times at which failed nodes come back."""
    found.stops += 1
    if not fails:
        found.unbilled_wait_s += _wait(process.capacity_wait_s, chance)
    elif process.repair_s:
        del away[: bisect_right(away, found.billed_s)]
        insort(away, found.billed_s + _wait(process.repair_s, chance))
        if len(away) > process.spare_nodes:
            found.repair_wait_s += away.pop(0) - found.billed_s


def _wait(mean_s: float, chance: Random) -> float:
    return chance.expovariate(1 / mean_s) if mean_s else 0.0
