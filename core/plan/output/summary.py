"""One plan in one row: what a comparison of chips and a list of runs both show.

`summary` is the only place where a plan becomes a row; tables, JSON, Parquet and plots of several
plans are made from it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sabia.core.plan.money.bills import short_money
from sabia.core.plan.money.prices import Price, cheapest
from sabia.core.plan.output.table import columns, span
from sabia.core.plan.planner import Plan
from sabia.core.plan.planner import Row as Deadline
from sabia.core.plan.request import Request
from sabia.core.units import format_count

Row = dict[str, Any]
MOST_BILLS = 3  # columns of a table


@dataclass(frozen=True)
class Failed:
    """Why one of several plans cannot be made."""

    error: str

    @property
    def row(self) -> Row:
        """The row in place of a summary's."""
        return {"error": self.error}


def summary(asked: Request, plan: Plan) -> Row:
    """The plan's smallest cluster that meets its deadline; `costs_usd` by the name of the price."""
    best, run = plan.best, plan.run
    spot = cheapest(plan.cluster.chip.name, asked.today, spot=True)
    return {
        "params": run.params,
        "active_params": run.active_params,
        "tokens": run.tokens,
        "sequence_tokens": run.sequence,
        "chip": plan.cluster.chip.name,
        "chips": best.chips,
        "mfu": best.mfu,
        "step_s": best.finishes_s * run.batch_tokens / run.tokens,
        "finishes_s": best.finishes_s,
        "chip_hours": best.chip_s / 3600,
        "bound": best.bound,
        "layout": _layout(best),
        "costs_usd": {_name(p): plan.cost_usd(p, best) for p in plan.cluster.prices},
        "spot_cost_usd": plan.cost_usd(spot, best) if spot else None,
        "error": None,
    }


def _layout(best: Deadline) -> str | None:
    if best.layout is None:
        return None
    from sabia.core.plan.device.search_fixes import described

    return described(best.layout.layout)


def _name(price: Price) -> str:
    return price.label.removesuffix("/h")


def flat(row: Row) -> Row:
    """The row for Parquet: the lowest bill and whose it is in place of all of them."""
    costs: Mapping[str, float] = row.get("costs_usd") or {}
    least = min(costs, key=lambda name: costs[name], default=None)
    kept = {key: value for key, value in row.items() if key != "costs_usd"}
    return kept | {"cost_usd": None if least is None else costs[least], "cost_at": least}


def table(first: str, named: Sequence[tuple[str, Row]], show_model: bool = False) -> list[str]:
    """Lines of a table; `first` heads the column of names. A price that a row lacks is '-'."""
    bills = list(dict.fromkeys(bill for _, row in named for bill in row.get("costs_usd", ())))
    model = ["PARAMS", "TOKENS", "CHIP"] if show_model else []
    prices = list(map(str.upper, bills)) if len(bills) <= MOST_BILLS else ["LEAST", "BY"]
    head = [first, *model, "CHIPS", "MFU", "STEP", "DAYS", *prices, "SPOT", "BOUND BY"]
    body = [[name, *_cells(row, bills, show_model, len(head) - 1)] for name, row in named]
    return columns(head, body)


def _cells(row: Row, bills: Sequence[str], show_model: bool, width: int) -> list[str]:
    if row["error"]:
        return ["-"] * width
    model = [format_count(row["params"], 2), format_count(row["tokens"]), row["chip"]]
    return [
        *(model if show_model else []),
        f"{row['chips']:,}",
        f"{row['mfu']:.0%}",
        f"{row['step_s']:.3g}s",
        span(row["finishes_s"]),
        *_bills(row, bills),
        _money(row["spot_cost_usd"]),
        row["bound"],
    ]


def _bills(row: Row, bills: Sequence[str]) -> list[str]:
    """A cell for each price; where they are many, the lowest bill and whose it is."""
    if len(bills) <= MOST_BILLS:
        return [_money(row["costs_usd"].get(bill)) for bill in bills]
    least = flat(row)
    return [_money(least["cost_usd"]), least["cost_at"] or "-"]


def _money(usd: float | None) -> str:
    return "-" if usd is None else short_money(usd)
