"""A plan as JSON: version, inputs, assumptions, and rows, with units in the key names.

New versions may add keys; a changed meaning needs a new SCHEMA_VERSION.

A view: what one group of options adds to a plan, as text and as JSON.

Each view is a function `(request, plan) -> View` with the name of the view; its module is imported
only if one of its options is given. A new view needs a function, a line in VIEWS, and its options.
"""

from dataclasses import asdict, dataclass, field
from importlib import import_module
from operator import attrgetter
from typing import Any

from sabia.core.options.plan_cluster import PlanStops
from sabia.core.plan.compute import whole_nodes
from sabia.core.plan.money.prices import cost_usd_per_day
from sabia.core.plan.planner import DeadlineRow, Plan
from sabia.core.plan.request import PlanRequest

SCHEMA_VERSION = 2  # finishes_s and costs include the interruptions that are planned


# figures of a plan
FIGURES = """
    run.params run.active_params run.tokens run.train_flops cluster.flops_per_chip_s chip_hours
    run.state_bytes run.activation_bytes run.total_bytes
    state_min_chips accumulated_min_chips memory_min_chips
    run.layers run.hidden run.matmul_params model_origin=run.origin
    attention_flops_share_not_counted=run.attention_share
    sequence_tokens=run.sequence run.batch_tokens run.optimizer_steps
    state_recipe=run.recipe.name state_bytes_per_param=run.recipe.bytes_per_param
    run.lora run.convention run.adapter_params
    cluster.mfu mfu_usual_low=run.usual_mfu.low mfu_usual_high=run.usual_mfu.high cluster.hbm_bytes
"""
PRICE = "usd_per_chip_hour tier provider region spot commitment source date=seen"


def report(request: PlanRequest, plan: Plan) -> dict[str, Any]:
    """The plan as a JSON object."""
    cluster = plan.cluster
    return {
        "schema_version": SCHEMA_VERSION,
        "inputs": request.settings.set_values(),
        **fields(plan, FIGURES),
        "chip": asdict(cluster.chip) | {"date": str(cluster.chip.date)},
        "prices": [fields(price, PRICE) for price in cluster.prices],
        "no_money": request.refused_price or None,
        "assumed": list(request.assumed),
        "rows": [_row(plan, row) for row in plan.rows],
    }


def fields(one: object, names: str) -> dict[str, Any]:
    """Figures of an object: `name`, `path.of.name` or `key=path`, separated by spaces."""
    pairs = [name.rpartition("=") for name in names.split()]
    return {key or path.rpartition(".")[2]: attrgetter(path)(one) for key, _, path in pairs}


def _row(plan: Plan, row: DeadlineRow) -> dict[str, object]:
    size = plan.cluster.chip.node_chips
    return {
        **fields(row, "deadline_s compute_min_chips"),
        "compute_min_chips_in_nodes": whole_nodes(row.compute_min_chips, size),
        **fields(row, "memory_min_chips chips"),
        "chips_in_nodes": whole_nodes(row.chips, size),
        "chips_needed": row.chips_needed,
        **fields(row, "work_s finishes_s meets_deadline bound mfu layout=layout_words"),
        "costs": [
            {
                "price_usd_per_chip_hour": price.usd_per_chip_hour,
                "cost_usd": plan.cost_usd(price, row),
                "cost_usd_per_day": cost_usd_per_day(row.chips, price.usd_per_chip_hour),
                "tier": price.tier,
            }
            for price in plan.cluster.prices
        ],
    }


def flat_rows(request: PlanRequest, plan: Plan) -> list[dict[str, Any]]:
    """One record per deadline, with the figures of the run, for tables of many plans."""
    own = "run.params run.active_params run.tokens chip=cluster.chip.name chip_hours"
    return [fields(plan, own) | row for row in report(request, plan)["rows"]]


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
            file = name if name in ("layout", "stops") else "costs"
            module = import_module(f"sabia.core.plan.output.{file}")
            requested[name] = getattr(module, name)(request, plan)
    return requested
