"""Several plans in one table: the same run on other chips, or a list of runs.

The row of a plan that is not possible has the reason; it is an error only if all plans are
impossible. Rows, JSON and text are made from the same summaries.
"""

from collections.abc import Iterable, Iterator
from datetime import date
from typing import Any

from sabia.core.errors import BadData, Infeasible, UsageError
from sabia.core.options.plan_cluster import TRAINING, PlanOptions
from sabia.core.plan.chips import find_chip
from sabia.core.plan.money.bills import short_money
from sabia.core.plan.money.prices import Price
from sabia.core.plan.output import summary
from sabia.core.plan.output.report import SCHEMA_VERSION
from sabia.core.plan.output.table import span
from sabia.core.plan.plans import plan_of
from sabia.core.units import parse_list

# options that are not valid in a list of runs
OF_ONE = ("explain", "emit", "budget", "compare", "offers", "pretrain_args")
Named = list[tuple[str, summary.SummaryRow]]
# of one run: its name or file and line, and its options or why it is none
Changes = tuple[str, dict[str, Any] | BadData]
Priced = tuple[Named, tuple[Price, ...]]  # rows, and every price in them


def compared(settings: PlanOptions, today: date) -> Priced:
    """A summary of the run on each chip of `--compare`. Raises UsageError on unknown chips."""
    listed = parse_list(settings.compare or "", str, "--compare")
    names = [find_chip(name, "--compare").name for name in listed]
    if len(set(names)) < len(names):
        raise UsageError(f"--compare: {settings.compare} (expected each chip once)")
    on_chips = ((name, {"chip": name, "compare": None}) for name in names)
    return _summaries(settings, on_chips, today)


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
            own = settings.changed(**changes)
            request, plan = plan_of(own, priced=False, today=today)
            prices |= dict.fromkeys(plan.cluster.prices)
            rows.append((name, summary.summary(request, plan)))
        except (UsageError, Infeasible, BadData) as error:
            errors.append(error)
            rows.append((name, {"error": str(error)}))
    if errors and len(errors) == len(rows):
        raise errors[0]
    return rows, tuple(prices)


def text(first: str, named: Named, show_model: bool) -> str:
    """The table, the reasons of impossible plans, and which is fastest and cheapest."""
    lines = summary.table(first, named, show_model)
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
    return (
        [f"{count} of {len(named)} rows have no plan; the error of each is in it"] if count else []
    )


def report(settings: PlanOptions, named: Named) -> dict[str, object]:
    """The table as a JSON object."""
    return {
        "schema_version": SCHEMA_VERSION,
        "inputs": settings.set_values(),
        "rows": [{"name": name} | row for name, row in named],
    }


def flat_rows(named: Named) -> list[dict[str, Any]]:
    """One record per plan; impossible ones have only a name and an error."""
    keys = dict.fromkeys(key for _, row in named for key in summary.flat(row))
    return [{"name": name} | dict.fromkeys(keys) | summary.flat(row) for name, row in named]
