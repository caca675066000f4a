"""What a money limit buys, and that the change it asks for is enough."""

import re

import pytest

from sabia.core import units
from sabia.core.errors import Infeasible, UsageError
from sabia.core.plan.money.prices import Price, within_limit

WORK_S = 45_370.37 * 3600  # the article's run: $199,630 at $4.40
PRICES = (Price(12.0, "big cloud"), Price(4.4, "neocloud"))


def cost_of(*run):
    return within_limit(*run)[1]["cost_usd"]


def test_a_run_within_the_limit():
    price, figures = within_limit(250e3, WORK_S, 500e9, PRICES)
    assert price == PRICES[1]
    assert figures["cost_usd"] == pytest.approx(199_630, rel=1e-5)
    assert figures["tokens_for_all"] == pytest.approx(626.2e9, rel=1e-3)


def test_a_lower_price_is_in_the_terms_of_the_option():
    """Preemptible chips at half the price: half of the named --price meets the limit."""
    half = tuple(price.preemptible(0.5) for price in PRICES)
    with pytest.raises(Infeasible) as error:
        within_limit(50e3, WORK_S, 500e9, half)
    rate = float(re.search(r"--price ([\d.]+)", str(error.value))[1])
    assert cost_of(50e3, WORK_S, 500e9, (Price(rate).preemptible(0.5),)) <= 50e3


def test_changes_beyond_all_reach_are_not_proposed():
    with pytest.raises(Infeasible, match=r"use --tokens 25M$"):
        within_limit(10.0, WORK_S, 500e9, PRICES)
    with pytest.raises(Infeasible, match=r"or --price 1\.10$"):
        within_limit(50e3, WORK_S, 500e9, PRICES)


@pytest.mark.parametrize("limit_usd", [12e3, 50e3, 199e3])
def test_the_smallest_change_is_enough_and_little_more(limit_usd):
    with pytest.raises(Infeasible, match=r"costs \$0\.20M at neocloud \$4\.40") as refused:
        within_limit(limit_usd, WORK_S, 500e9, PRICES)
    words = str(refused.value)
    tokens = units.parse_count(re.search(r"--tokens (\S+) ", words)[1])
    assert 0.98 * limit_usd < cost_of(limit_usd, WORK_S * tokens / 500e9, tokens, PRICES)
    price = Price(float(re.search(r"--price (\d+\.\d\d)", words)[1]))
    assert cost_of(limit_usd, WORK_S, 500e9, (price,)) <= limit_usd
    assert refused.value.exit_code == 3


def test_limits_and_prices_of_nothing_are_refused():
    with pytest.raises(UsageError, match="more than 0"):
        within_limit(0, WORK_S, 500e9, PRICES)
    with pytest.raises(UsageError, match="no price"):
        within_limit(1e6, WORK_S, 500e9, ())
