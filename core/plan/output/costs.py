"""Views of cost: a cost limit, energy and emissions, offers on file, and scaling laws.

limit     what remains of `--max-cost`, and the tokens for all of it
carbon    energy and emissions of the run, and their range over grids
offers    the run's cost at every price on file that may be used, the lowest first; preemptions
          count for preemptible offers only
scaling   better model sizes for the budget, and with the cost of inference

Where the options request interruptions, costs include them.
"""

from dataclasses import asdict, replace
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan import planner
from sabia.core.plan.money.bills import HOUR_S, cost_usd, cost_usd_per_day, short_money
from sabia.core.plan.money.carbon import INTENSITIES, footprint
from sabia.core.plan.money.limit import within_limit
from sabia.core.plan.money.prices import Price, current, format_rate, load_prices, prices_for
from sabia.core.plan.money.scaling import BESIROGLU, Advice, Pair, advise
from sabia.core.plan.output.report import fields
from sabia.core.plan.output.table import Cell, columns, power_of_ten, table_of
from sabia.core.plan.output.view import View
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest
from sabia.core.units import format_count

# training compute of "high-impact capabilities": Regulation (EU) 2024/1689, article 51(2)
SYSTEMIC_FLOPS = 1e25


def limit(request: PlanRequest, plan: Plan) -> View:
    """The run within `--max-cost` at the lowest price. Raises Infeasible if it costs more."""
    limit_usd = request.settings.max_cost
    assert limit_usd is not None
    run = within_limit(limit_usd, plan.best.chip_s, plan.run.tokens, plan.cluster.prices)
    line = (
        f"limit     {short_money(run.cost_usd)} of {short_money(limit_usd)} at "
        f"{run.price.named_rate}; all of it would train on {format_count(run.tokens)} tokens"
    )
    figures: dict[str, Any] = {
        "limit_usd": limit_usd,
        "cost_usd": run.cost_usd,
        "left_usd": limit_usd - run.cost_usd,
        "tokens_for_all": run.tokens,
        "price_usd_per_chip_hour": run.price.usd_per_chip_hour,
    }
    return View(line, figures)


def carbon(request: PlanRequest, plan: Plan) -> View:
    """The footprint of the plan's best row. Raises UsageError."""
    chip, settings = plan.cluster.chip, request.settings
    run = footprint(
        plan.best.chip_s / HOUR_S,
        chip.power_w,
        chip.name,
        settings.value("pue"),
        settings.value("carbon_intensity"),
    )
    figures = asdict(run) | {
        "energy_kwh": run.energy_kwh,
        "tons_co2e": run.tons,
        "tons_co2e_low": run.low_t,
        "tons_co2e_high": run.high_t,
    }
    share = plan.run.train_flops / SYSTEMIC_FLOPS
    figures |= {"train_flops": plan.run.train_flops, "share_of_systemic_flops": share}
    grids = sorted(INTENSITIES, key=lambda name: INTENSITIES[name])
    line = (
        f"carbon    {format_count(run.energy_kwh)} kWh ({run.power_w:g} W per chip, PUE "
        f"{run.pue:g}), {tons(run.tons)} CO2e at {run.kg_per_kwh:g} kg/kWh; {tons(run.low_t)} on "
        f"the grid of {grids[0]}, {tons(run.high_t)} of {grids[-1]}"
    )
    compute = (
        f"compute   {power_of_ten(plan.run.train_flops)} FLOP, {share:.3g} times the 1e25 above "
        "which the EU presumes systemic risk"
    )
    return View(f"{line}\n{compute}", figures)


def tons(value: float) -> str:
    """173 t, 8.9 t, 12 kg."""
    if value < 1:
        return f"{value * 1e3:.0f} kg"
    return f"{value:,.0f} t" if value >= 10 else f"{value:.1f} t"


def offers(request: PlanRequest, plan: Plan) -> View:
    """The cost at every offer of the plan's chip, of the requested provider and region."""
    preemptible_s = steady_s = plan.best.chip_s
    if plan.cluster.stops:
        on_demand = replace(plan.cluster.stops, preemption_s=None, capacity_wait_s=0.0)
        steady = replace(plan.cluster, stops=on_demand)
        steady_s = planner.end_on(plan.run, steady, plan.best.chips, plan.best.work_s)[1]
    costs = [
        (cost_usd(preemptible_s if price.spot else steady_s, price.usd_per_chip_hour), price)
        for price in offers_on_file(request, plan)
    ]
    costs.sort(key=lambda pair: pair[0])
    if not costs:
        return View(f"offers    none of {plan.cluster.chip.name} on file may be used", {"rows": []})
    figures = [
        {
            **fields(price, "provider", "tier", "region", "spot", "commitment"),
            "price_usd_per_chip_hour": price.usd_per_chip_hour,
            "cost_usd": usd,
            "cost_usd_per_day": cost_usd_per_day(plan.best.chips, price.usd_per_chip_hour),
            "source": price.source,
            "date": price.date.isoformat() if price.date else None,
        }
        for usd, price in costs
    ]
    return View("\n".join(table_of(OFFERS, figures)), {"rows": figures})


OFFERS: dict[str, Cell] = {
    "OFFER": "{provider}",
    "REGION": lambda offer: offer["region"] or "-",
    "TERMS": lambda offer: "spot" if offer["spot"] else offer["commitment"] or "by the hour",
    "CHIP-HOUR": lambda offer: format_rate(offer["price_usd_per_chip_hour"]),
    "SEEN": "{date}",
    "COST": lambda offer: short_money(offer["cost_usd"]),
}


def offers_on_file(request: PlanRequest, plan: Plan) -> tuple[Price, ...]:
    """Prices on file that may be used today."""
    chip, settings = plan.cluster.chip.name, request.settings
    rows = current(load_prices().get(chip, ()), request.today)
    matches: tuple[Price, ...] = ()
    for spot, term in dict.fromkeys((price.spot, price.commitment) for price in rows):
        try:
            matches += prices_for(chip, settings.provider, settings.region, spot, term, rows)
        except UsageError:
            continue  # nothing of these terms there
    return matches


def scaling(request: PlanRequest, plan: Plan) -> View:
    """The plan and better pairs of size and tokens by a scaling law (of active parameters)."""
    inference_tokens = request.settings.serve_tokens or 0.0
    law = request.own_law.law if request.own_law else BESIROGLU
    advice = advise(plan.run.active_params, plan.run.tokens, inference_tokens, law)
    pairs = {
        "as planned": advice.planned,
        "least loss for the same FLOPs": advice.same_flops,
        "fewest FLOPs for the same loss": advice.same_loss,
    }
    limit_usd, prices = request.settings.max_cost, plan.cluster.prices
    if limit_usd and prices:
        rate = min(price.usd_per_chip_hour for price in prices)
        flops = limit_usd / rate * HOUR_S * (plan.run.train_flops / plan.best.chip_s)
        pairs[f"least loss for {short_money(limit_usd)}"] = advice.law.optimal(flops)
    head = [f"SIZE, {advice.law.name}", "PARAMS", "TOKENS", "EACH", "LOSS", "TRAIN", "AND SERVE"]
    rows = [
        [
            name,
            format_count(pair.params, 1),
            format_count(pair.tokens, 1),
            f"{pair.tokens_per_param:,.0f}",
            f"{advice.law.loss(pair.params, pair.tokens):.3f}",
            power_of_ten(pair.train_flops),
            power_of_ten(pair.life_flops(inference_tokens)),
        ]
        for name, pair in pairs.items()
    ]
    figures: dict[str, Any] = {
        "law": advice.law.name,
        "loss": advice.loss,
        "served_tokens": inference_tokens,
        "tokens_per_param": advice.planned.tokens_per_param,
        "over_training": advice.planned.over_training,
        "saving_share": advice.saving,
        "same_flops": _pair_figures(advice.same_flops, inference_tokens),
        "same_loss": _pair_figures(advice.same_loss, inference_tokens),
    }
    return View("\n".join([*columns(head, rows), _advice(advice)]), figures)


def _advice(advice: Advice) -> str:
    planned, best = advice.planned, advice.same_loss
    words = (
        f"advice    {planned.tokens_per_param:,.0f} tokens per parameter, "
        f"{planned.over_training:.1f} times the rule of 20; with "
        f"{format_count(advice.inference_tokens)} tokens served, "
    )
    if advice.saving < 0.01:
        return words + "the size is right: no other reaches its loss with 1% fewer FLOPs"
    return words + (
        f"{format_count(best.params)} parameters on {format_count(best.tokens)} tokens would save "
        f"{advice.saving:.0%} of the FLOPs"
    )


def _pair_figures(pair: Pair, inference_tokens: float) -> dict[str, float]:
    known = fields(pair, "params", "tokens", "train_flops")
    return known | {"life_flops": pair.life_flops(inference_tokens)}
