"""Prices on file and their age: dated and sane, chosen by what was asked, never used when old."""

import datetime
import statistics

import pytest

from sabia.core.errors import UsageError
from sabia.core.plan.chips import load_chips
from sabia.core.plan.money import prices
from sabia.core.plan.money.prices import Price

DAY_ONE, DAY = datetime.date(2025, 1, 1), datetime.date(2026, 8, 1)


def row(usd_per_chip_hour=4.4, region=None, spot=False, commitment=None, **changed):
    """An offer of one price, as the file writes it."""
    offer = {"chip": "b200", "tier": "neocloud", "provider": "A", "source": "a page", "date": DAY}
    if commitment:
        return offer | {"committed": {commitment: usd_per_chip_hour}} | changed
    price = {region: usd_per_chip_hour} if region else usd_per_chip_hour
    return offer | {"spot" if spot else "by_hour": price} | changed


def test_every_price_is_dated_and_of_a_known_chip_and_tier():
    chips = load_chips()
    for chip, offers in prices.load_prices().items():
        assert chip in chips
        for offer in offers:
            assert offer.source and DAY_ONE <= offer.date <= datetime.date.today()
            assert 0.1 < offer.usd_per_chip_hour < 20
            assert offer.tier in prices.TIERS


def test_no_price_on_file_is_a_placeholder():
    """Catalogues mark a missing price by a large number, such as 700.0 in some rows of TPUs."""
    every = [p.usd_per_chip_hour for offers in prices.load_prices().values() for p in offers]
    assert min(every) > 0 and max(every) <= 10 * statistics.median(every)


def test_one_offer_may_have_many_prices():
    offer = row() | {"by_hour": {"us": 2.7, "eu": 3.0}, "spot": 0.5, "committed": {"1 year": 2.0}}
    offers = prices.load_prices({"offer": [offer]})["b200"]
    labels = [(p.usd_per_chip_hour, p.offer) for p in offers]
    assert labels == [(2.7, "A us"), (3.0, "A eu"), (0.5, "A, spot"), (2.0, "A, 1 year")]


@pytest.mark.parametrize(("days", "old"), [(0, False), (90, False), (91, True)])
def test_prices_are_stale_after_ninety_days(days, old):
    offers = prices.load_prices({"offer": [row()]})["b200"]
    assert bool(prices.stale(offers, DAY + datetime.timedelta(days))) == old


def test_own_prices_never_go_stale():
    assert prices.stale((prices.Price(3.0),), DAY) == ()


def test_the_table_takes_the_first_on_demand_price_of_each_tier():
    assert [(p.tier, p.usd_per_chip_hour) for p in prices.default_prices("b200")] == [
        ("neocloud", 4.4),
        ("big cloud", 12.0),
    ]
    assert not any(price.spot for price in prices.default_prices("tpu-v5p"))


def test_a_chip_without_a_price_asks_for_one():
    with pytest.raises(UsageError, match="--price"):
        prices.default_prices("trn2")


def days_later(days):
    return DAY + datetime.timedelta(days)


@pytest.mark.parametrize(("days", "too_old"), [(90, False), (365, False), (366, True)])
def test_prices_of_more_than_a_year_are_refused(days, too_old):
    offers = prices.load_prices({"offer": [row(), row(provider="B")]})["b200"]
    today = days_later(days)
    assert bool(prices.stale(offers, today, prices.REFUSED_DAYS)) == too_old
    assert (prices.current(offers, today) == ()) == too_old
    assert bool(prices.refused_words(offers, today)) == too_old


def test_a_refused_price_is_named_with_its_age_and_the_mend():
    words = prices.refused_words((Price(4.4, "neocloud", "A", source="a page", date=DAY),),
                                 days_later(400))  # fmt: skip
    assert "neocloud (a page, 2026-08-01)" in words
    assert "more than 365 days old and not used" in words and "--price 4.40" in words
    assert "4.4 " not in words


def test_old_and_new_prices_are_told_apart():
    offers = (Price(4.4, date=DAY), Price(5.0, date=days_later(300)), Price(6.0))
    assert prices.current(offers, days_later(400)) == offers[1:]
    with pytest.raises(UsageError, match=r"--max-cost: needs a price .*more than 365 days old"):
        prices.usable(offers[:1], days_later(400), "--max-cost")
    assert prices.usable(offers, days_later(400), "--max-cost") == offers[1:]


def test_what_may_be_used_today_is_on_file():
    """Fails when all prices on file are too old to be used: time to look at the sources again."""
    today = datetime.date(2026, 11, 21)
    for chip, offers in prices.load_prices().items():
        assert prices.current(offers, today), chip


def test_offers_are_found_by_provider_region_and_terms():
    offers = prices.prices_for("tpu-v6e", provider="google", region="us-", spot=True)
    assert [p.usd_per_chip_hour for p in offers] == sorted(p.usd_per_chip_hour for p in offers)
    assert all(p.spot and p.provider == "Google Cloud" and p.chosen for p in offers)
    assert all(p.label == p.offer for p in offers)


def test_a_row_for_a_region_goes_before_the_row_for_all():
    rows = {"offer": [
        row(provider="A"), row(provider="A", region="eu", usd_per_chip_hour=6.0),
        row(provider="B", usd_per_chip_hour=5.0),
    ]}  # fmt: skip
    table = prices.load_prices(rows)
    offers = prices.prices_for("b200", rows=table["b200"], region="EU")
    assert [(p.provider, p.usd_per_chip_hour) for p in offers] == [("B", 5.0), ("A", 6.0)]
    offers = prices.prices_for("b200", rows=table["b200"], region="us")
    assert [(p.provider, p.usd_per_chip_hour) for p in offers] == [("A", 4.4), ("B", 5.0)]


@pytest.mark.parametrize(
    ("region", "rates"),
    [("us", [4.4, 5.0]), ("us-east-1", [4.4]), ("us-west-1", [5.0]), ("us-west", [5.0]),
     (None, [4.4, 5.0, 6.0]), ("eu-north-1", [6.0]), ("asia", [])],
)  # fmt: skip
def test_regions_by_their_beginnings(region, rates):
    rows = [row(region=r, usd_per_chip_hour=u)
            for r, u in [("us", 4.4), ("us-west-1", 5.0), ("eu-north-1", 6.0)]]  # fmt: skip
    offers = prices.load_prices({"offer": rows})["b200"]
    if rates:
        matches = prices.prices_for("b200", rows=offers, region=region)
        assert [p.usd_per_chip_hour for p in matches] == rates
    else:
        with pytest.raises(UsageError, match="on file for asia, by the hour"):
            prices.prices_for("b200", rows=offers, region=region)


def test_a_commitment_is_only_sold_where_it_is_asked_for():
    rows = [row(), row(usd_per_chip_hour=3.0, commitment="1 year")]
    offers = prices.load_prices({"offer": rows})["b200"]
    assert [p.usd_per_chip_hour for p in prices.prices_for("b200", rows=offers)] == [4.4]
    matches = prices.prices_for("b200", rows=offers, commitment="1 year")
    assert [(p.usd_per_chip_hour, p.label) for p in matches] == [(3.0, "A, 1 year")]


def test_an_offer_that_nobody_makes_names_those_on_file():
    with pytest.raises(UsageError, match=r"b200 is on file for nobody, spot \(on file: .*Verda"):
        prices.prices_for("b200", provider="nobody", spot=True)


def test_the_cheapest_spot_offer():
    rows = [p for p in prices.load_prices()["h100"] if p.spot]
    lowest = prices.cheapest("h100", datetime.date(2026, 11, 21), spot=True)
    assert lowest.usd_per_chip_hour == min(p.usd_per_chip_hour for p in rows)
    assert prices.cheapest("h100", datetime.date(2036, 1, 1), spot=True) is None
