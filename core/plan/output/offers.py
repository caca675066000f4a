"""The view of offers: the run's bill at every price on file that may be used, the smallest first.

Where preemptions were asked about, a preemptible offer is billed with them, and no other is.
"""

from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.money.bills import cost_usd, cost_usd_per_day, short_money
from sabia.core.plan.money.prices import Price, chosen, current, format_rate, load_prices
from sabia.core.plan.output.stops import paid_by_terms
from sabia.core.plan.output.table import columns
from sabia.core.plan.output.view import View
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import Request


def see(asked: Request, plan: Plan) -> View:
    """Every offer of the plan's chip, of the provider and region that were asked for."""
    preemptible_s, steady_s = paid_by_terms(asked, plan)
    chips = plan.best.chips
    billed = [
        (cost_usd(preemptible_s if price.spot else steady_s, price.usd_per_chip_hour), price)
        for price in offers(asked, plan)
    ]
    billed.sort(key=lambda pair: pair[0])
    if not billed:
        return View(f"offers    none of {plan.cluster.chip.name} on file may be used", {"rows": []})
    rows = [[*_cells(price), short_money(usd)] for usd, price in billed]
    figures = [_figures(price, usd, chips) for usd, price in billed]
    head = ["OFFER", "REGION", "TERMS", "CHIP-HOUR", "SEEN", "BILL"]
    return View("\n".join(columns(head, rows)), {"rows": figures})


def offers(asked: Request, plan: Plan) -> tuple[Price, ...]:
    """Prices on file that may be used today."""
    chip, said = plan.cluster.chip.name, asked.settings
    rows = current(load_prices().get(chip, ()), asked.today)
    found: tuple[Price, ...] = ()
    for spot, term in dict.fromkeys((price.spot, price.commitment) for price in rows):
        try:
            found += chosen(rows, chip, said.provider, said.region, spot, term)
        except UsageError:
            continue  # nothing of these terms there
    return found


def _cells(price: Price) -> list[str]:
    terms = "spot" if price.spot else price.commitment or "by the hour"
    rate = format_rate(price.usd_per_chip_hour)
    return [str(price.provider), price.region or "-", terms, rate, str(price.date)]


def _figures(price: Price, usd: float, chips: int) -> dict[str, Any]:
    return {
        "provider": price.provider,
        "tier": price.tier,
        "region": price.region,
        "spot": price.spot,
        "commitment": price.commitment,
        "price_usd_per_chip_hour": price.usd_per_chip_hour,
        "cost_usd": usd,
        "cost_usd_per_day": cost_usd_per_day(chips, price.usd_per_chip_hour),
        "source": price.source,
        "date": price.date.isoformat() if price.date else None,
    }
