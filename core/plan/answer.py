"""One call of the planner: from its options to text, JSON, rows, notes, warnings and charts.

It plans one run on one kind of chip, with the views that its options request, compares several
plans, or adds up the budget of a list of runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from importlib import import_module
from typing import Any

from sabia.core.errors import Infeasible, UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.output import remarks, report, several, table
from sabia.core.plan.output.report import views
from sabia.core.plan.placed import plan_of
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest, build

# stage that is no training run → its function in output/generation.py
STAGES = {"serve": "serve", "grpo": "grpo", "eval": "evaluate"}


@dataclass(frozen=True)
class PlanOutput:
    """The output of one call in every form."""

    text: str
    report: dict[str, Any]
    rows: list[dict[str, Any]]
    warnings: list[str]
    notes: list[str] = field(default_factory=list)
    charts: Callable[[], list[str]] = list


def answer(settings: PlanOptions, today: date | None = None, *, beside: bool = False) -> PlanOutput:
    """Plan what `settings` request. Raises UsageError, Infeasible, BadData.

    beside: a plan of one run at a given MFU ends with what the search of layouts finds.
    """
    today = today or date.today()
    if settings.plot:
        _plots().check_form(settings.plot)
    if settings.inputs:
        return _of_inputs(settings, today, beside)
    if not settings.trains:
        return _of_stage(settings, today)
    if settings.budget:
        from sabia.core.plan.output import budget

        items = budget.budget_of(settings, today)
        rows, stale = budget.flat_rows(items), remarks.stale_lines(items.prices, today)
        return PlanOutput(
            budget.text(items), budget.report(items), rows, stale,
            charts=lambda: _plots().of_rows(rows, "name", "cost_usd", "Budget"),
        )  # fmt: skip
    if settings.asks_size:
        from sabia.core.plan.output import size

        sized = size.SizeAnswer(settings, today)
        stale = remarks.stale_lines(sized.request.cluster.prices, today)
        return PlanOutput(sized.text(), sized.report(), sized.flat_rows(), stale)
    if settings.compare:
        return _of_several(settings, "CHIP", several.compared(settings, today), today)
    return _of_run(settings, today, beside)


def _of_inputs(settings: PlanOptions, today: date, beside: bool) -> PlanOutput:
    models = [path for path in settings.inputs if path not in settings.runs]
    if models and (len(settings.inputs) > 1 or settings.model):
        raise UsageError(f"{models[0]}: one config.json at a time (several go into a list of runs)")
    if models:
        return answer(settings.changed(model=models[0], inputs=()), today, beside=beside)
    from sabia.core.plan.runs import read_runs

    rows = (run for path in settings.runs for run in read_runs(path))
    return _of_several(settings, "RUN", several.listed(settings, rows, today), today)


def _of_several(settings: PlanOptions, head: str, both: several.Priced, today: date) -> PlanOutput:
    named, prices = both
    return PlanOutput(
        text=several.text(head, named, head == "RUN"),
        report=several.report(settings, named),
        rows=several.flat_rows(named),
        warnings=[*several.rejected(named), *remarks.stale_lines(prices, today)],
        charts=lambda: _plots().of_several(named),
    )


def _plots() -> Any:
    """The module of charts, imported for `--plot` only."""
    return import_module("sabia.core.plan.output.plots")


def _of_run(settings: PlanOptions, today: date, beside: bool) -> PlanOutput:
    """Plan one run; with `--emit` its launch script alone on stdout, and the verdict as a note."""
    request, plan = plan_of(settings, today=today)
    shown_views, whole = views(request, plan), report.report(request, plan)
    rows, warnings = report.flat_rows(request, plan), remarks.warnings(request, plan, today)
    if settings.emit:
        script = import_module("sabia.core.plan.output.launch").script(request, plan)
        body = script.rstrip("\n"), whole | {"script": script}
        return PlanOutput(*body, rows, warnings, notes=[table.verdict(plan)])
    if beside and not plan.problem:
        shown_views["search"] = search_beside(request, plan)
    texts = [table.render(request, plan), *(view.text for view in shown_views.values())]
    whole |= {name: view.report for name, view in shown_views.items()}
    notes, charts = remarks.notes(request, plan), lambda: _plots().of_plan(request, plan)
    return PlanOutput("\n".join(texts), whole, rows, warnings, notes, charts)


def _of_stage(settings: PlanOptions, today: date) -> PlanOutput:
    """Serving, GRPO steps, or an evaluation of the model."""
    from sabia.core.plan.output import generation

    request = build(settings, today=today)
    stage = settings.stage or ""
    shown_views = getattr(generation, STAGES[stage])(request)
    given = settings.set_values()
    inputs = {"schema_version": report.SCHEMA_VERSION, "stage": stage, "inputs": given}
    row = {"stage": stage, "chip": request.cluster.chip.name} | shown_views.report
    rows, stale = [several.scalars(row)], remarks.stale_lines(request.cluster.prices, today)
    return PlanOutput(shown_views.text, inputs | shown_views.report, rows, stale)


MOST_WORDS = 200  # characters of a reason


def search_beside(request: PlanRequest, plan: Plan) -> report.View:
    """The lines and the object `search` of a plan that has no layouts."""
    settings, cluster = request.settings, plan.cluster
    basis = table.words("basis", mfu=cluster.mfu)
    try:
        if settings.lora and settings.lora_rank is None:
            raise UsageError("--lora: layouts need the size of the adapters; give --lora-rank")
        own = settings.changed(search=True, mfu=None, plot=None)
        plans = plan_of(own, priced=False, today=request.today)[1]
    except (UsageError, Infeasible) as error:
        words = str(error)
        words = words if len(words) <= MOST_WORDS else words[: MOST_WORDS - 1] + "…"
        return report.View(f"{basis}\nsearch    finds none: {words}", {"error": str(error)})
    figures = {
        **report.fields(plans.best, "deadline_s chips work_s finishes_s mfu layout=layout_words"),
        "costs_usd": [plans.cost_usd(price) for price in plans.cluster.prices],
        "error": None,
    }
    line = f"search    {table.verdict(plans)} --search shows the layouts."
    return report.View(f"{basis}\n{line}", figures)
