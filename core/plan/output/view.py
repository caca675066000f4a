"""A view: what one group of options adds to a plan, as text and as JSON.

Each view is a function `(request, plan) -> View` with the name of the view; its module is imported
only if one of its options is given. A new view needs a function, a line in VIEWS, and its options.
"""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from sabia.core.options.plan_cluster import PlanStops
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest

# a view's function, which is also its key in the report → the options that request it
VIEWS: dict[str, tuple[str, ...]] = {
    "layout": ("search", "fixed_layout"),
    "stops": tuple(PlanStops.table),
    "offers": ("offers",),
    "limit": ("max_cost",),
    "carbon": ("carbon", "pue", "carbon_intensity"),
    "scaling": ("serve_tokens",),
    "fit": ("fit",),
    "reserved": ("reserved",),
    "idle": ("production",),
    "tuning": ("first_mfu",),
}
TERMS = dict.fromkeys(("reserved", "idle", "tuning"), "terms")
MODULES = {
    "layout": "layout",
    "stops": "stops",
    "fit": "own_law",
} | TERMS  # modules of views outside costs.py


@dataclass(frozen=True)
class View:
    """Lines of text, and a JSON object with units in its keys."""

    text: str
    report: dict[str, Any] = field(default_factory=dict)


def views(request: PlanRequest, plan: Plan, without: tuple[str, ...] = ()) -> dict[str, View]:
    """The requested views by key, in the order of VIEWS."""
    requested: dict[str, View] = {}
    for name, options in VIEWS.items():
        if name not in without and request.settings.set_values(*options):
            module = import_module(f"sabia.core.plan.output.{MODULES.get(name, 'costs')}")
            requested[name] = getattr(module, name)(request, plan)
    return requested
