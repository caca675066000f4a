"""A view: what one group of options adds to a plan, in every form from the same objects.

Each view is a function `(asked, plan) -> View` of that name; its module is imported only when one
of its options was given. A new view is a function, a line in VIEWS, and its options.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from sabia.core.options.plan_cluster import PlanStops
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest

# a view's function, which is also its key in the report → the options that ask for it
VIEWS: dict[str, tuple[str, ...]] = {
    "layout": ("search", "fixed_layout"),
    "stops": tuple(PlanStops.table),
    "offers": ("offers",),
    "limit": ("max_cost",),
    "carbon": ("carbon", "pue", "carbon_intensity"),
    "scaling": ("serve_tokens",),
}
MODULES = {"layout": "layout", "stops": "stops"}  # those of views that are not in costs.py


@dataclass(frozen=True)
class View:
    """Lines for people, and a JSON object whose keys carry units."""

    text: str
    report: dict[str, Any] = field(default_factory=dict)


def views(request: PlanRequest, plan: Plan, without: tuple[str, ...] = ()) -> dict[str, View]:
    """The views that were asked for, by key, in the order of VIEWS."""
    return {
        name: _function(name)(request, plan)
        for name, options in VIEWS.items()
        if name not in without and request.settings.set_values(*options)
    }


def _function(name: str) -> Callable[[PlanRequest, Plan], View]:
    """The function of a view."""
    module = import_module(f"sabia.core.plan.output.{MODULES.get(name, 'costs')}")
    return getattr(module, name)
