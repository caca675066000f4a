"""The closed form against a save-by-save oracle, the simulation, and known limits."""

import math
import random

import pytest
from plain_models import expected_wall

from sabia.core.errors import Infeasible
from sabia.core.plan.stops.process import Process, divided, expectation
from sabia.core.plan.stops.simulation import simulate

DAY_S, HOUR_S, MINUTE_S = 86400.0, 3600.0, 60.0
WORK_S = 12.6 * DAY_S


@pytest.mark.parametrize(
    ("mean_s", "days"), [(6 * HOUR_S, 13.95), (24 * HOUR_S, 12.96), (6.67 * DAY_S, 12.70)]
)
def test_expected_wall_without_upload_lag(mean_s, days):
    wall_s = expected_wall(WORK_S, 40 * MINUTE_S, 10, mean_s, 15 * MINUTE_S)
    assert wall_s / DAY_S == pytest.approx(days, abs=0.01)


def test_expected_wall_without_stops_is_work_saves_and_the_last_upload():
    assert expected_wall(1000, 100, 1, math.inf, 60) == pytest.approx(1010)
    assert expected_wall(1000, 100, 1, 1e12, 60) == pytest.approx(1010, rel=1e-6)
    assert expected_wall(1000, 100, 1, math.inf, 60, upload_s=50) == pytest.approx(1060)
    assert expected_wall(1000, 100, 1, 1e12, 60, upload_s=50) == pytest.approx(1060, rel=1e-6)


def test_expected_wall_beyond_a_double_is_infinite():
    assert expected_wall(1e6, 1e5, 1, 100, 60) == math.inf


def wall(rng, segments, work_s, offload_s, upload_s, restart_s, mean_s):
    """The oracle: one course, save by save, with a clock and a list of uploads on their way.

    Written without the planner's formulas or its simulation. Returns the time at which the last
    save is in storage.
    """
    now, durable = 0.0, 0
    started = False
    while durable < segments:
        stop_at = now + (rng.expovariate(1 / mean_s) if mean_s < math.inf else math.inf)
        clock = now + (restart_s if started else 0.0)
        started = True
        on_their_way = []
        for k in range(durable + 1, segments + 1):
            clock += work_s + offload_s
            on_their_way.append((k, clock + upload_s))
            if clock > stop_at:
                break
        for k, stored_at in on_their_way:
            if stored_at <= stop_at:
                durable, now = k, stored_at
        if durable < segments:
            now = stop_at
    return now


@pytest.mark.parametrize(
    ("segments", "upload_s", "mean_s"),
    [(40, 0, 8000), (40, 900, 8000), (5, 1000, 3000), (1, 500, 2000), (12, 2500, 9000)],
)
def test_closed_form_agrees_with_the_oracle(segments, upload_s, mean_s):
    """Also with uploads longer than an interval, of which several are on their way."""
    rng, runs = random.Random(1), 4000
    drawn = [wall(rng, segments, 1000.0, 20.0, upload_s, 300.0, mean_s) for _ in range(runs)]
    mean = sum(drawn) / runs
    error = math.sqrt(sum((x - mean) ** 2 for x in drawn)) / runs
    closed = expected_wall(segments * 1000.0, 1000.0, 20.0, mean_s, 300.0, upload_s)
    assert abs(mean - closed) < 3.5 * error
    assert error < 0.01 * closed


@pytest.mark.parametrize("seed", range(8))
def test_peer_copies_agree_with_the_simulation(seed):
    rng = random.Random(seed)
    mean_s = HOUR_S * 10 ** rng.uniform(0.3, 2)
    upload_s, failures = rng.choice([600.0, 2400.0]), rng.choice([0.0, 0.3, 0.7, 1.0])
    segments, restart_s = rng.randrange(5, 100), rng.choice([60.0, 900.0])
    process = Process(
        segments, 2520.0, upload_s, restart_s, failures / mean_s,
        (1 - failures) / mean_s, peer_copies=True,
    )  # fmt: skip
    seen, drawn = expectation(process), simulate(process, 3000, seed)
    assert abs(drawn.wall_s.mean - seen.wall_s) < 4 * drawn.wall_s.error
    assert drawn.wall_s.mean == pytest.approx(seen.wall_s, rel=0.01)


def test_peer_copies_change_nothing_where_all_stops_are_preemptions():
    alone = Process(400, 2510.0, 2400.0, 900.0, 0.0, 5e-5)
    mirrored = Process(400, 2510.0, 2400.0, 900.0, 0.0, 5e-5, peer_copies=True)
    assert expectation(mirrored).wall_s == pytest.approx(expectation(alone).wall_s, rel=1e-12)
    never = Process(400, 2510.0, 2400.0, 900.0, 5e-5, 0.0, peer_copies=True)
    assert expectation(never).wall_s == pytest.approx(
        expected_wall(1e6, 2500.0, 10.0, 2e4, 900.0) + 2400.0
    )


def random_process(rng):
    """A process of a wide grid: hours to weeks between stops, half a day to two months of work."""
    mean_s = HOUR_S * 10 ** rng.uniform(0.4, 2.4)
    work_s = DAY_S * 10 ** rng.uniform(-0.3, 1.8)
    upload_s = rng.choice([0.0, 60.0, 600.0, 2400.0])
    offload_s, restart_s = rng.choice([1.0, 10.0, 60.0]), rng.choice([60.0, 900.0])
    limit_s = rng.choice([None, 6 * HOUR_S, DAY_S, 3 * DAY_S])
    interval_s = max(upload_s, math.sqrt(2 * offload_s * mean_s))
    segments, segment_s = divided(work_s, interval_s, offload_s, restart_s + upload_s, limit_s)
    failures = rng.random()
    return Process(
        segments=segments,
        segment_s=segment_s,
        upload_s=upload_s,
        restart_s=restart_s,
        failure_rate=failures / mean_s,
        preemption_rate=(1 - failures) / mean_s,
        capacity_wait_s=rng.choice([0.0, HOUR_S, 4 * HOUR_S]),
        repair_s=rng.choice([0.0, 0.0, HOUR_S, 6 * HOUR_S]),
        spare_nodes=rng.choice([0, 1, 2]),
        job_limit_s=limit_s,
        queue_s=rng.choice([0.0, HOUR_S]),
    )


def agree(seed):
    """Draw until the mean is known to a quarter of a percent, and hold it to the closed form."""
    process = random_process(random.Random(seed))
    seen = expectation(process)
    runs, drawn = 1000, simulate(process, runs=1000, seed=seed)
    while drawn.wall_s.error > 0.0025 * seen.wall_s and runs < 64_000:
        runs *= 4
        drawn = simulate(process, runs=runs, seed=seed)
    pairs = [
        (drawn.wall_s, seen.wall_s), (drawn.billed_s, seen.billed_s),
        (drawn.stops, seen.failures + seen.preemptions), (drawn.cuts, seen.cuts),
    ]  # fmt: skip
    assert drawn.wall_s.mean == pytest.approx(seen.wall_s, rel=0.01)
    assert drawn.billed_s.mean == pytest.approx(seen.billed_s, rel=0.01)
    for spread, expected in pairs:
        assert abs(spread.mean - expected) <= 4 * spread.error + 0.002 * expected + 0.01


@pytest.mark.parametrize("seed", range(24))
def test_simulation_agrees_within_one_percent_on_a_wide_grid(seed):
    agree(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24, 224))
def test_simulation_agrees_within_one_percent_on_a_wider_grid(seed):
    agree(seed)


def test_a_limit_that_never_binds_changes_nothing():
    free = Process(300, WORK_S / 300 + 5, 600, 900, 1e-5, 2e-5)
    loose = Process(300, WORK_S / 300 + 5, 600, 900, 1e-5, 2e-5, job_limit_s=400 * DAY_S)
    assert expectation(free) == expectation(loose)
    tight = Process(300, WORK_S / 300 + 5, 600, 900, 1e-5, 2e-5, job_limit_s=12.5 * DAY_S)
    assert expectation(tight).exposed_s == pytest.approx(expectation(free).exposed_s, rel=1e-3)
    assert 0 < expectation(tight).cuts < 1e-3


def test_waits_for_repair_are_erlangs_loss_in_the_long_run():
    for spares, load in [(0, 0.5), (1, 0.1), (2, 2.0), (4, 2.0)]:
        lost = sum(load**n / math.factorial(n) for n in range(spares + 2))
        lost = load ** (spares + 1) / math.factorial(spares + 1) / lost
        for peer_copies in (False, True):  # exactly, and by steps
            process = Process(
                10**9, 1, 0, 0, failure_rate=load / HOUR_S, repair_s=HOUR_S, spare_nodes=spares,
                peer_copies=peer_copies,
            )  # fmt: skip
            seen = expectation(process)
            assert seen.waited_repair_s / seen.wall_s == pytest.approx(lost, rel=1e-3)


@pytest.mark.parametrize("seed", range(12))
def test_waits_for_repair_of_short_runs_agree_with_the_simulation(seed):
    """Runs with about one failure: those that have one are longer and have more of them."""
    rng = random.Random(seed)
    mean_s = HOUR_S * 10 ** rng.uniform(0, 1.5)
    segments, fails = rng.choice([1, 2, 5, 40]), rng.choice([0.3, 0.7, 1.0])
    length_s = mean_s * rng.uniform(0.1, 1.5) / segments
    process = Process(
        segments, length_s, rng.choice([0.0, 0.3, 1.0]) * length_s, rng.choice([60.0, 900.0]),
        fails / mean_s, (1 - fails) / mean_s, repair_s=rng.choice([0.3, 1.0, 5.0]) * mean_s,
        spare_nodes=rng.choice([1, 2, 4]),
    )  # fmt: skip
    seen, drawn = expectation(process), simulate(process, 6000, seed)
    assert abs(drawn.billed_s.mean - seen.billed_s) < 4 * drawn.billed_s.error
    assert drawn.billed_s.mean == pytest.approx(seen.billed_s, rel=0.06)


def test_waits_for_repair_are_the_same_exactly_and_by_steps_in_long_runs(monkeypatch):
    process = Process(3000, 900.0, 60.0, 300.0, 2e-5, 1e-5, repair_s=50_000.0, spare_nodes=2)
    exact = expectation(process).waited_repair_s
    monkeypatch.setattr("sabia.core.plan.stops.process.MOST_SPARES", 1)
    assert expectation(process).waited_repair_s == pytest.approx(exact, rel=0.01)


def test_segments_fill_the_work_and_the_job():
    assert divided(1000, 100, 2, 50, None) == (10, 102)
    assert divided(1090, 100, 2, 50, None) == (10, 111)
    assert divided(50, 100, 2, 50, None) == (1, 52)
    segments, length_s = divided(1000, 100, 2, 50, 400)
    assert 50 + 3 * length_s <= 400
    assert segments * (length_s - 2) == pytest.approx(1000)
    with pytest.raises(Infeasible, match="--job-limit 3m"):
        divided(1000, 100, 2, 50, 151)
