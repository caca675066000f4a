"""Several plans in one table: the same run on other chips, or a list of runs.

The row of a plan that is not possible has the reason; it is an error only if all plans are
impossible. Rows, JSON and text are made from the same summaries.

One plan as one row, for a comparison of chips and for a list of runs.

Tables, JSON, Parquet and plots of several plans are all made from `summary`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from typing import Any

from sabia.core.errors import BadData, Infeasible, UsageError
from sabia.core.options.plan_cluster import TRAINING, PlanOptions
from sabia.core.plan.chips import find_chip
from sabia.core.plan.money.prices import Price, cheapest, short_money
from sabia.core.plan.output.report import SCHEMA_VERSION, fields, views
from sabia.core.plan.output.table import Cell, columns, span, texts_of, tons
from sabia.core.plan.placed import plan_of
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest
from sabia.core.units import parse_list

SummaryRow = dict[str, Any]
MOST_BILLS = 3  # columns of a table


def summary(request: PlanRequest, plan: Plan) -> SummaryRow:
    """The plan's smallest cluster that meets its deadline; `costs_usd` by the name of the price.

    Where the options request interruptions, `finishes_s` and the costs include them. Other
    requested views are objects of their own, by name.
    """
    best, run = plan.best, plan.run
    requested = views(request, plan, without=("layout",))
    spot = cheapest(plan.cluster.chip.name, request.today, spot=True)
    return {
        **fields(plan, "run.params run.active_params run.tokens sequence_tokens=run.sequence"),
        **fields(plan, "chip=cluster.chip.name best.chips best.mfu"),
        "step_s": best.work_s * run.batch_tokens / run.tokens,
        **fields(best, "work_s finishes_s"),
        "chip_hours": best.chip_s / 3600,
        **fields(best, "bound layout=layout_words"),
        "costs_usd": {p.label.removesuffix("/h"): plan.cost_usd(p) for p in plan.cluster.prices},
        "spot_cost_usd": plan.cost_usd(spot) if spot else None,
        "assumed": list(request.assumed),
        "error": None,
        **{name: view.report for name, view in requested.items()},
    }


def flat(row: Mapping[str, Any]) -> SummaryRow:
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


MODEL: dict[str, Cell] = {"PARAMS": "{params:count2}", "TOKENS": "{tokens:count}", "CHIP": "{chip}"}
FIGURES: dict[str, Cell] = {
    "CHIPS": "{chips:,}",
    "MFU": "{mfu:.0%}",
    "STEP": "{step_s:.3g}s",
    "DAYS": "{finishes_s:span}",
}
LEAST: dict[str, Cell] = {
    "LEAST": lambda row: _money(flat(row)["cost_usd"]),
    "BY": lambda row: flat(row)["cost_at"] or "-",
}
BOUND: dict[str, Cell] = {"SPOT": lambda row: _money(row["spot_cost_usd"]), "BOUND BY": "{bound}"}


def table(first: str, named: Sequence[tuple[str, SummaryRow]], show_model: bool) -> list[str]:
    """Lines of a table; `first`: header of the names. A price that a row does not have is '-'."""
    bills = dict.fromkeys(bill for _, row in named for bill in row.get("costs_usd", ()))
    costs: dict[str, Cell] = {bill.upper(): partial(_cost, bill) for bill in bills}
    cells = (MODEL if show_model else {}) | FIGURES
    cells |= (costs if len(bills) <= MOST_BILLS else LEAST) | BOUND
    if any("carbon" in row for _, row in named):
        cells["CO2E"] = lambda row: tons(row["carbon"]["tons_co2e"]) if "carbon" in row else "-"
    body = [[name, *texts_of(cells, row if not row["error"] else None)] for name, row in named]
    return columns([first, *cells], body)


def _cost(bill: str, row: Mapping[str, Any]) -> str:
    return _money(row["costs_usd"].get(bill))


def _money(usd: float | None) -> str:
    return "-" if usd is None else short_money(usd)


# options that are not valid in a list of runs
OF_ONE = ("explain", "emit", "budget", "compare", "offers", "pretrain_args")
Named = list[tuple[str, SummaryRow]]
# of one run: its name or file and line, and its options or why it is none
Changes = tuple[str, dict[str, Any] | BadData]
Priced = tuple[Named, tuple[Price, ...]]  # rows, and every price in them


def compared(settings: PlanOptions, today: date) -> Priced:
    """A summary of the run on each chip of `--compare`. Raises UsageError on unknown chips."""
    listed = parse_list(settings.compare or "", str, "--compare")
    names = [find_chip(name, "--compare").name for name in listed]
    if len(set(names)) < len(names):
        raise UsageError(f"--compare: {settings.compare} (expected each chip once)")
    return _summaries(settings, ((name, {"chip": name, "compare": None}) for name in names), today)


def listed(settings: PlanOptions, rows: Iterable[Changes], today: date) -> Priced:
    """A summary of each run of a list, with `settings` for options that a row does not have."""
    for name in settings.set_values(*OF_ONE):
        raise UsageError(f"{settings.table[name].flag}: not together with a list of runs")
    return _summaries(settings, _of_rows(rows), today)


def _of_rows(rows: Iterable[Changes]) -> Iterator[Changes]:
    for where, row in rows:
        if isinstance(row, BadData):
            yield where, row
            continue
        try:
            name, values = str(row.get("name", where)), PlanOptions.read_row(row, without=OF_ONE)
        except UsageError as error:
            yield where, BadData(f"run {where}: {error}")
            continue
        printable = "".join(letter if letter.isprintable() else " " for letter in name)
        yield printable, values | {"inputs": ()}


def _summaries(settings: PlanOptions, runs: Iterable[Changes], today: date) -> Priced:
    rows, errors, prices = [], [], dict[Price, None]()
    for name, changes in runs:
        try:
            if isinstance(changes, BadData):
                raise changes
            stage = changes.get("stage", settings.stage)
            if not TRAINING.holds({"stage": stage}):
                raise UsageError(f"--stage: {stage} is not possible in a table (expected alone)")
            request, plan = plan_of(settings.changed(**changes), priced=False, today=today)
            prices |= dict.fromkeys(plan.cluster.prices)
            rows.append((name, summary(request, plan)))
        except (UsageError, Infeasible, BadData) as error:
            errors.append(error)
            rows.append((name, {"error": str(error)}))
    if errors and len(errors) == len(rows):
        raise errors[0]
    return rows, tuple(prices)


def text(first: str, named: Named, show_model: bool) -> str:
    """The table, the reasons of impossible plans, and which is fastest and cheapest."""
    lines = table(first, named, show_model)
    lines += [f"{name}: {row['error']}" for name, row in named if row["error"]]
    if not show_model:
        lines.append(f"verdict   {_verdict([(n, row) for n, row in named if not row['error']])}")
    return "\n".join(lines)


def _verdict(named: Named) -> str:
    name, row = min(named, key=lambda pair: pair[1]["finishes_s"])
    words = [f"fastest on {row['chips']} {name.upper()}, {span(row['finishes_s'])}"]
    bills = [(usd, at, name) for name, row in named for at, usd in row["costs_usd"].items()]
    if bills:
        usd, at, name = min(bills)
        words.append(f"cheapest on {name.upper()}, {short_money(usd)} ({at})")
    spots = [(row["spot_cost_usd"], name) for name, row in named if row["spot_cost_usd"]]
    if spots:
        usd, name = min(spots)
        words.append(f"preemptible on {name.upper()}, {short_money(usd)} without interruptions")
    return "; ".join(words) + "."


def rejected(named: Named) -> list[str]:
    """A line with the number of rows without a plan, if there are any."""
    count = sum(bool(row["error"]) for _, row in named)
    return [f"{count} of {len(named)} rows have no plan; the error of each is in it"] * (count > 0)


def report(settings: PlanOptions, named: Named) -> dict[str, object]:
    """The table as a JSON object."""
    return {
        "schema_version": SCHEMA_VERSION,
        "inputs": settings.set_values(),
        "rows": [{"name": name} | row for name, row in named],
    }


def flat_rows(named: Named) -> list[dict[str, Any]]:
    """One record per plan; impossible ones have only a name and an error."""
    keys = dict.fromkeys(key for _, row in named for key in flat(row))
    return [{"name": name} | dict.fromkeys(keys) | flat(row) for name, row in named]
