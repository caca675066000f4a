"""Runs that are drawn: same seed, same figures; a published run's spread; fast enough."""

import time
from dataclasses import replace

import pytest

from sabia.core.plan.stops.process import Process, expectation
from sabia.core.plan.stops.simulation import simulate, spread

DAY_S, HOUR_S = 86400.0, 3600.0
ARTICLE = Process(453, 12.6 * DAY_S / 453 + 4, 2400, 900, 1e-6, 1 / (6 * HOUR_S))


def test_a_seed_is_a_result():
    assert simulate(ARTICLE, 50, 1) == simulate(ARTICLE, 50, 1)
    assert simulate(ARTICLE, 50, 1) != simulate(ARTICLE, 50, 2)


def test_percentiles_are_nearest_ranks():
    statistics_of_runs = spread([float(n) for n in range(100, 0, -1)])
    assert (statistics_of_runs.mean, statistics_of_runs.p50, statistics_of_runs.p95) == (
        50.5,
        50,
        95,
    )
    assert statistics_of_runs.error == pytest.approx(2.901, abs=0.001)


def test_without_stops_every_course_is_the_same():
    calm = replace(ARTICLE, failure_rate=0.0, preemption_rate=0.0)
    drawn = simulate(calm, 10)
    assert drawn.wall_s.p50 == drawn.wall_s.p95 == pytest.approx(expectation(calm).wall_s)


def test_waits_spread_the_wall_time_but_not_the_bill():
    waits = replace(ARTICLE, capacity_wait_s=6 * HOUR_S)
    here, away = simulate(ARTICLE, 1000), simulate(waits, 1000)
    assert away.wall_s.p95 - away.wall_s.p50 > here.wall_s.p95 - here.wall_s.p50
    assert away.billed_s.mean == pytest.approx(here.billed_s.mean, rel=0.01)


def test_two_thousand_runs_of_a_usual_plan_take_less_than_two_seconds():
    start = time.process_time()
    simulate(ARTICLE, 2000)
    assert time.process_time() - start < 2


def test_a_run_of_many_saves_costs_as_much_as_its_stops():
    """54 days with a stop every three hours, saved every five minutes: 15,552 saves a run."""
    published = Process(15_552, 304, 60, 600, 1 / (3.09 * HOUR_S))
    start = time.process_time()
    drawn = simulate(published, 200)
    assert time.process_time() - start < 1
    assert drawn.stops.mean == pytest.approx(419 * 1.09, rel=0.03)
