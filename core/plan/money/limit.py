"""What a money limit (`--max-cost`) buys of a run, and the smallest change that a dearer run needs.

A bill grows with tokens, so a run that costs more than the limit fits with fewer tokens, a lower
price, or a higher MFU, each by the same factor. Overheads (lost time, spare nodes) are a factor of
the bill, given by the caller. Only prices that may be used are compared (prices.py).
"""

from dataclasses import dataclass

from sabia.core.errors import Infeasible, UsageError
from sabia.core.plan.money.bills import cost_usd, short_money
from sabia.core.plan.money.prices import Price
from sabia.core.units import format_count

LEAST_RATE = 0.10
MOST_FASTER = 2


@dataclass(frozen=True)
class Bought:
    """A run within its limit: its bill at the cheapest price, and what all of it would buy."""

    price: Price
    cost_usd: float
    tokens: float


def bought(
    limit_usd: float,
    work_chip_s: float,
    tokens: float,
    prices: tuple[Price, ...],
    overhead: float = 1.0,
) -> Bought:
    """What `limit_usd` buys of a run of `tokens` that takes `work_chip_s` at the cheapest price.

    `overhead` multiplies the bill (0.5: chips at half the price). Raises UsageError on a limit
    of nothing or no price, Infeasible, with the smallest changes, where the run costs more.
    """
    if not limit_usd > 0:
        raise UsageError(f"--max-cost: {limit_usd:g} (expected more than 0)")
    if not prices:
        raise UsageError("--max-cost: no price to compare with; give one, as --price 4.40")
    price = min(prices, key=lambda price: price.usd_per_chip_hour)
    run_usd = cost_usd(work_chip_s, price.usd_per_chip_hour) * overhead
    fitting = tokens * limit_usd / run_usd
    if run_usd > limit_usd * (1 + 1e-9):
        ways = _smallest_changes(fitting, run_usd / limit_usd, price)
        raise Infeasible(
            f"--max-cost: the run costs {short_money(run_usd)} at {price.named_rate} (expected at "
            f"most {short_money(limit_usd)}); use {ways}"
        )
    return Bought(price, run_usd, fitting)


def _smallest_changes(fitting: float, factor: float, price: Price) -> str:
    """What would do, one by one; no price of cents, no utilization beyond all reach."""
    rate = int(price.usd_per_chip_hour / factor * 100) / 100
    ways = [f"--tokens {_rounded_down(fitting)}"]
    ways += [f"--price {rate:.2f}"] if rate >= LEAST_RATE else []
    ways += [f"a {factor:.2f} times higher --mfu"] if factor <= MOST_FASTER else []
    return " or ".join(ways)


def _rounded_down(tokens: float) -> str:
    """Tokens with three digits, never more than there are."""
    size = 10 ** (len(f"{tokens:.0f}") - 3)
    return format_count(tokens // size * size, 2)
