"""From options to a plan: the one place where request and planner meet.

Tables, comparisons, lists of runs and plots all come through `plan_of`, so that the same question
has the same answer wherever it is asked.
"""

from datetime import date

from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan import planner, request
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import Request


def plan_of(
    settings: PlanOptions, priced: bool = True, today: date | None = None
) -> tuple[Request, Plan]:
    """What was asked, with its gaps filled, and the plan. Raises UsageError, Infeasible.

    `priced` False lets a chip without a price on file pass, with no bills.
    """
    asked = request.build(settings, priced, today)
    if settings.search or settings.fixed_layout:
        from sabia.core.plan import placed

        return asked, placed.plan(asked)
    return asked, planner.plan(asked.run, asked.cluster, asked.deadlines_s)
