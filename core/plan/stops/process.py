"""A run with interruptions, saves and restarts as a random process, and its exact expectations.

The process (simulation.py simulates it, this module computes its expectations):
- Work is divided into n equal segments of s = τ + D: work, then the blocking time of a save. The
  save is durable after U, during the next segment; the run ends when its last save is durable.
- While the machines run, interruptions occur at rate 1/M: failures of a chip and preemptions of the
  whole cluster, both Poisson. All work after the newest durable save is lost, and the next start
  needs R before it continues. Interruptions may also occur during restarts and uploads.
- After a preemption the machines are unavailable for `capacity_wait_s` on average. The repair of a
  failed node takes `repair_s`; the run continues at once with a spare node, if one is available,
  else it waits for the first repaired node.
- A job limit of L ends a job after its K = ⌊(L − R − U)/s⌋ segments; nothing is lost, but the next
  job waits `queue_s` and restarts (the limit counts from each start).
- With peer copies each node's share of a save is also in another node's memory. After a failure the
  run continues from the newest save, whose upload continues; after a preemption from the newest
  durable one.
Waiting machines neither fail nor are preempted, and repairs pause while all are unavailable.

Expectations. Let T_k = R + U + k·s be the time from a start to its k-th durable save. Without a
limit each further save after the first costs M(1 − e^(−s/M)) + (1 − e^(−s/M))·M(e^((R+U+s)/M) − 1),
which is the complete model of Daly (FGCS 22(3), 2006) with R + U for its restart; the first start
has no R, and the last save must also upload. Together, exactly:
    M e^(R/M) [ n e^(U/M) (e^(s/M) − 1) + e^(U/M) − 1 ].
With peer copies the upload counts only at the rate λ of preemptions. Let A be the time from one
save to the next. A save is lost if a preemption occurs within U after it, and must then be
repeated, so A = M e^(R/M) (e^(s/M) − 1) + (1 − e^(−λU)) A for any failures in between: A is the
complete model's time without an upload, times e^(λU).
With a limit, V(j), the time that j segments still need at a start, follows from the last durable
save of the job: V(j) = M(1 − e^(−T_m/M)) + Σ_k P(k) V(j − k), m = min(j, K). P(k) is geometric in
k, so the sum is cumulative and V(n) needs n steps.
The number of interruptions is exposed time / M (Wald). Failed nodes under repair are a birth-death
process; a failure without a spare waits repair_s / (spares + 1). In the long run the waits are the
share of time of Erlang's loss formula B(spares + 1, failure_rate · repair_s) (Erlang 1917); a run
starts with all spares available, so `repair_wait` computes the process from that state.

The figures of a run with interruptions (process.py says what happens in it).

Expected wait for the repair of failed nodes.

Nodes under repair are a birth-death process: n → n + 1 at a failure, n → n − 1 at the rate
n / repair_s. A failure while all spares are away (n = spares) waits for the first of spares + 1
repairs, repair_s / (spares + 1) on average, and leaves n as it is.

Exact, for a run that one job can hold. Let D(τ) be the deaths in τ, S(τ) = e^(−rate·τ) D(τ), and
B(τ) = ∫₀^τ rate·S(t) dt = rate (rate − Q)⁻¹ (1 − S(τ)), with Q the generator of the deaths; let G
be the change of n at an interruption and r the probability that it waits. With h = R + U and s the
length of a segment, the waiting failures W(j) from a restart with j segments left, and U(j) from a
durable save, are vectors over n:
    W(j) = S(h + s) U(j − 1) + B(h + s) (r + G W(j))
    U(j) = S(s) U(j − 1) + B(s) (r + G W(j)),     U(0) = 0.
So U(j) = M U(j − 1) + c, and U(n − 1) is a power of a matrix.

Nearly, for runs of several jobs, peer copies or very many spares: the probability that all are
away, over an exposed time with an Erlang distribution of 64 phases that does not depend on the
failures. That is good where a run has many failures or few of them matter.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sabia.core.errors import Infeasible

if TYPE_CHECKING:
    import numpy as np


def segments_within(limit_s: float, lead_s: float, segment_s: float) -> int:
    """Segments that a job of `limit_s` completes and uploads after its restart."""
    return int((limit_s - lead_s) / segment_s * (1 + 1e-12))


@dataclass(frozen=True, kw_only=True)
class Waits:
    """Waits for machines, and job limits; seconds.

    After a preemption of the whole cluster its machines are away for `capacity_wait_s` on average,
    not billed. The repair of a failed node takes `repair_s` on average; `spare_nodes` replace it
    and are billed. A job ends after `job_limit_s` (None: never) and the next one waits `queue_s`.
    With `peer_copies` each node's share of a save is also in another node's memory, so that the
    failure of one node loses nothing of an upload (Gemini, SOSP 2023); a preemption of all does.
    """

    capacity_wait_s: float = 0.0
    repair_s: float = 0.0
    spare_nodes: int = 0
    job_limit_s: float | None = None
    queue_s: float = 0.0
    peer_copies: bool = False


@dataclass(frozen=True)
class Process(Waits):
    """One run on one cluster; seconds, and rates per second of the whole cluster.

    `segment_s` includes the blocking time of its save.
    """

    segments: int
    segment_s: float
    upload_s: float
    restart_s: float
    failure_rate: float = 0.0
    preemption_rate: float = 0.0

    @property
    def rate(self) -> float:
        """Interruptions per second while the machines run."""
        return self.failure_rate + self.preemption_rate

    @property
    def segments_a_job(self) -> int:
        """Segments within a job's limit; all of them without one."""
        if self.job_limit_s is None:
            return self.segments
        return segments_within(self.job_limit_s, self.restart_s + self.upload_s, self.segment_s)


HORIZON_STEPS = 64
MOST_SPARES = 64  # of the exact form, whose time is the cube of it
MOST_STOPS = 20.0  # a segment that so many interruptions are expected in never ends


def repair_wait(process: Process, exposed_s: float) -> float:
    """Expected wait for repairs while the machines run for `exposed_s`, seconds."""
    failures, spares = process.failure_rate, process.spare_nodes
    if not failures or not process.repair_s:
        return 0.0
    if not spares or math.isinf(exposed_s):
        return failures * exposed_s * process.repair_s
    lead_s = process.restart_s + process.upload_s
    one_job = process.segments_a_job >= process.segments and not process.peer_copies
    ends = process.rate * (lead_s + process.segment_s) < MOST_STOPS
    if one_job and ends and spares <= MOST_SPARES:
        waiting = _waiting_failures(process, lead_s)
    else:
        waiting = failures * _all_away_s(process, exposed_s)
    return waiting * process.repair_s / (spares + 1)


def _waiting_failures(process: Process, lead_s: float) -> float:
    """Expected failures without a spare, exactly."""
    import numpy as np

    spares, rate, segment_s = process.spare_nodes, process.rate, process.segment_s
    away, one = np.arange(spares + 1), np.eye(spares + 1)
    deaths = np.diag(away) - np.diag(away[1:], -1)
    ways = np.array([[math.comb(n, m) for m in away] for n in away.tolist()], dtype=float)
    fails = process.failure_rate / rate
    change = (1 - fails) * one + fails * one[np.minimum(away + 1, spares)]
    waits = fails * one[:, -1:]

    def passes(time_s: float) -> tuple["np.ndarray", "np.ndarray"]:
        kept = math.exp(-time_s / process.repair_s)
        powers = kept**away * (1 - kept) ** np.maximum(0, away[:, None] - away)
        through = math.exp(-rate * time_s) * ways * powers
        generator = one + deaths / (rate * process.repair_s)
        return through, np.linalg.solve(generator, one - through)

    through, stopped = passes(segment_s)
    through_first, stopped_first = passes(lead_s + segment_s)
    again = np.linalg.inv(one - stopped_first @ change)
    gained = stopped @ change @ again
    step = np.zeros((spares + 2, spares + 2))
    step[:-1, :-1] = through + gained @ through_first
    step[:-1, -1:] = stopped @ waits + gained @ stopped_first @ waits
    step[-1, -1] = 1
    later = np.linalg.matrix_power(step, process.segments - 1)[:-1, -1:]
    restarted = again @ (through_first @ later + stopped_first @ waits)
    through, stopped = passes(process.upload_s + segment_s)
    return float((through @ later + stopped @ (waits + change @ restarted))[0, 0])


def _all_away_s(process: Process, exposed_s: float) -> float:
    """Expected time with all spares under repair, by implicit Euler steps."""
    failures, spares = process.failure_rate, process.spare_nodes
    step_s = exposed_s / HORIZON_STEPS
    fail, back = failures * step_s, 1 / process.repair_s * step_s
    probabilities, all_away = [1.0] + [0.0] * spares, 0.0
    for _ in range(HORIZON_STEPS):
        # nodes under repair n → n + 1 at `fail`, n → n − 1 at n·`back`
        ratios, parts = list[float](), list[float]()
        for n, probability in enumerate(probabilities):
            out = 1 + n * back + (fail if n < spares else 0.0)
            from_below = fail * ratios[-1] if n else 0.0
            pivot = max(1.0, out - from_below)  # it is at least 1, except for rounding
            ratios.append((n + 1) * back / pivot)
            parts.append((probability + (fail * parts[-1] if n else 0.0)) / pivot)
        probabilities = [parts[spares]]
        for n in range(spares - 1, -1, -1):
            probabilities.append(parts[n] + ratios[n] * probabilities[-1])
        probabilities.reverse()
        all_away += probabilities[spares] * step_s
    return all_away


@dataclass(frozen=True)
class Expectation:
    """Expected values of a process.

    exposed_s: time in which machines run (work, saves, restarts, lost work). Waits for repairs are
    billed; waits for capacity or in a queue are not. cuts: ends of jobs by their limit.
    """

    exposed_s: float
    waited_capacity_s: float
    waited_repair_s: float
    waited_queue_s: float
    failures: float
    preemptions: float
    cuts: float

    @property
    def wall_s(self) -> float:
        """From the first start to the last durable save."""
        return self.billed_s + self.waited_capacity_s + self.waited_queue_s

    @property
    def billed_s(self) -> float:
        """Time in which the cluster is billed."""
        return self.exposed_s + self.waited_repair_s


def divided(
    work_s: float, interval_s: float, offload_s: float, lead_s: float, limit_s: float | None
) -> tuple[int, float]:
    """`work_s` in equal segments of about `interval_s`: their number and length.

    They are a little longer, so that their number is whole; with a limit, so that a whole number of
    them fits a job. Raises Infeasible if none fits.
    """
    if limit_s is not None:
        fitting = segments_within(limit_s, lead_s, interval_s + offload_s)
        if fitting < 1:
            need = lead_s + interval_s + offload_s
            raise Infeasible(
                f"--job-limit: a job of {limit_s / 60:.0f} min ends before its first save is "
                f"stored (restart, one interval and upload take {need / 60:.0f} min); use "
                f"--job-limit {math.ceil(need / 60)}m or a faster --bucket-gbps"
            )
        interval_s = (limit_s - lead_s) / fitting - offload_s
        segments = math.ceil(work_s / interval_s * (1 - 1e-12))
    else:
        segments = int(work_s / interval_s * (1 + 1e-12))
    segments = max(1, segments)
    return segments, work_s / segments + offload_s


def exposed(
    segments: float, segment_s: float, upload_s: float, restart_s: float, mean_s: float
) -> float:
    """Expected seconds of `segments` (may be a fraction), with interruptions every `mean_s`.

    Without waits or limits; inf if a float64 overflows.
    """
    if math.isinf(mean_s):
        return segments * segment_s + upload_s
    try:
        lag = math.exp(upload_s / mean_s)
        saves = segments * lag * math.expm1(segment_s / mean_s) + math.expm1(upload_s / mean_s)
        return mean_s * math.exp(restart_s / mean_s) * saves
    except OverflowError:
        return math.inf


def expectation(process: Process) -> Expectation:
    """The expected values of `process`."""
    mean_s = 1 / process.rate if process.rate else math.inf
    cuts, upload_s = 0.0, process.upload_s
    if process.peer_copies:
        exposed_s = _mirrored(process, mean_s)
    elif process.segments_a_job < process.segments:
        exposed_s, cuts = _limited(process, mean_s)
    else:
        sizes = process.segments, process.segment_s
        exposed_s = exposed(*sizes, upload_s, process.restart_s, mean_s)
    preemptions = exposed_s * process.preemption_rate
    return Expectation(
        exposed_s=exposed_s,
        waited_capacity_s=preemptions * process.capacity_wait_s,
        waited_repair_s=repair_wait(process, exposed_s),
        waited_queue_s=cuts * process.queue_s,
        failures=exposed_s * process.failure_rate,
        preemptions=preemptions,
        cuts=cuts,
    )


def _mirrored(process: Process, mean_s: float) -> float:
    """Exposed time with peer copies; no job limit."""
    rate, lag_s, restart_s = process.preemption_rate, process.upload_s, process.restart_s
    try:
        save_s = exposed(1, process.segment_s, 0.0, restart_s, mean_s)
        again_s = exposed(1, process.segment_s + restart_s, 0.0, 0.0, mean_s)
        lost = math.expm1(rate * lag_s)
    except OverflowError:
        return math.inf
    last_s = lost * (1 / rate + again_s) if rate else lag_s
    return save_s * (1 + (process.segments - 1) * (1 + lost)) + last_s


def _limited(process: Process, mean_s: float) -> tuple[float, float]:
    """Exposed time and cuts with a job limit, by the recurrence over remaining segments."""
    full, s, upload_s = process.segments_a_job, process.segment_s, process.upload_s
    again, fresh = (_Start(full, s, upload_s + head, mean_s) for head in (process.restart_s, 0.0))
    if again.nothing >= 1:
        return math.inf, math.inf
    ratio = math.exp(-s / mean_s)
    beyond = ratio**full
    restart_s = process.restart_s
    first = exposed(1, s + restart_s, upload_s, 0.0, mean_s)
    each = exposed(2, s, upload_s, restart_s, mean_s) - exposed(1, s, upload_s, restart_s, mean_s)
    times, cuts = [0.0], [0.0]
    time_sum = cut_sum = 0.0
    for left in range(1, process.segments + 1):
        time_sum, cut_sum = ratio * (time_sum + times[-1]), ratio * (cut_sum + cuts[-1])
        if left <= full:
            times.append(first + (left - 1) * each)
            cuts.append(0.0)
            continue
        rest_s, rest_cuts = times[left - full], cuts[left - full]
        time_sum, cut_sum = time_sum - beyond * rest_s, cut_sum - beyond * rest_cuts
        times.append(again.mean(again.job_s, time_sum, rest_s) / (1 - again.nothing))
        cuts.append(again.mean(0.0, cut_sum, rest_cuts + 1) / (1 - again.nothing))
    return (
        fresh.mean(fresh.job_s, time_sum, rest_s) + fresh.nothing * times[-1],
        fresh.mean(0.0, cut_sum, rest_cuts + 1) + fresh.nothing * cuts[-1],
    )


class _Start:
    """A job with a limit: its mean time, and the probabilities of its durable saves.

    nothing: of no durable save; partly · ratio^k: of k; through: of all, so that the limit ends it.
    """

    def __init__(self, segments: int, segment_s: float, lead_s: float, mean_s: float) -> None:
        """A job of `segments` after a restart and the upload of a save, `lead_s`."""
        end_s = lead_s + segments * segment_s
        self.through = math.exp(-end_s / mean_s)
        self.job_s = end_s if math.isinf(mean_s) else mean_s * (1 - self.through)
        self.nothing = -math.expm1(-(lead_s + segment_s) / mean_s)
        self.partly = math.exp(-lead_s / mean_s) * -math.expm1(-segment_s / mean_s)

    def mean(self, own: float, after_some: float, after_all: float) -> float:
        """The job's own value plus the mean of the rest, without the case of no durable save."""
        return own + self.partly * after_some + self.through * after_all
