"""Beside a plan at a given MFU: whose arithmetic it is, and what the search of layouts finds."""

from sabia.core.errors import Infeasible, UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.output.report import View, fields, layout_words
from sabia.core.plan.output.table import percent, verdict
from sabia.core.plan.placed import plan_of
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest

MOST_WORDS = 200  # characters of a reason


def beside(request: PlanRequest, plan: Plan) -> View:
    """The lines and the object `search` of a plan that has no layouts."""
    settings, cluster = request.settings, plan.cluster
    basis = (
        f"basis     the arithmetic of the article: {percent(cluster.mfu)} MFU is assumed, every "
        "byte of memory counts, and no layout is checked"
    )
    try:
        plans = _searched(settings, request)
    except (UsageError, Infeasible) as error:
        words = str(error)
        words = words if len(words) <= MOST_WORDS else words[: MOST_WORDS - 1] + "…"
        return View(f"{basis}\nsearch    finds none: {words}", {"error": str(error)})
    best = plans.best
    usd = [plans.cost_usd(price) for price in plans.cluster.prices]
    figures = {
        **fields(best, "deadline_s", "chips", "work_s", "finishes_s", "mfu"),
        "layout": layout_words(best),
        "costs_usd": usd,
        "error": None,
    }
    return View(f"{basis}\nsearch    {verdict(plans)} --search shows the layouts.", figures)


def _searched(settings: PlanOptions, request: PlanRequest) -> Plan:
    """The same request by layouts. Raises UsageError, Infeasible."""
    if settings.lora and settings.lora_rank is None:
        raise UsageError("--lora: layouts need the size of the adapters; give --lora-rank")
    own = settings.changed(search=True, mfu=None, plot=None)
    return plan_of(own, priced=False, today=request.today)[1]
