"""One plan as one row, for a comparison of chips and for a list of runs.

Tables, JSON, Parquet and plots of several plans are all made from `summary`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sabia.core.plan.money.bills import short_money
from sabia.core.plan.money.prices import cheapest
from sabia.core.plan.output.report import fields, layout_words
from sabia.core.plan.output.table import columns, span
from sabia.core.plan.output.view import views
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest
from sabia.core.units import format_count

SummaryRow = dict[str, Any]
MOST_BILLS = 3  # columns of a table


def summary(request: PlanRequest, plan: Plan) -> SummaryRow:
    """The plan's smallest cluster that meets its deadline; `costs_usd` by the name of the price.

    Where the options request interruptions, `finishes_s` and the costs include them. Other
    requested views are objects of their own, by name.
    """
    best, run = plan.best, plan.run
    view_reports = {
        name: view.report for name, view in views(request, plan, without=("layout",)).items()
    }
    spot = cheapest(plan.cluster.chip.name, request.today, spot=True)
    return {
        **fields(run, "params", "active_params", "tokens"),
        "sequence_tokens": run.sequence,
        "chip": plan.cluster.chip.name,
        **fields(best, "chips", "mfu"),
        "step_s": best.work_s * run.batch_tokens / run.tokens,
        **fields(best, "work_s", "finishes_s"),
        "chip_hours": best.chip_s / 3600,
        "bound": best.bound,
        "layout": layout_words(best),
        "costs_usd": {p.label.removesuffix("/h"): plan.cost_usd(p) for p in plan.cluster.prices},
        "spot_cost_usd": plan.cost_usd(spot) if spot else None,
        "assumed": list(request.assumed),
        "error": None,
        **view_reports,
    }


def flat(row: SummaryRow) -> SummaryRow:
    """The row for Parquet, with the lowest cost and its price instead of all of them."""
    costs: Mapping[str, float] = row.get("costs_usd") or {}
    least = min(costs, key=lambda name: costs[name], default=None)
    kept = scalars({key: value for key, value in row.items() if key != "costs_usd"})
    return kept | {"cost_usd": None if least is None else costs[least], "cost_at": least}


def scalars(figures: Mapping[str, Any], prefix: str = "") -> SummaryRow:
    """Nested objects as flat columns, without lists."""
    flat_figures: SummaryRow = {}
    for key, value in figures.items():
        if isinstance(value, Mapping):
            flat_figures |= scalars(value, f"{prefix}{key}_")
        elif not isinstance(value, list):
            flat_figures[prefix + key] = value
    return flat_figures


def table(
    first: str, named: Sequence[tuple[str, SummaryRow]], show_model: bool = False
) -> list[str]:
    """Lines of a table; `first`: header of the names. A price that a row does not have is '-'."""
    bills = list(dict.fromkeys(bill for _, row in named for bill in row.get("costs_usd", ())))
    model = ["PARAMS", "TOKENS", "CHIP"] if show_model else []
    prices = list(map(str.upper, bills)) if len(bills) <= MOST_BILLS else ["LEAST", "BY"]
    head = [first, *model, "CHIPS", "MFU", "STEP", "DAYS", *prices, "SPOT", "BOUND BY"]
    body = []
    for name, row in named:
        cells = _cells(row, bills, show_model) if not row["error"] else ["-"] * (len(head) - 1)
        body.append([name, *cells])
    if any("carbon" in row for _, row in named):
        from sabia.core.plan.output.costs import tons

        head.append("CO2E")
        for cells, (_, row) in zip(body, named, strict=True):
            cells.append(tons(row["carbon"]["tons_co2e"]) if "carbon" in row else "-")
    return columns(head, body)


def _cells(row: SummaryRow, bills: Sequence[str], show_model: bool) -> list[str]:
    model = [format_count(row["params"], 2), format_count(row["tokens"]), row["chip"]]
    costs = [_money(row["costs_usd"].get(bill)) for bill in bills]
    if len(bills) > MOST_BILLS:  # only the lowest cost and its price
        least = flat(row)
        costs = [_money(least["cost_usd"]), least["cost_at"] or "-"]
    return [
        *(model if show_model else []),
        f"{row['chips']:,}",
        f"{row['mfu']:.0%}",
        f"{row['step_s']:.3g}s",
        span(row["finishes_s"]),
        *costs,
        _money(row["spot_cost_usd"]),
        row["bound"],
    ]


def _money(usd: float | None) -> str:
    return "-" if usd is None else short_money(usd)
