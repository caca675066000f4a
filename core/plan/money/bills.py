"""Cost of chip-hours, and the format of amounts in tables.

Cost depends only on chip-hours: twice the chips for half the time cost the same. It is for the run
itself, without failures, idle time or storage.
"""

from sabia.core.units import DURATION_S

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
