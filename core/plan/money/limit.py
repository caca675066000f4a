"""Check a run against a cost limit (`--max-cost`), and find the smallest change that meets it.

Cost is proportional to tokens, so a run above the limit fits with fewer tokens, a lower price, or a
higher MFU, each by the same factor. Only prices that may be used are compared (prices.py).
"""

from dataclasses import dataclass

from sabia.core.errors import Infeasible, UsageError
from sabia.core.plan.money.bills import cost_usd, short_money
from sabia.core.plan.money.prices import Price
from sabia.core.units import format_count

LEAST_RATE = 0.10
MOST_FASTER = 2


@dataclass(frozen=True)
class AffordableRun:
    """A run within its limit: its cost at the lowest price, and the tokens for the whole limit."""

    price: Price
    cost_usd: float
    tokens: float


def within_limit(
    limit_usd: float,
    work_chip_s: float,
    tokens: float,
    prices: tuple[Price, ...],
) -> AffordableRun:
    """The run of `tokens` tokens and `work_chip_s` chip-seconds at the lowest price.

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
    return AffordableRun(price, run_usd, fitting)
