"""A plan whose prices on file are too old has no money in it, says why, and how to mend it."""

import datetime

import pytest

from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.answer import answer

SEEN = datetime.date(2026, 11, 21)
YEARS_ON = datetime.date(2030, 1, 1)


def plan(today=YEARS_ON, **settings):
    return answer(PlanOptions(params=1.6e12, active=49e9, **settings), today)


@pytest.mark.parametrize("more", [{}, {"chips": 150}, {"chip": "h100"}, {"preempt": 21600.0}])
def test_no_number_is_made_of_an_old_price(more):
    output = plan(**more)
    assert "$" not in output.text.replace("--price", "")
    assert "price     none: the price on file of" in output.text
    assert "more than 365 days old and not used; give today's with --price" in output.text
    assert output.report["prices"] == [] and "365 days" in output.report["no_money"]
    assert all(row["costs"] == [] for row in output.report["rows"])
    assert "finishes in" in output.text and "prices seen" not in output.text


def test_the_users_own_price_has_no_age():
    output = plan(price="4.40")
    assert output.report["no_money"] is None
    assert "$0.20M" in output.text and "price     none" not in output.text


def test_prices_of_this_year_are_used():
    output = plan(today=SEEN)
    assert output.report["no_money"] is None
    assert "NEOCLOUD $4.40" in output.text


def test_a_chosen_offer_heads_its_column():
    output = plan(today=SEEN, chip="h100", provider="verda", spot=True)
    assert "VERDA" in output.text and "SPOT $0.80" in output.text
    assert output.report["prices"][0]["spot"] is True


def test_comparisons_use_no_old_price():
    run = PlanOptions(params=8e9, tokens=1e12, compare="b200,h100,v6e")
    output = answer(run, YEARS_ON)
    assert "$" not in output.text and "cheapest" not in output.text and "fastest" in output.text
    assert output.warnings == []
    now = answer(run, SEEN)
    assert "cheapest on" in now.text
    assert any("last seen 112 days ago" in line for line in now.warnings)
