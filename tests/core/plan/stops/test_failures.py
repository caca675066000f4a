"""From a model of stops to the forecast of one cluster: published figures, waits, refusals."""

import math
from dataclasses import replace

import pytest
from plain_models import expected_wall

from sabia.core.errors import Infeasible, UsageError
from sabia.core.plan.chips import find_chip
from sabia.core.plan.stops import failures
from sabia.core.plan.stops.failures import StopModel, StoppedRun, forecast
from sabia.core.plan.stops.simulation import simulate

DAY_S, HOUR_S, MINUTE_S = 86400.0, 3600.0, 60.0
WORK_S = 12.6 * DAY_S


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
    model = StopModel(preemption_s=6 * HOUR_S, failures_per_chip_day=0, stall_s=4.0)
    seen = forecast(StoppedRun(model, find_chip("v5p"), 300, 19.2e12, WORK_S))
    lag = expected_wall(WORK_S, seen.interval_s, seen.offload_s, 6 * HOUR_S, 55 * MINUTE_S)
    lag += 41 * MINUTE_S  # the last save: its upload, where a stop costs a restart too
    assert seen.upload_s == pytest.approx(40 * MINUTE_S)
    assert seen.offload_s == pytest.approx(4.0)
    assert seen.wall_s == pytest.approx(lag, rel=3e-4)
    assert seen.lost_per_stop_s == pytest.approx(60 * MINUTE_S)
    assert seen.goodput == pytest.approx(WORK_S / seen.wall_s)


def test_forecast_without_any_stop():
    seen = forecast(
        StoppedRun(StopModel(failures_per_chip_day=0), find_chip("h100"), 8, 1e11, DAY_S)
    )
    assert seen.mean_time_between_stops_s == math.inf
    assert seen.failure_probability == 0
    assert seen.wall_s == pytest.approx(DAY_S, rel=0.01)


def test_stops_faster_than_saves_are_infeasible():
    model = StopModel(preemption_s=60.0)
    with pytest.raises(Infeasible, match="leaves no progress"):
        forecast(StoppedRun(model, find_chip("v5p"), 300, 19.2e12, WORK_S))


def test_a_chip_without_known_rates_is_refused():
    with pytest.raises(UsageError, match="no pcie_gb_s of tpu-v7"):
        forecast(StoppedRun(StopModel(), find_chip("v7"), 300, 19.2e12, WORK_S))


@pytest.mark.parametrize("field", ["preemption_s", "spot_share", "job_limit_s"])
def test_a_stop_model_of_nothing_is_refused(field):
    with pytest.raises(UsageError, match="more than 0"):
        StopModel(**{field: 0})


def test_peer_copies_spare_failures_the_upload_lag():
    bare, mirrored = v5p(), v5p(peer_copies=True)
    assert bare.lost_per_stop_s - mirrored.lost_per_stop_s == pytest.approx(40 * MINUTE_S)
    saved = bare.wall_s - mirrored.wall_s
    assert saved == pytest.approx(bare.failures * 40 * MINUTE_S, rel=0.05)
    assert mirrored.host_bytes_per_chip == 2 * bare.host_bytes_per_chip
    preempted = v5p(peer_copies=True, preemption_s=6 * HOUR_S)
    assert preempted.lost_per_stop_s == pytest.approx(20 * MINUTE_S + 37.2 * MINUTE_S, rel=0.01)


def test_published_effective_time_of_a_16384_gpu_run():
    """Llama 3: more than 90 % effective training time over 54 days with those stops."""
    model = StopModel(failures_per_chip_day=419 / 54 / 16_384, restart_s=600.0,
                      bucket_bytes_per_s=2e12)  # fmt: skip
    seen = forecast(StoppedRun(model, find_chip("h100"), 16_384, 405e9 * 12, 0.92 * 54 * DAY_S))
    assert seen.failures == pytest.approx(419, rel=0.05)
    assert 0.90 < seen.goodput < 0.96


def v5p(**settings):
    model = StopModel(failures_per_chip_day=0.001, stall_s=4.0, **settings)
    return forecast(StoppedRun(model, find_chip("v5p"), 300, 19.2e12, WORK_S))


def test_capacity_waits_add_time_but_no_bill():
    here = v5p(preemption_s=6 * HOUR_S)
    away = v5p(preemption_s=6 * HOUR_S, capacity_wait_s=2 * HOUR_S)
    assert away.billed_s == pytest.approx(here.billed_s)
    assert away.wall_s - here.wall_s == pytest.approx(2 * HOUR_S * away.preemptions)
    assert away.goodput < here.goodput


def test_a_spare_node_saves_the_wait_for_repairs_and_is_paid_for():
    bare, spare = v5p(repair_s=12 * HOUR_S), v5p(repair_s=12 * HOUR_S, spare_nodes=1)
    assert bare.waited_repair_s == pytest.approx(bare.failures * 12 * HOUR_S)
    assert spare.waited_repair_s < 0.2 * bare.waited_repair_s
    assert (bare.billed_chips, spare.billed_chips) == (300, 304)
    assert bare.billed_s == pytest.approx(bare.wall_s)


def test_one_node_fails_more_rarely_than_the_job():
    seen = v5p()
    assert seen.node_mean_time_between_failures_s == pytest.approx(250 * DAY_S)
    assert seen.mean_time_between_failures_s == pytest.approx(250 / 75 * DAY_S)


def test_a_job_limit_cuts_without_losing_work():
    free = v5p()
    cut = v5p(job_limit_s=DAY_S, queue_s=HOUR_S)
    assert 10 < cut.cuts < 12.6  # a stop starts the limit anew
    assert cut.waited_queue_s == pytest.approx(cut.cuts * HOUR_S)
    each = (cut.wall_s - free.wall_s) / cut.cuts
    assert each == pytest.approx(HOUR_S + 55 * MINUTE_S, rel=0.1)  # queue, restart, upload
    with pytest.raises(Infeasible, match="use --job-limit 96m"):
        v5p(job_limit_s=50 * MINUTE_S)


def test_a_calm_run_with_a_job_limit_saves_once_a_job():
    model = StopModel(failures_per_chip_day=0, job_limit_s=DAY_S, stall_s=4.0)
    seen = forecast(StoppedRun(model, find_chip("v5p"), 300, 19.2e12, WORK_S))
    assert seen.cuts == 13
    assert seen.wall_s == pytest.approx(WORK_S + 40 * MINUTE_S + 13 * 55 * MINUTE_S, rel=1e-4)


def test_synchronous_saves_stall_longer_and_lag_nowhere():
    model = StopModel(preemption_s=6 * HOUR_S, bucket_bytes_per_s=80e9)
    background = forecast(StoppedRun(model, find_chip("v5p"), 300, 19.2e12, WORK_S))
    waiting = forecast(
        StoppedRun(replace(model, synchronous=True), find_chip("v5p"), 300, 19.2e12, WORK_S)
    )
    assert waiting.offload_s == pytest.approx(background.offload_s + background.upload_s)
    assert (waiting.upload_s, waiting.host_copies) == (0.0, 1)
    assert waiting.interval_s > background.interval_s
    assert waiting.wall_s > background.wall_s


def test_more_copies_in_host_memory_allow_shorter_intervals():
    one, two = v5p(preemption_s=6 * HOUR_S), v5p(preemption_s=6 * HOUR_S, copies=2)
    assert (one.host_copies, two.host_copies) == (1, 2)
    assert two.interval_s == pytest.approx(one.interval_s / 2)
    assert two.host_bytes_per_chip == pytest.approx(2 * 19.2e12 / 300)
    assert two.wall_s < one.wall_s


def test_waits_beyond_all_sense_are_infeasible():
    with pytest.raises(Infeasible, match="waits for machines"):
        v5p(preemption_s=6 * HOUR_S, capacity_wait_s=1000 * HOUR_S)


def test_the_simulation_of_a_forecast_agrees_with_it():
    model = StopModel(preemption_s=6 * HOUR_S, capacity_wait_s=HOUR_S, repair_s=4 * HOUR_S)
    run = StoppedRun(model, find_chip("v5p"), 300, 19.2e12, WORK_S)
    seen = forecast(run)
    drawn = simulate(failures.process_of(run, failures.saving(run)), 2000, 3)
    assert drawn.wall_s.mean == pytest.approx(seen.wall_s, rel=0.01)
    assert drawn.billed_s.mean == pytest.approx(seen.billed_s, rel=0.01)
    assert drawn.wall_s.p50 < drawn.wall_s.mean < drawn.wall_s.p95
