"""Expected wait for the repair of failed nodes.

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
from typing import TYPE_CHECKING

from sabia.core.plan.stops.job import Process

if TYPE_CHECKING:
    import numpy as np

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
