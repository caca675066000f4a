"""Intervals between saves against the optimum found by trying, and each other's limits."""

import math
import shlex

import pytest
from plain_models import expected_wall

from sabia.core.plan.chips import find_chip
from sabia.core.plan.stops import failures
from sabia.core.plan.stops.failures import StopModel, StoppedRun
from sabia.core.save_interval import best_interval_s
from sabia.core.train.checkpoint.saver import parse_interval
from sabia.core.units import parse_duration


def best(offload_s: float, mean_s: float) -> float:
    """The optimum of Daly's complete model, τ/M·e^((τ+D)/M) = e^((τ+D)/M) − 1, by bisection."""

    def past(interval_s: float) -> bool:
        x = interval_s / mean_s
        return x - 1 + math.exp(-x - offload_s / mean_s) > 0

    low, high = 0.0, mean_s
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if past(middle) else (middle, high)
    return (low + high) / 2


def test_young():
    assert best_interval_s(50, 0, 10_000) == pytest.approx(1000)
    assert best_interval_s(60, 0, 12 * 3600) / 60 == pytest.approx(38, abs=0.1)


@pytest.mark.parametrize(("offload_s", "mean_s"), [(1, 3600), (60, 10_000), (600, 7200)])
def test_best_is_the_best_of_all_tried(offload_s, mean_s):
    def wall(interval_s):
        return expected_wall(1e6, interval_s, offload_s, mean_s, 300)

    best_s = best(offload_s, mean_s)
    assert wall(best_s) <= min(wall(best_s * factor) for factor in (0.9, 0.99, 1.01, 1.1))
    tried = min((mean_s * 1.01**-n for n in range(600)), key=wall)
    assert best_s == pytest.approx(tried, rel=0.01)


@pytest.mark.parametrize("part", [1e-4, 1e-2, 0.1, 0.5])
def test_dalys_higher_order_is_nearer_to_the_best_than_youngs(part):
    offload_s, mean_s = part * 1e4, 1e4
    optimum = best(offload_s, mean_s)
    daly = abs(failures.daly(offload_s, mean_s) / optimum - 1)
    young = abs(best_interval_s(offload_s, 0, mean_s) / optimum - 1)
    assert daly < 0.02
    assert daly < young


def test_daly_of_saves_longer_than_stops_are_apart():
    assert failures.daly(100, 40) == 40
    assert failures.daly(79.999, 40) == pytest.approx(40, rel=0.12)


@pytest.mark.parametrize(
    ("upload_s", "copies", "interval_s", "held"),
    [(10, 1, 1000, 1), (2000, 1, 2000, 1), (2000, 2, 1000, 2), (2000, 3, 1000, 2),
     (9000, 4, 2250, 4)],
)  # fmt: skip
def test_uploads_bound_the_interval_and_need_memory(upload_s, copies, interval_s, held):
    interval_found_s = best_interval_s(50, upload_s, 10_000, copies)
    assert interval_found_s == pytest.approx(interval_s)
    assert failures.copies_held(upload_s, interval_found_s) == held


@pytest.mark.parametrize(("stall_s", "upload_gbps"), [(7.0, 80.0), (40.0, 80.0), (7.0, 0.5)])
def test_the_trainer_saves_as_planned(stall_s, upload_gbps):
    """`--save-every auto` at the planned stall and upload time: the same interval, or 10 % more."""
    model = StopModel(preemption_s=6 * 3600, stall_s=stall_s, bucket_bytes_per_s=upload_gbps * 1e9)
    run = StoppedRun(model, find_chip("h100"), 64, 96e9, 1e6)
    planned = failures.saving(run)
    options = shlex.split(f"--save-every auto --mtbf {run.mean_time_between_stops_s:.0f}s")
    interval = parse_interval(options[1], parse_duration(options[3]), 64)
    trained_s = interval.wanted_s(planned.offload_s, planned.upload_s)
    assert planned.offload_s == stall_s
    assert planned.interval_s * (1 - 1e-4) <= trained_s <= planned.interval_s * (1.1 + 1e-4)


def test_a_save_blocks_for_the_copy_and_the_files():
    """96 GB from 8 H100: 12 GB each over PCIe and into files at 1 GB/s, and not 0.2 s."""
    saved = failures.saving(StoppedRun(StopModel(), find_chip("h100"), 8, 96e9, 1e6))
    assert saved.offload_s == pytest.approx(12 / 63 + 12)
