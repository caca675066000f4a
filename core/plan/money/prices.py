"""Price of a chip-hour: dated prices as data (prices.toml), or the user's own.

An offer has provider, source and date, and prices by region: on demand, spot, and with commitment.
A price older than STALE_DAYS is used with a warning; a price older than REFUSED_DAYS is not used,
and what needs it is omitted or an error.

Cost of chip-hours, and the format of amounts in tables.

Cost depends only on chip-hours: twice the chips for half the time cost the same. It is for the run
itself, without failures, idle time or storage.

Check a run against a cost limit (`--max-cost`), and find the smallest change that meets it.

Cost is proportional to tokens, so a run above the limit fits with fewer tokens, a lower price, or a
higher MFU, each by the same factor. Only prices that may be used are compared (prices.py).
"""

import datetime
import math
from dataclasses import dataclass, replace
from typing import Any

from sabia.core.errors import Infeasible, UsageError
from sabia.core.plan.catalogue import read_data
from sabia.core.units import DURATION_S, format_count

HOUR_S = DURATION_S["h"]
DAY_S = DURATION_S["d"]


def cost_usd(chip_s: float, usd_per_chip_hour: float) -> float:
    """The cost of `chip_s` chip-seconds."""
    return chip_s / HOUR_S * usd_per_chip_hour


def cost_usd_per_day(chips: float, usd_per_chip_hour: float) -> float:
    """The cost of `chips` chips per day."""
    return chips * 24 * usd_per_chip_hour


def short_money(usd: float) -> str:
    """For tables: $0.20M, $15.8K, $25.30."""
    if usd >= 1e9:
        return f"${usd / 1e9:,.2f}B"
    if usd >= 1e5:
        return f"${usd / 1e6:,.2f}M"
    return f"${usd / 1e3:,.1f}K" if usd >= 1e3 else f"${usd:,.2f}"


STALE_DAYS = 90
REFUSED_DAYS = 365
TIERS = ("neocloud", "big cloud")
MOST_NAMED = 6  # offers in an error message


@dataclass(frozen=True)
class Price:
    """US dollars for one chip-hour. A price of the command line has no source or date.

    region: name or prefix of the regions with this price; None: all regions of the provider.
    commitment: term of the contract ("1 year"); None: on demand. chosen: selected by provider,
    region or terms, so that its label shows them. share: of the price as given or on file.
    """

    usd_per_chip_hour: float
    tier: str | None = None
    provider: str | None = None
    spot: bool = False
    source: str | None = None
    date: datetime.date | None = None
    region: str | None = None
    commitment: str | None = None
    chosen: bool = False
    share: float = 1.0

    @property
    def label(self) -> str:
        """'neocloud', the offer if `chosen`, or the price itself if it is the user's own."""
        if self.chosen:
            return self.offer
        return self.tier or f"at {format_rate(self.usd_per_chip_hour)}/h"

    @property
    def named_rate(self) -> str:
        """'neocloud $4.40' or, for the user's own price, '$4.40/h'."""
        rate = format_rate(self.usd_per_chip_hour)
        return f"{self.label} {rate}" if self.tier else f"{rate}/h"

    @property
    def offer(self) -> str:
        """Provider, region and terms, such as 'Google Cloud us-central1, spot'."""
        seller = " ".join(word for word in (self.provider, self.region) if word)
        terms = (seller, "spot" if self.spot else "", self.commitment)
        return ", ".join(filter(None, terms))

    def preemptible(self, share: float) -> "Price":
        """`share` of this price, for chips that may be preempted; itself for all of it."""
        if share == 1:
            return self
        tier, usd = self.tier, self.usd_per_chip_hour * share
        words = f"{tier} at {share * 100:g}%" if tier else None
        return replace(self, usd_per_chip_hour=usd, tier=words, spot=True, share=share)

    @property
    def seen(self) -> str | None:
        """The day on which the price was last seen; None for the user's own price."""
        return self.date.isoformat() if self.date else None

    def age_days(self, today: datetime.date) -> int | None:
        """Days since the price was last seen at its source; None for the user's own price."""
        return (today - self.date).days if self.date else None


def format_rate(usd: float) -> str:
    """$12, $4.40: cents only where there are any."""
    return f"${usd:.0f}" if usd == int(usd) else f"${usd:.2f}"


def load_prices(data: dict[str, Any] | None = None) -> dict[str, tuple[Price, ...]]:
    """All prices by chip, in file order; `data` replaces prices.toml."""
    table: dict[str, tuple[Price, ...]] = {}
    for offer in (read_data("prices.toml") if data is None else data).get("offer", []):
        common = {key: offer[key] for key in ("tier", "provider", "source", "date")}
        rows = [
            Price(usd, spot=key == "spot", region=region, **common)
            for key in ("by_hour", "spot")
            for region, usd in _by_name(offer, key)
        ]
        rows += [Price(usd, commitment=t, **common) for t, usd in _by_name(offer, "committed")]
        table[offer["chip"]] = (*table.get(offer["chip"], ()), *rows)
    return table


def _by_name(offer: dict[str, Any], key: str) -> list[tuple[str | None, float]]:
    """(name, price) of one price or of a table of prices."""
    value = offer.get(key, {})
    return list(value.items()) if isinstance(value, dict) else [(None, value)]


def default_prices(chip: str, today: datetime.date | None = None) -> tuple[Price, ...]:
    """The first on-demand price of each tier for `chip` that may be used `today` (None: any age).

    Empty where all are too old; UsageError where none is on file.
    """
    rows = tuple(p for p in load_prices().get(chip, ()) if not p.spot and not p.commitment)
    if not rows:
        raise UsageError(f"--price: no price of {chip} is on file; give one, as --price 4.40")
    usable_rows = current(rows, today) if today else rows
    first = [next((p for p in usable_rows if p.tier == tier), None) for tier in TIERS]
    return tuple(price for price in first if price)


def prices_for(
    chip: str, provider: str | None = None, region: str | None = None, spot: bool = False,
    commitment: str | None = None, rows: tuple[Price, ...] | None = None,
) -> tuple[Price, ...]:  # fmt: skip
    """Prices of `chip` from `provider` in `region`, the lowest first. rows: default all on file.

    Providers and regions match by prefix, in any case ("google", "us-"). Of a provider's prices for
    a region, those with the longest matching name count. Raises UsageError naming the offers on
    file if none matches.
    """
    rows = load_prices().get(chip, ()) if rows is None else rows
    if region is not None:
        regions = {p.region for some in load_prices().values() for p in some if p.region}
        if not any(_begins(name, region) or _begins(region, name) for name in regions):
            known = ", ".join(sorted(regions)[:MOST_NAMED])
            raise UsageError(f"--region: no region {region!r} is on file (on file: {known}, …)")
    sold = [
        p for p in rows
        if p.spot == spot and p.commitment == commitment and _begins(p.provider, provider)
    ]  # fmt: skip
    nearest: dict[str | None, float] = {}
    for price in sold:
        nearest[price.provider] = max(nearest.get(price.provider, 0), _nearness(price, region))
    matches = [p for p in sold if 0 < nearest[p.provider] == _nearness(p, region)]
    if not matches:
        terms = "spot" if spot else commitment or "by the hour"
        wanted = ", ".join(filter(None, (provider, region, terms)))
        offers = list(dict.fromkeys(p.offer for p in rows)) or ["none"]
        known = "; ".join(offers[:MOST_NAMED]) + "; and more" * (len(offers) > MOST_NAMED)
        of_provider = [p for p in rows if _begins(p.provider, provider)]
        fits = {
            "--provider": not provider or of_provider,
            "--commitment": not commitment or any(p.commitment == commitment for p in of_provider),
            "--spot": not spot or any(p.spot for p in of_provider),
            "--region": not region,
        }
        unmet = next((flag for flag, met in fits.items() if not met), "--price")
        raise UsageError(
            f"{unmet}: no price of {chip} is on file for {wanted} (on file: {known}); give one, as "
            "--price 4.40"
        )
    by_price = sorted(matches, key=lambda p: p.usd_per_chip_hour)
    return tuple(replace(p, chosen=True) for p in by_price)


def _begins(value: str | None, wanted: str | None) -> bool:
    return wanted is None or (value or "").lower().startswith(wanted.strip().lower())


def _nearness(price: Price, region: str | None) -> float:
    """How well a price's region matches: 0 not, inf: it is within `region`."""
    if region is None or _begins(price.region, region):
        return math.inf
    if price.region is None:
        return 0.5
    return len(price.region) if _begins(region, price.region) else 0


def cheapest(chip: str, today: datetime.date, spot: bool = False) -> Price | None:
    """The lowest price of `chip` that may still be used; None if none is on file."""
    rows = (p for p in load_prices().get(chip, ()) if p.spot == spot and not p.commitment)
    return min(current(tuple(rows), today), key=lambda p: p.usd_per_chip_hour, default=None)


def stale(
    prices: tuple[Price, ...], today: datetime.date, days: int = STALE_DAYS
) -> tuple[Price, ...]:
    """Those last seen more than `days` before `today`, which need a warning."""
    return tuple(p for p in prices if (p.age_days(today) or 0) > days)


def current(prices: tuple[Price, ...], today: datetime.date) -> tuple[Price, ...]:
    """Those that may be used `today`."""
    return tuple(p for p in prices if p not in stale(prices, today, REFUSED_DAYS))


def refused_words(prices: tuple[Price, ...], today: datetime.date) -> str:
    """Why too old prices are not used, in one line; empty if there are none."""
    old = stale(prices, today, REFUSED_DAYS)
    if not old:
        return ""
    offers = ", ".join(f"{p.label} ({p.source}, {p.date})" for p in old)
    return (
        f"the price on file of {offers} is more than {REFUSED_DAYS} days old and not used; give "
        "today's with --price, as --price 4.40"
    )


def usable(prices: tuple[Price, ...], today: datetime.date, what: str) -> tuple[Price, ...]:
    """`prices` that may be used for `what` (an option); UsageError if there are none."""
    usable_prices = current(prices, today)
    if not usable_prices:
        why = refused_words(prices, today) or "no price is on file; give one, as --price 4.40"
        raise UsageError(f"{what}: needs a price ({why})")
    return usable_prices


LEAST_RATE = 0.10
MOST_FASTER = 2


def within_limit(
    limit_usd: float, work_chip_s: float, tokens: float, prices: tuple[Price, ...]
) -> tuple[Price, dict[str, float]]:
    """The run of `tokens` tokens and `work_chip_s` chip-seconds at the lowest price, which it is.

    Raises UsageError on a limit of 0 or no price; Infeasible, with the smallest changes, if the run
    costs more than the limit.
    """
    if not limit_usd > 0:
        raise UsageError(f"--max-cost: {limit_usd:g} (expected more than 0)")
    if not prices:
        raise UsageError("--max-cost: no price to compare with; give one, as --price 4.40")
    price = min(prices, key=lambda price: price.usd_per_chip_hour)
    run_usd = cost_usd(work_chip_s, price.usd_per_chip_hour)
    fitting = tokens * limit_usd / run_usd
    if run_usd > limit_usd * (1 + 1e-9):
        factor = run_usd / limit_usd
        digit = 10 ** (len(f"{fitting:.0f}") - 3)  # of the third digit, to round down
        rate = int(price.usd_per_chip_hour / price.share / factor * 100) / 100
        changes = [f"--tokens {format_count(fitting // digit * digit, 2)}"]
        changes += [f"--price {rate:.2f}"] if rate >= LEAST_RATE else []
        changes += [f"a {factor:.2f} times higher --mfu"] if factor <= MOST_FASTER else []
        raise Infeasible(
            f"--max-cost: the run costs {short_money(run_usd)} at {price.named_rate} (expected at "
            f"most {short_money(limit_usd)}); use {' or '.join(changes)}"
        )
    return price, {
        "limit_usd": limit_usd,
        "cost_usd": run_usd,
        "left_usd": limit_usd - run_usd,
        "tokens_for_all": fitting,
        "price_usd_per_chip_hour": price.usd_per_chip_hour,
    }
