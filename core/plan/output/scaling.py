"""The view of scaling laws: is this the right size for the budget, and for what is served later?"""

from typing import Any

from sabia.core.plan.money.bills import short_money
from sabia.core.plan.money.scaling import Advice, Pair, advise, flops_for_money
from sabia.core.plan.output.table import columns, power_of_ten
from sabia.core.plan.output.view import View
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import Request
from sabia.core.units import format_count


def see(asked: Request, plan: Plan) -> View:
    """The plan beside the pairs that a scaling law prefers (active parameters, roughly)."""
    served = asked.settings.serve_tokens or 0.0
    advice = advise(plan.run.active_params, plan.run.tokens, served)
    pairs = {
        "as planned": advice.planned,
        "least loss for as much training": advice.same_flops,
        "cheapest for this loss": advice.same_loss,
    }
    limit, prices = asked.settings.max_cost, plan.cluster.prices
    if limit and prices:
        rate = min(price.usd_per_chip_hour for price in prices)
        sustained = plan.run.train_flops / plan.best.chip_s
        affordable = advice.law.optimal(flops_for_money(limit, rate, sustained))
        pairs[f"least loss for {short_money(limit)}"] = affordable
    head = [f"SIZE, {advice.law.name}", "PARAMS", "TOKENS", "EACH", "LOSS", "TRAIN", "AND SERVE"]
    rows = [[name, *_cells(pair, advice.law.loss, served)] for name, pair in pairs.items()]
    lines = columns(head, rows)
    lines.append(_advice(advice))
    figures: dict[str, Any] = {
        "law": advice.law.name,
        "loss": advice.loss,
        "served_tokens": served,
        "tokens_per_param": advice.planned.tokens_per_param,
        "over_training": advice.planned.over_training,
        "saving_share": advice.saving,
        "same_flops": _pair(advice.same_flops, served),
        "same_loss": _pair(advice.same_loss, served),
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


def _cells(pair: Pair, loss: Any, served: float) -> list[str]:
    return [
        format_count(pair.params, 1),
        format_count(pair.tokens, 1),
        f"{pair.tokens_per_param:,.0f}",
        f"{loss(pair.params, pair.tokens):.3f}",
        power_of_ten(pair.train_flops),
        power_of_ten(pair.life_flops(served)),
    ]


def _pair(pair: Pair, served: float) -> dict[str, float]:
    return {
        "params": pair.params,
        "tokens": pair.tokens,
        "train_flops": pair.train_flops,
        "life_flops": pair.life_flops(served),
    }
