"""The plan of one run: at a given utilization, or by the predicted speed of a layout."""

from datetime import date

from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan import planner
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest, build


def plan_of(
    settings: PlanOptions, priced: bool = True, today: date | None = None
) -> tuple[PlanRequest, Plan]:
    """The request with all defaults, and its plan. Raises UsageError, Infeasible.

    Tables, comparisons, lists of runs and plots all use this function, so that the same options
    have the same plan everywhere. `priced`: as for `build`.
    """
    request = build(settings, priced, today)
    if settings.search or settings.fixed_layout:
        from sabia.core.plan import placed

        return request, placed.plan(request)
    return request, planner.plan(request.run, request.cluster, request.deadlines_s)
