"""What a chip-hour costs: dated prices as data (prices.toml), or the user's own.

A row carries provider, source and date. Rows older than 90 days are told apart so that the
caller can warn. Catalogues mark "no price" by a large number (700.0 in some TPU rows): a row
above ten times the median of the file is refused, never averaged in.
"""

import datetime
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import BadData, UsageError
from sabia.core.plan.catalogue import check_entry, read_data

STALE_DAYS = 90
PLACEHOLDER_RATIO = 10
REQUIRED = {"chip", "tier", "provider", "usd_per_chip_hour", "source", "date"}
TIERS = ("neocloud", "big cloud")


@dataclass(frozen=True)
class Price:
    """US dollars for one chip-hour. A price given on the command line has no source or date."""

    usd_per_chip_hour: float
    tier: str | None = None
    provider: str | None = None
    spot: bool = False
    source: str | None = None
    date: datetime.date | None = None

    @property
    def label(self) -> str:
        """'neocloud' or, for the user's own price, the price itself."""
        return self.tier or f"at {format_rate(self.usd_per_chip_hour)}/h"

    def age_days(self, today: datetime.date) -> int | None:
        """Days since the source was last seen to say so; None for the user's own price."""
        return (today - self.date).days if self.date else None


def format_rate(usd: float) -> str:
    """$12, $4.40: cents only where there are any."""
    return f"${usd:.0f}" if usd == int(usd) else f"${usd:.2f}"


def load_prices(data: dict[str, Any] | None = None) -> dict[str, tuple[Price, ...]]:
    """All prices by chip, in file order; `data` stands in for prices.toml. Raises BadData."""
    rows = (read_data("prices.toml") if data is None else data).get("price", [])
    for row in rows:
        check_entry("prices.toml", row.get("chip", "a row"), row, REQUIRED, {"spot"})
    refuse_placeholders(rows)
    table: dict[str, tuple[Price, ...]] = {}
    for row in rows:
        fields = {key: value for key, value in row.items() if key != "chip"}
        table[row["chip"]] = (*table.get(row["chip"], ()), Price(**fields))
    return table


def refuse_placeholders(rows: list[dict[str, Any]]) -> None:
    """Raise BadData on a price of 0 or above ten times the median of all rows."""
    middle = _median([row["usd_per_chip_hour"] for row in rows])
    for row in rows:
        usd = row["usd_per_chip_hour"]
        if not 0 < usd <= PLACEHOLDER_RATIO * middle:
            raise BadData(
                f"prices.toml: {row['chip']} at {row['provider']} costs ${usd:g} an hour (expected "
                f"0 to {PLACEHOLDER_RATIO} times the median of ${middle:g}); a placeholder?"
            )


def _median(values: list[float]) -> float:
    """The middle value; 0 of none. (The library's own takes longer to import than a plan.)"""
    ranked, half = sorted(values), len(values) // 2
    if not ranked:
        return 0.0
    return ranked[half] if len(ranked) % 2 else (ranked[half - 1] + ranked[half]) / 2


def default_prices(chip: str) -> tuple[Price, ...]:
    """The first on-demand price of each tier for `chip`. Raises UsageError if there is none."""
    rows = [price for price in load_prices().get(chip, ()) if not price.spot]
    first = [next((p for p in rows if p.tier == tier), None) for tier in TIERS]
    found = tuple(price for price in first if price)
    if not found:
        raise UsageError(f"--price: no price of {chip} is on file; give one, as --price 4.40")
    return found


def stale(prices: tuple[Price, ...], today: datetime.date) -> tuple[Price, ...]:
    """Those last seen more than 90 days before `today`."""
    return tuple(p for p in prices if (p.age_days(today) or 0) > STALE_DAYS)
