"""Preemptible against on-demand chips: both bills, and where they meet."""

from dataclasses import replace

import pytest
from plain_models import expected_wall

from sabia.core.plan.chips import find_chip
from sabia.core.plan.money.prices import cost_usd
from sabia.core.plan.stops.failures import StopModel, StoppedRun, compare, forecast

DAY_S, HOUR_S = 86400.0, 3600.0
WORK_S = 45_370.4 / 300 * HOUR_S
MODEL = StopModel(failures_per_chip_day=0.001, preemption_s=6 * HOUR_S)


def run(model):
    return StoppedRun(model, find_chip("v5p"), 300, 19.2e12, WORK_S)


def bills(model=MODEL, spot=2.1, on_demand=4.2):
    return compare(run(model), spot, on_demand)


def test_the_articles_run_at_half_price():
    """45,370 hours at $4.40, or at half of it with a preemption every six hours."""
    longer = expected_wall(12.6 * DAY_S, 2400, 10, 6 * HOUR_S, 900) / (12.6 * DAY_S)
    assert cost_usd(45_370.4 * HOUR_S, 4.4) == pytest.approx(199.6e3, rel=1e-3)
    assert cost_usd(45_370.4 * HOUR_S * longer, 2.2) == pytest.approx(110.5e3, rel=1e-3)


def test_half_price_pays_and_full_price_does_not():
    half = bills()
    assert 0.3 < half.saving < 0.5
    assert half.spot_usd == pytest.approx(cost_usd(forecast(run(MODEL)).billed_chip_s, 2.1))
    full = bills(spot=4.2)
    assert full.saving < 0
    assert full.break_even_preemption_s is None


def test_bills_meet_at_the_break_even():
    comparison = bills()
    assert comparison.break_even_preemption_s < 6 * HOUR_S
    often = replace(MODEL, preemption_s=comparison.break_even_preemption_s)
    assert bills(often).saving == pytest.approx(0, abs=1e-6)
    assert bills(replace(often, preemption_s=0.9 * often.preemption_s)).saving < 0


def test_capacity_waits_are_not_paid_for():
    away = replace(MODEL, capacity_wait_s=4 * HOUR_S)
    assert bills(away).spot_usd == pytest.approx(bills().spot_usd)
    assert forecast(run(away)).wall_s > forecast(run(MODEL)).wall_s
