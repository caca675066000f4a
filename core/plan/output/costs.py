"""Views of money: a limit, energy and emissions, offers on file, the size that a budget buys.

limit     what is left of `--max-cost`, and what all of it would buy
carbon    what the run takes from the grid, and the range over grids
offers    the run's bill at every price on file that may be used, the smallest first; where
          preemptions were asked about, a preemptible offer is billed with them, and no other is
scaling   whether this is the right size for the budget, and for what is served later

Where stops were asked about, bills are those with them.
"""

from dataclasses import asdict
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.money.bills import HOUR_S, cost_usd, cost_usd_per_day, short_money
from sabia.core.plan.money.carbon import INTENSITIES, Footprint, footprint
from sabia.core.plan.money.limit import bought
from sabia.core.plan.money.prices import Price, current, format_rate, load_prices, prices_for
from sabia.core.plan.money.scaling import Advice, Pair, advise
from sabia.core.plan.output.report import fields
from sabia.core.plan.output.stops import paid, paid_by_terms
from sabia.core.plan.output.table import columns, percent, power_of_ten
from sabia.core.plan.output.view import View
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest
from sabia.core.units import format_count


def limit(request: PlanRequest, plan: Plan) -> View:
    """What `--max-cost` buys at the lowest price. Raises Infeasible where the run costs more."""
    limit = request.settings.max_cost
    assert limit is not None
    chip_s, share = paid(request, plan)
    seen = bought(limit, chip_s, plan.run.tokens, plan.cluster.prices, share)
    line = (
        f"limit     {short_money(seen.cost_usd)} of {short_money(limit)} at "
        f"{seen.price.named_rate}{_terms(share)}; all of it would train on "
        f"{format_count(seen.tokens)} tokens"
    )
    figures: dict[str, Any] = {
        "limit_usd": limit,
        "cost_usd": seen.cost_usd,
        "left_usd": limit - seen.cost_usd,
        "tokens_for_all": seen.tokens,
        "price_usd_per_chip_hour": seen.price.usd_per_chip_hour,
    }
    return View(line, figures)


def _terms(share: float) -> str:
    return f", preemptible at {percent(share)} of it" if share < 1 else ""


def carbon(request: PlanRequest, plan: Plan) -> View:
    """The footprint of the plan's best row, with stops where they were asked about.

    Raises UsageError.
    """
    chip, said = plan.cluster.chip, request.settings
    hours = paid(request, plan)[0] / 3600
    seen = footprint(
        hours, chip.power_w, chip.name, said.value("pue"), said.value("carbon_intensity")
    )
    figures = asdict(seen) | {
        "energy_kwh": seen.energy_kwh,
        "tons_co2e": seen.tons,
        "tons_co2e_low": seen.low_t,
        "tons_co2e_high": seen.high_t,
    }
    return View(_carbon_line(seen), figures)


def _carbon_line(seen: Footprint) -> str:
    grids = sorted(INTENSITIES, key=lambda name: INTENSITIES[name])
    return (
        f"carbon    {format_count(seen.energy_kwh)} kWh ({seen.power_w:g} W a chip, PUE "
        f"{seen.pue:g}), {tons(seen.tons)} CO2e at {seen.kg_per_kwh:g} kg/kWh; {tons(seen.low_t)} "
        f"on the grid of {grids[0]}, {tons(seen.high_t)} of {grids[-1]}"
    )


def tons(value: float) -> str:
    """173 t, 8.9 t, 12 kg."""
    if value < 1:
        return f"{value * 1e3:.0f} kg"
    return f"{value:,.0f} t" if value >= 10 else f"{value:.1f} t"


def offers(request: PlanRequest, plan: Plan) -> View:
    """Every offer of the plan's chip, of the provider and region that were asked for."""
    preemptible_s, steady_s = paid_by_terms(request, plan)
    chips = plan.best.chips
    billed = [
        (cost_usd(preemptible_s if price.spot else steady_s, price.usd_per_chip_hour), price)
        for price in offers_on_file(request, plan)
    ]
    billed.sort(key=lambda pair: pair[0])
    if not billed:
        return View(f"offers    none of {plan.cluster.chip.name} on file may be used", {"rows": []})
    rows = [[*_offer_cells(price), short_money(usd)] for usd, price in billed]
    figures = [_offer_figures(price, usd, chips) for usd, price in billed]
    head = ["OFFER", "REGION", "TERMS", "CHIP-HOUR", "SEEN", "BILL"]
    return View("\n".join(columns(head, rows)), {"rows": figures})


def offers_on_file(request: PlanRequest, plan: Plan) -> tuple[Price, ...]:
    """Prices on file that may be used today."""
    chip, said = plan.cluster.chip.name, request.settings
    rows = current(load_prices().get(chip, ()), request.today)
    found: tuple[Price, ...] = ()
    for spot, term in dict.fromkeys((price.spot, price.commitment) for price in rows):
        try:
            found += prices_for(chip, said.provider, said.region, spot, term, rows)
        except UsageError:
            continue  # nothing of these terms there
    return found


def _offer_cells(price: Price) -> list[str]:
    terms = "spot" if price.spot else price.commitment or "by the hour"
    rate = format_rate(price.usd_per_chip_hour)
    return [str(price.provider), price.region or "-", terms, rate, str(price.date)]


def _offer_figures(price: Price, usd: float, chips: int) -> dict[str, Any]:
    return {
        **fields(price, "provider", "tier", "region", "spot", "commitment"),
        "price_usd_per_chip_hour": price.usd_per_chip_hour,
        "cost_usd": usd,
        "cost_usd_per_day": cost_usd_per_day(chips, price.usd_per_chip_hour),
        "source": price.source,
        "date": price.date.isoformat() if price.date else None,
    }


def scaling(request: PlanRequest, plan: Plan) -> View:
    """The plan beside the pairs that a scaling law prefers (active parameters, roughly)."""
    served = request.settings.serve_tokens or 0.0
    advice = advise(plan.run.active_params, plan.run.tokens, served)
    pairs = {
        "as planned": advice.planned,
        "least loss for as much training": advice.same_flops,
        "cheapest for this loss": advice.same_loss,
    }
    limit, prices = request.settings.max_cost, plan.cluster.prices
    if limit and prices:
        rate = min(price.usd_per_chip_hour for price in prices)
        flops = limit / rate * HOUR_S * (plan.run.train_flops / plan.best.chip_s)
        pairs[f"least loss for {short_money(limit)}"] = advice.law.optimal(flops)
    head = [f"SIZE, {advice.law.name}", "PARAMS", "TOKENS", "EACH", "LOSS", "TRAIN", "AND SERVE"]
    rows = [[name, *_pair_cells(pair, advice.law.loss, served)] for name, pair in pairs.items()]
    lines = columns(head, rows)
    lines.append(_advice(advice))
    figures: dict[str, Any] = {
        "law": advice.law.name,
        "loss": advice.loss,
        "served_tokens": served,
        "tokens_per_param": advice.planned.tokens_per_param,
        "over_training": advice.planned.over_training,
        "saving_share": advice.saving,
        "same_flops": _pair_figures(advice.same_flops, served),
        "same_loss": _pair_figures(advice.same_loss, served),
    }
    return View("\n".join(lines), figures)


def _advice(advice: Advice) -> str:
    planned, best = advice.planned, advice.same_loss
    words = (
        f"advice    {planned.tokens_per_param:,.0f} tokens for each parameter, "
        f"{planned.over_training:.1f} times the rule of 20; with "
        f"{format_count(advice.served_tokens)} tokens served, "
    )
    if advice.saving < 0.01:
        return words + "the size is right: no other reaches its loss with 1% fewer operations"
    return words + (
        f"{format_count(best.params)} parameters on {format_count(best.tokens)} tokens would save "
        f"{advice.saving:.0%} of the operations"
    )


def _pair_cells(pair: Pair, loss: Any, served: float) -> list[str]:
    return [
        format_count(pair.params, 1),
        format_count(pair.tokens, 1),
        f"{pair.tokens_per_param:,.0f}",
        f"{loss(pair.params, pair.tokens):.3f}",
        power_of_ten(pair.train_flops),
        power_of_ten(pair.life_flops(served)),
    ]


def _pair_figures(pair: Pair, served: float) -> dict[str, float]:
    known = fields(pair, "params", "tokens", "train_flops")
    return known | {"life_flops": pair.life_flops(served)}
