"""Views of money limits, emissions and size: the same figures as the functions behind them."""

import datetime

import pytest

from sabia.core.errors import Infeasible
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.answer import answer

TODAY = datetime.date(2026, 11, 21)


def plan(**settings):
    return answer(PlanOptions(params=1.6e12, active=49e9, chips=150, **settings), TODAY)


def test_a_limit_says_what_is_left():
    output = plan(max_cost=250e3)
    assert output.report["limit"]["cost_usd"] == pytest.approx(199_630, rel=1e-5)
    assert output.report["limit"]["tokens_for_all"] == pytest.approx(626.2e9, rel=1e-3)
    with pytest.raises(Infeasible, match="use --tokens 250B"):
        plan(max_cost=100e3)


def test_a_limit_counts_the_bill_with_stops():
    calm = plan(max_cost=250e3).report["limit"]["cost_usd"]
    stopped = plan(max_cost=250e3, failure_rate=0.001).report
    assert stopped["limit"]["cost_usd"] > calm
    paid = stopped["stops"]["billed_s"] * stopped["stops"]["billed_chips"] / 3600 * 4.4
    assert stopped["limit"]["cost_usd"] == pytest.approx(paid)
    half = plan(max_cost=250e3, preempt=6 * 3600.0)
    assert half.report["limit"]["price_usd_per_chip_hour"] == pytest.approx(2.2)
    assert half.report["limit"]["cost_usd"] < calm
    assert "at neocloud at 50% $2.20" in half.text


def test_offers_are_billed_one_by_one():
    output = plan(offers=True).report["offers"]["rows"]
    bills = [row["cost_usd"] for row in output]
    assert bills == sorted(bills) and len(output) >= 10
    for row in output:
        assert row["cost_usd"] == pytest.approx(45_370.37 * row["price_usd_per_chip_hour"])
    here = plan(offers=True, provider="aws", region="us-east-1").report["offers"]["rows"]
    labels = [(row["provider"], row["region"], row["spot"]) for row in here]
    assert labels == [("AWS", "us-east-1", True), ("AWS", "us", False)]


def test_only_preemptible_offers_are_billed_with_preemptions():
    calm = plan(offers=True, failure_rate=0.001).report["offers"]["rows"]
    often = plan(offers=True, failure_rate=0.001, preempt=6 * 3600.0).report["offers"]["rows"]
    names = ("provider", "tier", "region", "spot")
    before = {tuple(row[name] for name in names): row["cost_usd"] for row in calm}
    for row in often:
        ratio = row["cost_usd"] / before[tuple(row[name] for name in names)]
        assert (ratio > 1.1) if row["spot"] else ratio == pytest.approx(1)


def test_old_offers_are_not_billed():
    run = PlanOptions(params=8e9, chip="h100", tokens=1e11, offers=True)
    output = answer(run, datetime.date(2030, 1, 1))
    assert "none of h100 on file may be used" in output.text


def test_emissions_count_stops_too():
    calm, stopped = plan(carbon=True), plan(carbon=True, preempt=6 * 3600.0)
    assert calm.report["carbon"]["energy_kwh"] == pytest.approx(45_370.4 * 1.1, rel=1e-5)
    longer = stopped.report["stops"]["billed_s"] / stopped.report["stops"]["work_s"]
    ratio = stopped.report["carbon"]["tons_co2e"] / calm.report["carbon"]["tons_co2e"]
    assert ratio == pytest.approx(longer)
    assert "on the grid of Norway" in calm.text


def test_size_for_what_is_served_and_for_a_limit():
    output = plan(serve_tokens=2e12)
    assert output.report["scaling"]["same_loss"]["params"] < 49e9
    assert "would save" in output.text
    assert (
        "the size is right"
        in answer(
            PlanOptions(params=70e9, tokens=1.4e12, chip="h100", serve_tokens=0.0), TODAY
        ).text
    )
    assert "least loss for $0.25M" in plan(serve_tokens=2e12, max_cost=250e3).text
