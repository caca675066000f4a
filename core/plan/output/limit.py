"""The view of a money limit: what is left of it, and what all of it would buy.

Where stops were asked about, the bill is the one with them.
"""

from typing import Any

from sabia.core.plan.money.bills import short_money
from sabia.core.plan.money.limit import bought
from sabia.core.plan.output.stops import paid
from sabia.core.plan.output.table import percent
from sabia.core.plan.output.view import View
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import Request
from sabia.core.units import format_count


def see(asked: Request, plan: Plan) -> View:
    """What `--max-cost` buys at the lowest price. Raises Infeasible where the run costs more."""
    limit = asked.settings.max_cost
    assert limit is not None
    chip_s, share = paid(asked, plan)
    seen = bought(limit, chip_s, plan.run.tokens, plan.cluster.prices, share)
    line = (
        f"limit     {short_money(seen.cost_usd)} of {short_money(limit)} at "
        f"{seen.price.named_rate}{_terms(share)}; all of it would train on "
        f"{format_count(seen.tokens)} tokens"
    )
    figures: dict[str, Any] = {
        "limit_usd": limit,
        "cost_usd": seen.cost_usd,
        "left_usd": seen.left_usd,
        "tokens_for_all": seen.tokens,
        "price_usd_per_chip_hour": seen.price.usd_per_chip_hour,
    }
    return View(line, figures)


def _terms(share: float) -> str:
    return f", preemptible at {percent(share)} of it" if share < 1 else ""
