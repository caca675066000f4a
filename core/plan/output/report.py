"""A plan as JSON: version, inputs, assumptions, and rows, with units in the key names.

New versions may add keys; a changed meaning needs a new SCHEMA_VERSION.

A view: what one group of options adds to a plan, as text and as JSON.

Each view is a function `(request, plan) -> View` with the name of the view; its module is imported
only if one of its options is given. A new view needs a function, a line in VIEWS, and its options.
"""

from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

from sabia.core.options.plan_cluster import PlanStops
from sabia.core.plan.compute import MFU_RANGES, model_kind, whole_nodes
from sabia.core.plan.money.prices import Price, cost_usd_per_day
from sabia.core.plan.planner import DeadlineRow, Plan
from sabia.core.plan.request import PlanRequest

SCHEMA_VERSION = 2  # finishes_s and costs include the interruptions that are planned


def report(request: PlanRequest, plan: Plan) -> dict[str, Any]:
    """The plan as a JSON object."""
    run, cluster = plan.run, plan.cluster
    mfu_range = MFU_RANGES[model_kind(run.params, run.active_params)]
    return {
        "schema_version": SCHEMA_VERSION,
        "inputs": request.settings.set_values(),
        **fields(run, "params", "active_params", "tokens", "train_flops"),
        "flops_per_chip_s": cluster.flops_per_chip_s,
        "chip_hours": plan.chip_hours,
        **fields(run, "state_bytes", "activation_bytes"),
        "total_bytes": run.state_bytes + run.activation_bytes,
        **fields(plan, "state_min_chips", "accumulated_min_chips", "memory_min_chips"),
        **fields(run, "layers", "hidden", "matmul_params"),
        "model_origin": run.origin,
        "attention_flops_share_not_counted": run.attention_share,
        **fields(run, sequence_tokens="sequence", batch_tokens="batch_tokens"),
        "optimizer_steps": run.tokens / run.batch_tokens,
        **fields(run.recipe, state_recipe="name", state_bytes_per_param="bytes_per_param"),
        **fields(run, "lora", "convention", "adapter_params"),
        "mfu": cluster.mfu,
        **fields(mfu_range, mfu_usual_low="low", mfu_usual_high="high"),
        "hbm_bytes": cluster.hbm_bytes,
        "chip": asdict(cluster.chip) | {"date": str(cluster.chip.date)},
        "prices": [_price(price) for price in cluster.prices],
        "no_money": request.refused_price or None,
        "assumed": list(request.assumed),
        "rows": [_row(plan, row) for row in plan.rows],
    }


def fields(one: object, *names: str, **renamed: str) -> dict[str, Any]:
    """Attributes of an object by name; renamed: key=name."""
    named = {name: name for name in names} | renamed
    return {key: getattr(one, name) for key, name in named.items()}


def _price(price: Price) -> dict[str, object]:
    return {
        **fields(price, "usd_per_chip_hour", "tier", "provider", "region", "spot", "commitment"),
        "source": price.source,
        "date": price.date.isoformat() if price.date else None,
    }


def layout_words(row: DeadlineRow) -> str | None:
    """The row's layout as a value for --fixed-layout; None without layouts."""
    if row.layout is None:
        return None
    from sabia.core.plan.device.search_fixes import described

    return described(row.layout.layout)


def _row(plan: Plan, row: DeadlineRow) -> dict[str, object]:
    size = plan.cluster.chip.node_chips
    return {
        **fields(row, "deadline_s", "compute_min_chips"),
        "compute_min_chips_in_nodes": whole_nodes(row.compute_min_chips, size),
        **fields(row, "memory_min_chips", "chips"),
        "chips_in_nodes": whole_nodes(row.chips, size),
        **fields(row, "chips_needed", "work_s", "finishes_s", "meets_deadline", "bound", "mfu"),
        "layout": layout_words(row),
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
    run = plan.run
    own = {
        **fields(run, "params", "active_params", "tokens"),
        "chip": plan.cluster.chip.name,
        "chip_hours": plan.chip_hours,
    }
    return [own | row for row in report(request, plan)["rows"]]


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
