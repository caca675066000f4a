"""A view: what one group of options adds to a plan, in every form from the same objects.

Each view is a module of this folder with `see(asked, plan) -> View`; it is imported only when one
of its options was given. A new view is a module, a line in VIEWS, and its options.
"""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from sabia.core.options.plan_cluster import PlanStops
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import Request

# a view's module, which is also its key in the report → the options that ask for it
VIEWS: dict[str, tuple[str, ...]] = {
    "layout": ("search", "fixed_layout"),
    "stops": tuple(PlanStops.table),
    "offers": ("offers",),
    "limit": ("max_cost",),
    "carbon": ("carbon", "pue", "carbon_intensity"),
    "scaling": ("serve_tokens",),
}


@dataclass(frozen=True)
class View:
    """Lines for people, and a JSON object whose keys carry units."""

    text: str
    report: dict[str, Any] = field(default_factory=dict)


def views(asked: Request, plan: Plan, without: tuple[str, ...] = ()) -> dict[str, View]:
    """The views that were asked for, by key, in the order of VIEWS."""
    return {
        name: import_module(f"sabia.core.plan.output.{name}").see(asked, plan)
        for name, options in VIEWS.items()
        if name not in without and asked.settings.set_values(*options)
    }
