"""Stops, saves and the time they cost, against closed forms, published figures and simulation."""

import math
import random

import pytest

from sabia.core.errors import Infeasible, UsageError
from sabia.core.plan.chips import find_chip
from sabia.core.plan.stops import failures
from sabia.core.plan.stops.failures import StopModel, expected_wall, forecast

DAY_S, HOUR_S, MINUTE_S = 86400.0, 3600.0, 60.0
WORK_S = 12.6 * DAY_S


@pytest.mark.parametrize(
    ("mean_s", "days"), [(6 * HOUR_S, 13.95), (24 * HOUR_S, 12.96), (6.67 * DAY_S, 12.70)]
)
def test_expected_wall_without_upload_lag(mean_s, days):
    wall_s = expected_wall(WORK_S, 40 * MINUTE_S, 10, mean_s, 15 * MINUTE_S)
    assert wall_s / DAY_S == pytest.approx(days, abs=0.01)


def test_expected_wall_without_stops_is_work_and_saves():
    assert expected_wall(1000, 100, 1, math.inf, 60) == pytest.approx(1010)
    assert expected_wall(1000, 100, 1, 1e12, 60) == pytest.approx(1010, rel=1e-6)


def test_expected_wall_agrees_with_simulated_stops():
    work_s, interval_s, offload_s, mean_s, restart_s = 40_000.0, 1000.0, 20.0, 8000.0, 300.0
    chance, total, runs = random.Random(1), 0.0, 4000
    for _ in range(runs):
        for _segment in range(int(work_s / interval_s)):
            total += simulated_segment(chance, interval_s + offload_s, mean_s, restart_s)
    closed = expected_wall(work_s, interval_s, offload_s, mean_s, restart_s)
    assert total / runs == pytest.approx(closed, rel=0.02)


def simulated_segment(chance, segment_s, mean_s, restart_s):
    """Time until a segment is done, where stops may also hit the restart."""
    total, need = 0.0, segment_s
    while True:
        stop_s = chance.expovariate(1 / mean_s)
        if stop_s >= need:
            return total + need
        total += stop_s
        need = restart_s + segment_s


def test_interval_is_youngs_optimum_unless_the_upload_is_longer():
    assert failures.checkpoint_interval(50, 10, 10_000) == pytest.approx(1000)
    assert failures.checkpoint_interval(50, 2000, 10_000) == 2000


def test_youngs_interval_is_near_the_best_of_all():
    def wall(interval_s):
        return expected_wall(1e6, interval_s, 10, 20_000, 300)

    best = min(range(100, 3000, 10), key=wall)
    assert wall(failures.checkpoint_interval(10, 0, 20_000)) == pytest.approx(wall(best), rel=1e-3)


def test_failures_and_preemptions_add_up():
    mean_s = failures.mean_time_between(100, 0.01, 86400)
    assert mean_s == pytest.approx(DAY_S / 2)
    assert failures.mean_time_between(100, 0, None) == math.inf


def test_published_failures_of_a_16384_gpu_run():
    """Llama 3: 419 unexpected stops in 54 days on 16,384 GPUs."""
    rate = 419 / 54 / 16_384
    assert rate == pytest.approx(0.000474, rel=1e-3)
    assert failures.mean_time_between(16_384, rate, None) / HOUR_S == pytest.approx(3.09, abs=0.005)


def test_forecast_puts_the_upload_into_what_a_stop_costs():
    model = StopModel(preemption_s=6 * HOUR_S, failures_per_chip_day=0, bucket_bytes_per_s=8e9)
    seen = forecast(model, find_chip("v5p"), 300, 19.2e12, WORK_S)
    lag = expected_wall(WORK_S, seen.interval_s, seen.offload_s, 6 * HOUR_S, 55 * MINUTE_S)
    assert seen.upload_s == pytest.approx(40 * MINUTE_S)
    assert seen.offload_s == pytest.approx(4.0)
    assert seen.wall_s == pytest.approx(lag)


def test_forecast_without_any_stop():
    seen = forecast(StopModel(failures_per_chip_day=0), find_chip("h100"), 8, 1e11, DAY_S)
    assert seen.mean_time_between_stops_s == math.inf
    assert seen.failure_probability == 0
    assert seen.wall_s == pytest.approx(DAY_S, rel=0.01)


def test_stops_faster_than_saves_are_infeasible():
    model = StopModel(preemption_s=60.0)
    with pytest.raises(Infeasible, match="leaves no progress"):
        forecast(model, find_chip("v5p"), 300, 19.2e12, WORK_S)


def test_a_chip_without_known_rates_is_refused():
    with pytest.raises(UsageError, match="no host and network rates of tpu-v7"):
        forecast(StopModel(), find_chip("v7"), 300, 19.2e12, WORK_S)


@pytest.mark.parametrize("field", ["preemption_s", "bucket_bytes_per_s", "spot_share"])
def test_a_stop_model_of_nothing_is_refused(field):
    with pytest.raises(UsageError, match="more than 0"):
        StopModel(**{field: 0.0})
