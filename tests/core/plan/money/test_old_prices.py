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
    found = plan(**more)
    assert "$" not in found.text.replace("--price", "")
    assert "price     none: the price on file of" in found.text
    assert "more than 365 days old and not used; give today's with --price" in found.text
    assert found.report["prices"] == [] and "365 days" in found.report["no_money"]
    assert all(row["costs"] == [] for row in found.report["rows"])
    assert "finishes in" in found.text and "prices seen" not in found.text


def test_the_users_own_price_has_no_age():
    found = plan(price="4.40")
    assert found.report["no_money"] is None
    assert "$0.20M" in found.text and "price     none" not in found.text


def test_prices_of_this_year_are_used():
    found = plan(today=SEEN)
    assert found.report["no_money"] is None
    assert "NEOCLOUD $4.40" in found.text


def test_a_chosen_offer_heads_its_column():
    found = plan(today=SEEN, chip="h100", provider="verda", spot=True)
    assert "VERDA" in found.text and "SPOT $0.80" in found.text
    assert found.report["prices"][0]["spot"] is True


def test_comparisons_use_no_old_price():
    run = PlanOptions(params=8e9, tokens=1e12, compare="b200,h100,v6e")
    found = answer(run, YEARS_ON)
    assert "$" not in found.text and "cheapest" not in found.text and "fastest" in found.text
    assert found.warnings == []
    now = answer(run, SEEN)
    assert "cheapest on" in now.text
    assert any("last seen 112 days ago" in line for line in now.warnings)
