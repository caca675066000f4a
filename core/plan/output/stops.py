"""The view of failures, preemptions and checkpoints: how often a run stops, what that costs."""

import math
from dataclasses import asdict

from sabia.core.errors import UsageError
from sabia.core.plan.money.bills import DAY_S, short_money
from sabia.core.plan.output.table import percent, span
from sabia.core.plan.output.view import View
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import Request
from sabia.core.plan.settings import Settings
from sabia.core.plan.stops.failures import WINDOW_S, StopForecast, StopModel, forecast
from sabia.core.units import format_bytes


def see(asked: Request, plan: Plan) -> View:
    """The view for the plan's smallest cluster that meets its deadline."""
    if plan.run.lora:
        raise UsageError("--lora: the adapters' size is unknown, so saves cannot be planned")
    model, best = _model(asked.settings), plan.best
    saved = plan.run.params * plan.run.recipe.durable
    seen = forecast(model, plan.cluster.chip, best.chips, saved, best.finishes_s)
    return View(_text(model, seen, plan), _report(model, seen))


def _model(settings: Settings) -> StopModel:
    gbps = settings.bucket_gbps
    said = {
        "failures_per_chip_day": settings.failure_rate,
        "preemption_s": settings.preempt,
        "restart_s": settings.restart,
        "bucket_bytes_per_s": None if gbps is None else gbps * 1e9,
        "spot_share": settings.spot_share,
    }
    return StopModel(**{name: value for name, value in said.items() if value is not None})


def _report(model: StopModel, seen: StopForecast) -> dict[str, object]:
    """Figures by name; a rate that never happens is null."""
    figures = asdict(model) | asdict(seen) | {"wall_over_work": seen.wall_s / seen.work_s}
    return {key: None if value == math.inf else value for key, value in figures.items()}


def _text(model: StopModel, forecast: StopForecast, plan: Plan) -> str:
    preempted = f", a preemption every {span(model.preemption_s)}" if model.preemption_s else ""
    longer = forecast.wall_s / forecast.work_s - 1
    lines = [
        f"stops     {forecast.chips} chips failing {percent(model.failures_per_chip_day)} a day: "
        f"{_failures(forecast)}{preempted}",
        f"save      {format_bytes(forecast.checkpoint_bytes)}: {forecast.offload_s:.0f} s to host "
        f"memory, {forecast.upload_s / 60:.0f} min to storage; {_every(forecast)}",
        f"expected  {span(forecast.work_s)} of work takes {forecast.wall_s / DAY_S:.2f}d "
        f"({longer:+.1%}), {_bills(model, forecast, plan)}",
    ]
    return "\n".join(lines)


def _failures(forecast: StopForecast) -> str:
    if math.isinf(forecast.mean_time_between_failures_s):
        return "no failure"
    return (
        f"one every {span(forecast.mean_time_between_failures_s)}, "
        f"{forecast.failure_probability:.0%} within {WINDOW_S / DAY_S:.0f} days"
    )


def _every(forecast: StopForecast) -> str:
    if math.isinf(forecast.mean_time_between_stops_s):
        return "one at the end"
    return f"one every {forecast.interval_s / 60:.0f} min"


def _bills(model: StopModel, forecast: StopForecast, plan: Plan) -> str:
    longer = forecast.wall_s / forecast.work_s
    share = model.spot_share if model.preemption_s else 1.0
    what = f"preemptible at {percent(share)} of " if model.preemption_s else ""
    bills = [
        f"{short_money(plan.cost_usd(price) * longer * share)} {what}{price.label}"
        for price in plan.cluster.prices
    ]
    return ", ".join(bills)
