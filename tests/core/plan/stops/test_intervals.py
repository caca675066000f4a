"""Intervals between saves against the optimum found by trying, and each other's limits."""

import math

import pytest
from plain_models import expected_wall

from sabia.core.plan.stops import failures


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
    assert failures.young(50, 10_000) == pytest.approx(1000)
    assert failures.young(60, 12 * 3600) / 60 == pytest.approx(38, abs=0.1)


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
    daly, young = (abs(f(offload_s, mean_s) / optimum - 1)
                   for f in (failures.daly, failures.young))  # fmt: skip
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
    interval_found_s = failures.asynchronous(50, upload_s, 10_000, copies)
    assert interval_found_s == pytest.approx(interval_s)
    assert failures.copies_held(upload_s, interval_found_s) == held


def test_the_planning_and_the_running_side_agree():
    from sabia.core.train.checkpoint.interval import UPLOAD_SLACK, best_interval_s

    for upload_s in (10, 5000):
        planned = failures.asynchronous(50, upload_s, 10_000)
        assert planned <= best_interval_s(50, upload_s, 10_000) <= planned * UPLOAD_SLACK
    assert math.isfinite(planned)
