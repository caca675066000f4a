"""Views of cost: a cost limit, energy and emissions, offers on file, and scaling laws.

limit     what remains of `--max-cost`, and the tokens for all of it
carbon    energy and emissions of the run, and their range over grids
offers    the run's cost at every price on file that may be used, the lowest first; preemptions
          count for preemptible offers only
scaling   better model sizes for the budget, and with the cost of inference

Where the options request interruptions, costs include them.

The law of `--fit`: its runs, its constants with intervals, and what it says about a plan.

On which terms the chips are used: reserved, at nights and weekends, tuned first or at once.
"""

from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from sabia.core.errors import Infeasible, UsageError
from sabia.core.plan import planner
from sabia.core.plan.money import prices
from sabia.core.plan.money.carbon import INTENSITIES, footprint
from sabia.core.plan.money.fitted import FittedLaw, percentiles
from sabia.core.plan.money.prices import DAY_S, HOUR_S, cost_usd, short_money
from sabia.core.plan.money.scaling import BESIROGLU, Pair, cheapest_pair
from sabia.core.plan.output.report import View, fields
from sabia.core.plan.output.table import Cell, percent, span, table_of, words
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest

RISING = 1.2  # ratio of the exponents of long and of short runs, above which the law fails
FAR = 1000  # times the FLOPs of the largest run, beyond which a law says little


def law_line(fitted: FittedLaw | None) -> str:
    """The law in one line."""
    law = fitted.law if fitted else BESIROGLU
    loss = words("law_loss", law=law)
    if fitted is None:
        return words("law", law=law, loss=loss)
    exponents = "" if fitted.free else ", exponents of Besiroglu 2024"
    given = {"runs": len(fitted.runs), "error": round(fitted.rms_error, 4)}
    return words("law_fitted", given, exponents=exponents, loss=loss)


def interval_text(pair: tuple[float, float]) -> str:
    """' (2.310 to 2.365)'."""
    return f" ({pair[0]:.3f} to {pair[1]:.3f})"


def fit(request: PlanRequest, plan: Plan) -> View:
    """What the law says about the plan: its final loss, and the best pair for its FLOPs."""
    fitted = request.own_law
    assert fitted is not None
    params, tokens = plan.run.active_params, plan.run.tokens
    flops = Pair(params, tokens).train_flops
    low, high = fitted.loss_interval(params, tokens)
    figures: dict[str, Any] = {
        "law": asdict(fitted.law),
        "runs": len(fitted.runs),
        **fields(fitted, "exponents_fitted=free rms_error"),
        "exponents": list(fitted.exponents or ()),
        "loss": fitted.law.loss(params, tokens),
        "loss_low": low,
        "loss_high": high,
        "times_largest_run": flops / fitted.largest_flops,
    }
    lines = [law_line(fitted), words("fit_loss", figures)]
    if fitted.law.a and fitted.law.b:
        best = fitted.law.optimal(flops)
        laws = [law for law in fitted.resampled if law.a and law.b]
        low, high = percentiles([law.optimal(flops).params for law in laws] or [best.params])
        figures |= {"best_params": best.params, "best_params_low": low, "best_params_high": high,
                    "best_tokens": best.tokens}  # fmt: skip
        loss = fitted.law.loss(best.params, best.tokens)
        lines.append(words("fit_best", figures, best_loss=loss))
    first, last = fitted.exponents or (0.0, 0.0)
    if last > RISING * first > 0:
        lines.append(words("fit_rising", first=first, last=last))
    if flops > FAR * fitted.largest_flops:
        lines.append(words("fit_far", figures))
    return View("\n".join(lines), figures)


# training compute of "high-impact capabilities": Regulation (EU) 2024/1689, article 51(2)
SYSTEMIC_FLOPS = 1e25


def limit(request: PlanRequest, plan: Plan) -> View:
    """The run within `--max-cost` at the lowest price. Raises Infeasible if it costs more."""
    limit_usd, work = request.settings.max_cost, (plan.best.chip_s, plan.run.tokens)
    assert limit_usd is not None
    price, figures = prices.within_limit(limit_usd, *work, plan.cluster.prices)
    return View(words("limit", figures, rate=price.named_rate), figures)


def carbon(request: PlanRequest, plan: Plan) -> View:
    """The footprint of the plan's best row. Raises UsageError."""
    power_w, name = plan.cluster.chip.power_w, plan.cluster.chip.name
    if power_w is None:
        raise UsageError(
            f"--carbon: no power of {name} is on file (expected a chip with power_w in chips.toml)"
        )
    grid = [request.settings.value(name) for name in ("pue", "carbon_intensity")]
    figures = footprint(plan.best.chip_s / HOUR_S, power_w, *grid)
    share = plan.run.train_flops / SYSTEMIC_FLOPS
    figures |= {"train_flops": plan.run.train_flops, "share_of_systemic_flops": share}
    grids = sorted(INTENSITIES, key=lambda name: INTENSITIES[name])
    lines = words("carbon", figures, low=grids[0], high=grids[-1]), words("compute", figures)
    return View("\n".join(lines), figures)


def offers(request: PlanRequest, plan: Plan) -> View:
    """The cost at every offer of the plan's chip, of the requested provider and region."""
    billed_s = dict.fromkeys((True, False), plan.best.chip_s)  # preemptible or not
    if plan.cluster.stops:
        on_demand = replace(plan.cluster.stops, preemption_s=None, capacity_wait_s=0.0)
        steady = replace(plan.cluster, stops=on_demand)
        billed_s[False] = planner.end_on(plan.run, steady, plan.best.chips, plan.best.work_s)[1]
    figures = [
        {
            **fields(price, "provider tier region spot commitment"),
            "price_usd_per_chip_hour": price.usd_per_chip_hour,
            "cost_usd": cost_usd(billed_s[price.spot], price.usd_per_chip_hour),
            "cost_usd_per_day": prices.cost_usd_per_day(plan.best.chips, price.usd_per_chip_hour),
            **fields(price, "source date=seen"),
        }
        for price in offers_on_file(request, plan)
    ]
    if not figures:
        return View(f"offers    none of {plan.cluster.chip.name} on file may be used", {"rows": []})
    figures.sort(key=lambda offer: offer["cost_usd"])
    return View("\n".join(table_of(OFFERS, figures)), {"rows": figures})


OFFERS: dict[str, Cell] = {
    "OFFER": "{provider}",
    "REGION": lambda offer: offer["region"] or "-",
    "TERMS": lambda offer: "spot" if offer["spot"] else offer["commitment"] or "by the hour",
    "CHIP-HOUR": "{price_usd_per_chip_hour:rate}",
    "SEEN": "{date}",
    "COST": "{cost_usd:money}",
}


def offers_on_file(request: PlanRequest, plan: Plan) -> tuple[prices.Price, ...]:
    """Prices on file that may be used today."""
    chip, settings = plan.cluster.chip.name, request.settings
    rows = prices.current(prices.load_prices().get(chip, ()), request.today)
    matches: tuple[prices.Price, ...] = ()
    for spot, term in dict.fromkeys((price.spot, price.commitment) for price in rows):
        with suppress(UsageError):  # nothing of these terms there
            matches += prices.prices_for(chip, settings.provider, settings.region, spot, term, rows)
    return matches


PAIRS: dict[str, Cell] = {
    "PARAMS": "{pair.params:count1}",
    "TOKENS": "{pair.tokens:count1}",
    "EACH": "{pair.tokens_per_param:,.0f}",
    "LOSS": "{loss:.3f}",
    "TRAIN": "{pair.train_flops:power}",
    "AND SERVE": "{life:power}",
}


def scaling(request: PlanRequest, plan: Plan) -> View:
    """The plan and better pairs of size and tokens by a scaling law (of active parameters)."""
    served_tokens = request.settings.serve_tokens or 0.0
    law = request.own_law.law if request.own_law else BESIROGLU
    planned = Pair(plan.run.active_params, plan.run.tokens)
    loss, same_flops = planned.loss(law), law.optimal(planned.train_flops)
    same_loss = cheapest_pair(law, loss, served_tokens)
    saving = 1 - same_loss.life_flops(served_tokens) / planned.life_flops(served_tokens)
    pairs = {
        "as planned": planned,
        "least loss for the same FLOPs": same_flops,
        "fewest FLOPs for the same loss": same_loss,
    }
    limit_usd = request.settings.max_cost
    if limit_usd and plan.cluster.prices:
        rate = min(price.usd_per_chip_hour for price in plan.cluster.prices)
        flops = limit_usd / rate * HOUR_S * (plan.run.train_flops / plan.best.chip_s)
        pairs[f"least loss for {short_money(limit_usd)}"] = law.optimal(flops)
    rows = [
        {"name": name, "pair": pair, "loss": pair.loss(law), "life": pair.life_flops(served_tokens)}
        for name, pair in pairs.items()
    ]
    figures: dict[str, Any] = {
        "law": law.name,
        "loss": loss,
        "served_tokens": served_tokens,
        **fields(planned, "tokens_per_param over_training"),
        "saving_share": saving,
        "same_flops": _pair_figures(same_flops, served_tokens),
        "same_loss": _pair_figures(same_loss, served_tokens),
    }
    rest = words("advice_right" if saving < 0.01 else "advice_other", best=same_loss, saving=saving)
    advice = words("advice", planned=planned, inference_tokens=served_tokens, rest=rest)
    lines = table_of({f"SIZE, {law.name}": "{name}", **PAIRS}, rows)
    return View("\n".join([*lines, advice]), figures)


def _pair_figures(pair: Pair, inference_tokens: float) -> dict[str, float]:
    known = fields(pair, "params tokens train_flops")
    return known | {"life_flops": pair.life_flops(inference_tokens)}


WEEK_S = 7 * DAY_S
WORKING_DAYS = 5


def _rate(plan: Plan, flag: str) -> float:
    """The lowest price of a chip-hour. Raises UsageError without one."""
    if not plan.cluster.prices:
        raise UsageError(f"{flag}: needs a price; give one, as --price 4.40")
    return min(price.usd_per_chip_hour for price in plan.cluster.prices)


def reserved(request: PlanRequest, plan: Plan) -> View:
    """The run by the hour and reserved: a reservation is paid for its term, used or not."""
    settings, best = request.settings, plan.best
    discount, term_s = settings.reserved or 0.0, settings.value("term")
    if not 0 < discount < 1:
        raise UsageError(f"--reserved: {percent(discount)} (expected above 0 and below 100%)")
    usd = _rate(plan, "--reserved")
    by_hour = cost_usd(best.chip_s, usd)
    whole = cost_usd(best.chips * term_s, usd * (1 - discount))
    used = best.chip_s / (best.chips * term_s)
    figures = {
        "discount": discount,
        "term_s": term_s,
        "term_cost_usd": whole,
        "by_hour_cost_usd": by_hour,
        "used_share": used,
        "pays_from_share": 1 - discount,
    }
    return View(words("reserved", figures), figures)


def idle(request: PlanRequest, plan: Plan) -> View:
    """The run in the hours that production leaves: nights and weekends."""
    settings, best = request.settings, plan.best
    busy_s = settings.production or 0.0
    restart_s = settings.value("restart") + (settings.save_stall or 0.0)
    if busy_s >= DAY_S:
        raise UsageError(f"--production: {span(busy_s)} (expected less than a day)")
    night_s = DAY_S - busy_s
    idle_s = WEEK_S - WORKING_DAYS * busy_s
    used_s = idle_s - WORKING_DAYS * restart_s
    if restart_s >= night_s:
        raise Infeasible(
            f"--production: a restart of {span(restart_s)} takes all of a night of "
            f"{span(night_s)}; use a shorter --production or --restart"
        )
    wall_s = best.finishes_s / used_s * WEEK_S
    figures = {
        "production_s_per_day": busy_s,
        "idle_share": idle_s / WEEK_S,
        "work_share": used_s / WEEK_S,
        "finishes_s": wall_s,
        "meets_deadline": wall_s <= best.deadline_s,
    }
    given = {"windows": WORKING_DAYS, "restart_s": restart_s, "alone_s": best.finishes_s}
    return View(words("idle", figures | given, idle_h=idle_s / HOUR_S), figures)


def tuning(request: PlanRequest, plan: Plan) -> View:
    """The run at its first MFU, and after a time of tuning at the tuned one."""
    settings, best = request.settings, plan.best
    first, tuning_s = settings.first_mfu or 0.0, settings.value("tuning")
    if not 0 < first < best.mfu:
        raise UsageError(
            f"--first-mfu: {percent(first)} (expected above 0 and below the tuned {best.mfu:.0%})"
        )
    at_once_s = best.finishes_s * best.mfu / first
    tuned_s = best.finishes_s + tuning_s
    gain = at_once_s - tuned_s
    figures: dict[str, Any] = {
        "first_mfu": first,
        "tuned_mfu": best.mfu,
        "at_once_s": at_once_s,
        "tuned_s": tuned_s,
        "pays_up_to_s": at_once_s - best.finishes_s,
        "saved_usd": None,
    }
    given = {"tuning_s": tuning_s, "finishes_s": best.finishes_s}
    pays = "it pays" if gain > 0 else "it does not pay"
    line = words("tuning", figures | given, pays=pays)
    if plan.cluster.prices:
        usd = cost_usd(best.chips * gain, _rate(plan, "--first-mfu"))
        figures["saved_usd"] = usd
        line += f", {short_money(abs(usd))} {'saved' if gain > 0 else 'lost'}"
    return View(line, figures)
