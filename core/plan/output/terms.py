"""On which terms the chips are used: reserved, at nights and weekends, tuned first or at once."""

from typing import Any

from sabia.core.errors import Infeasible, UsageError
from sabia.core.plan.money.bills import DAY_S, HOUR_S, cost_usd, short_money
from sabia.core.plan.output.table import percent, span
from sabia.core.plan.output.view import View
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest

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
    line = (
        f"reserved  {percent(discount)} off for {span(term_s)}: {short_money(whole)}, of which the "
        f"run uses {used:.0%} ({short_money(by_hour)} by the hour); it pays where the chips are in "
        f"use for more than {1 - discount:.0%} of the term"
    )
    figures = {
        "discount": discount,
        "term_s": term_s,
        "term_cost_usd": whole,
        "by_hour_cost_usd": by_hour,
        "used_share": used,
        "pays_from_share": 1 - discount,
    }
    return View(line, figures)


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
    line = (
        f"idle      production first: {idle_s / HOUR_S:.0f} of 168 hours a week are left, in "
        f"{WORKING_DAYS} windows that each lose {span(restart_s)}; on the same chips the run takes "
        f"{span(wall_s)} instead of {span(best.finishes_s)}"
    )
    figures = {
        "production_s_per_day": busy_s,
        "idle_share": idle_s / WEEK_S,
        "work_share": used_s / WEEK_S,
        "finishes_s": wall_s,
        "meets_deadline": wall_s <= best.deadline_s,
    }
    return View(line, figures)


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
    breaks_even_s = at_once_s - best.finishes_s
    gain = at_once_s - tuned_s
    pays = "it pays" if gain > 0 else "it does not pay"
    line = (
        f"tuning    {span(at_once_s)} at {first:.0%} MFU, or {span(tuning_s)} of tuning and "
        f"{span(best.finishes_s)} at {best.mfu:.0%}: {pays} (up to {span(breaks_even_s)} of tuning "
        "would)"
    )
    figures: dict[str, Any] = {
        "first_mfu": first,
        "tuned_mfu": best.mfu,
        "at_once_s": at_once_s,
        "tuned_s": tuned_s,
        "pays_up_to_s": breaks_even_s,
        "saved_usd": None,
    }
    if plan.cluster.prices:
        usd = cost_usd(best.chips * gain, _rate(plan, "--first-mfu"))
        figures["saved_usd"] = usd
        line += f", {short_money(abs(usd))} {'saved' if gain > 0 else 'lost'}"
    return View(line, figures)
