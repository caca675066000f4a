"""What one call of the planner gives back: text, JSON, rows, and remarks, from plain settings.

Two questions are answered: one run on one kind of chip (with or without the view of stops),
and the budget of a pyramid of runs. Settings that are None were not given.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan import compute, planner, request
from sabia.core.plan.chips import find_chip
from sabia.core.plan.counting.counts import count_model
from sabia.core.plan.money import budget
from sabia.core.plan.money.prices import default_prices
from sabia.core.plan.output import remarks, report, table
from sabia.core.plan.stops.failures import StopForecast, StopModel, forecast


@dataclass(frozen=True)
class Answer:
    """One answer in every form it can be asked for."""

    text: str
    report: dict[str, Any]
    rows: list[dict[str, Any]]
    notes: list[str]
    warnings: list[str]


def of_run(
    model: str | None,
    counts: Mapping[str, Any],
    settings: Mapping[str, Any],
    stops: Mapping[str, float | None],
    today: date | None = None,
) -> Answer:
    """Plan a run: `counts` go to request.given_counts, `settings` to request.build.

    `stops` are fields of StopModel; if any is given the view of stops is added.
    Raises UsageError, Infeasible, BadData.
    """
    asked = request.build(_counts(model, counts, settings.get("sequence")), **settings)
    plan = planner.plan(asked.run, asked.cluster, asked.deadlines_s)
    text, figures = table.render(asked, plan), report.report(asked, plan)
    if any(value is not None for value in stops.values()):
        stop_model = StopModel(**{k: v for k, v in stops.items() if v is not None})
        seen = _stops(plan, stop_model)
        text += "\n" + table.render_stops(stop_model, seen, plan)
        figures["stops"] = report.stops_report(stop_model, seen)
    return Answer(
        text=text,
        report=figures,
        rows=report.flat_rows(asked, plan),
        notes=remarks.notes(asked, plan),
        warnings=remarks.warnings(plan, today or date.today()),
    )


def _stops(plan: planner.Plan, stop_model: StopModel) -> StopForecast:
    """The forecast for the plan's smallest cluster."""
    if plan.run.lora:
        raise UsageError("--lora: the adapters' size is unknown, so saves cannot be planned")
    saved, chips = plan.run.params * plan.run.recipe.durable, plan.best.chips
    return forecast(stop_model, plan.cluster.chip, chips, saved, plan.work_chip_s / chips)


def _counts(model: str | None, counts: Mapping[str, Any], sequence: int | None) -> request.Counts:
    if model is None:
        return request.given_counts(**counts)
    given = [name for name, value in counts.items() if value is not None]
    if given:
        raise UsageError(f"--model: counts everything itself; leave out --{given[0]}")
    return count_model(model, sequence or request.DEFAULT_SEQUENCE)


def of_budget(
    path: str,
    refused: Mapping[str, Any],
    *,
    chip: str | None,
    mfu: float | None,
    prices: str | None,
    lora: bool,
    today: date | None = None,
) -> Answer:
    """Sum up a pyramid. `refused` are settings of a single run, which must not be given."""
    for name, value in refused.items():
        if value is not None:
            raise UsageError(f"--budget: sums up runs; {name.replace('_', ' ')} belongs to one run")
    found = find_chip(chip or request.DEFAULT_CHIP)
    rate = found.bf16_flops_per_s * (compute.DEFAULT_MFU if mfu is None else mfu)

    def hours_of(_params: float, active: float, tokens: float) -> float:
        return compute.chip_seconds(compute.train_flops(active, tokens, lora), rate) / 3600

    own = request.own_prices(prices) if prices else ()
    if len(own) > 1:
        raise UsageError(f"--price: {prices} (expected one price with --budget)")
    pyramid = budget.load_budget(
        path, hours_of, own[0] if own else None, lambda: default_prices(found.name)[0]
    )
    return Answer(
        text=budget.render(pyramid),
        report=budget.report(pyramid),
        rows=budget.flat_rows(pyramid),
        notes=[],
        warnings=remarks.stale_lines((pyramid.price,), today or date.today()),
    )
