"""The view of failures, preemptions and checkpoints: how often a run stops, what that costs."""

import math
from dataclasses import asdict
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.money.bills import DAY_S, cost_usd, short_money
from sabia.core.plan.money.prices import cheapest
from sabia.core.plan.output.report import fields
from sabia.core.plan.output.table import percent, span
from sabia.core.plan.output.view import VIEWS, View
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest
from sabia.core.plan.stops import failures
from sabia.core.plan.stops.failures import StopForecast, StopModel, StoppedRun, forecast
from sabia.core.plan.stops.simulation import Simulated, Spread, simulate
from sabia.core.units import format_bytes, format_duration


def stopped_run(request: PlanRequest, plan: Plan) -> StoppedRun:
    """The plan's smallest cluster that meets its deadline, with stops as options say."""
    if plan.run.lora and plan.run.adapter_params is None:
        raise UsageError(
            "--lora: the size of the adapters is missing, so checkpoints cannot be planned; give "
            "--lora-rank, as --lora-rank 16"
        )
    model, size, best = stop_model(request.settings), plan.run.checkpoint_bytes, plan.best
    return StoppedRun(model, plan.cluster.chip, best.chips, size, best.finishes_s)


def paid(request: PlanRequest, plan: Plan) -> tuple[float, float]:
    """Chip-seconds that are paid for, and at what share of the price.

    With stops where they were asked about, else the work alone at the whole price.
    """
    if not request.settings.set_values(*VIEWS["stops"]):
        return plan.best.chip_s, 1.0
    run = stopped_run(request, plan)
    return forecast(run).billed_chip_s, _share(run.model)


def paid_by_terms(request: PlanRequest, plan: Plan) -> tuple[float, float]:
    """Chip-seconds that are paid for on preemptible chips, and on chips that are not."""
    if not request.settings.set_values(*VIEWS["stops"]):
        return plan.best.chip_s, plan.best.chip_s
    run = stopped_run(request, plan)
    return forecast(run).billed_chip_s, forecast(failures.without_waits(run, None)).billed_chip_s


def _share(model: StopModel) -> float:
    """By what prices on demand are to be multiplied."""
    return model.spot_share if model.preemption_s else 1.0


def stops(request: PlanRequest, plan: Plan) -> View:
    """The view for the plan's smallest cluster that meets its deadline."""
    run = stopped_run(request, plan)
    model, seen = run.model, forecast(run)
    lines = _lines(model, seen, plan)
    figures = _report(model, seen) | {"wall_meets_deadline": _in_time(seen, plan)}
    if request.settings.simulate:
        process = failures.process_of(run, failures.saving(run))
        drawn = simulate(process, request.settings.simulate, request.settings.seed)
        lines.append(_drawn(drawn))
        figures["simulated"] = asdict(drawn)
    if request.settings.spot and model.preemption_s and plan.cluster.prices:
        words, against = _against_on_demand(request, run, plan)
        lines.append(words)
        figures["spot"] = against
    return View("\n".join(lines), figures)


def stop_model(settings: PlanOptions) -> StopModel:
    """What the settings say about stops; the model's own defaults stand in for the rest."""
    gbps = settings.bucket_gbps
    said: dict[str, Any] = {
        "failures_per_chip_day": settings.failure_rate,
        "preemption_s": settings.preempt,
        "restart_s": settings.restart,
        "bucket_bytes_per_s": None if gbps is None else gbps * 1e9,
        "spot_share": 1.0 if settings.spot else settings.spot_share,
        "capacity_wait_s": settings.capacity_wait,
        "repair_s": settings.repair,
        "spare_nodes": settings.spare_nodes,
        "job_limit_s": settings.job_limit,
        "queue_s": settings.queue,
        "synchronous": settings.synchronous or None,
        "copies": settings.checkpoint_copies,
        "peer_copies": settings.peer_copies or None,
    }
    return StopModel(**{name: value for name, value in said.items() if value is not None})


def _report(model: StopModel, seen: StopForecast) -> dict[str, Any]:
    """Figures by name; a rate that never happens is null."""
    figures = asdict(model) | asdict(seen) | {"wall_over_work": seen.wall_s / seen.work_s}
    return {key: None if value == math.inf else value for key, value in figures.items()}


def _lines(model: StopModel, seen: StopForecast, plan: Plan) -> list[str]:
    preempted = f", a preemption every {span(model.preemption_s)}" if model.preemption_s else ""
    longer = seen.wall_s / seen.work_s - 1
    return [
        f"stops     {seen.chips} chips failing {percent(model.failures_per_chip_day)} a day: "
        f"{_failures(seen)}{preempted}",
        f"save      {format_bytes(seen.checkpoint_bytes)}: {_saved(model, seen)}; {_every(seen)}",
        *_loss(model, seen),
        f"expected  {span(seen.work_s)} of work takes {seen.wall_s / DAY_S:.2f}d "
        f"({longer:+.1%}){_waits(seen)}{_bills(model, seen, plan)}",
        *_late(seen, plan),
    ]


def _in_time(seen: StopForecast, plan: Plan) -> bool:
    return seen.wall_s <= plan.best.deadline_s * (1 + 1e-9)


def _late(seen: StopForecast, plan: Plan) -> list[str]:
    """That stops make the run miss the deadline which its work would meet, and what to ask for."""
    if _in_time(seen, plan):
        return []
    deadline_s = plan.best.deadline_s
    tenth_s = (DAY_S if deadline_s > 2 * DAY_S else 3600) / 10
    sooner_s = math.floor(deadline_s**2 / seen.wall_s / tenth_s) * tenth_s
    mend = f"; --deadline {format_duration(sooner_s)} makes up for them"
    return [
        f"late      with stops {span(seen.wall_s - deadline_s)} after the deadline of "
        f"{format_duration(deadline_s)}{'' if plan.cluster.chips else mend}"
    ]


def _failures(seen: StopForecast) -> str:
    if math.isinf(seen.mean_time_between_failures_s):
        return "no failure"
    return (
        f"one every {span(seen.mean_time_between_failures_s)}, "
        f"{seen.failure_probability:.0%} within {failures.WINDOW_S / DAY_S:.0f} days"
    )


def _loss(model: StopModel, seen: StopForecast) -> list[str]:
    """What one stop costs, how many there are, and what is left; nothing where there are none."""
    if math.isinf(seen.mean_time_between_stops_s):
        return []
    stops = seen.failures + seen.preemptions
    return [
        f"stopped   {stops:.1f} times in the mean, each losing {seen.lost_per_stop_s / 60:.0f} min "
        f"of work and {model.restart_s / 60:.0f} min to start again; {seen.goodput:.0%} of the "
        "time is work"
    ]


def _saved(model: StopModel, seen: StopForecast) -> str:
    if model.synchronous:
        return f"{short_time(seen.offload_s)} to storage, standing still"
    held = f" ({seen.host_copies} copies in host memory)" if seen.host_copies > 1 else ""
    return (
        f"{short_time(seen.offload_s)} to host memory, {short_time(seen.upload_s)} to storage{held}"
    )


def short_time(seconds: float) -> str:
    """40 min, 12 s, 0.3 s."""
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 2 else f"{seconds:.1f} s"


def _every(seen: StopForecast) -> str:
    if math.isinf(seen.mean_time_between_stops_s):
        return "one at the end"
    return f"one every {short_time(seen.interval_s)}"


def _waits(seen: StopForecast) -> str:
    waits = {
        "for capacity": seen.waited_capacity_s,
        "for repairs": seen.waited_repair_s,
        f"in the queue after {seen.cuts:.0f} job limits": seen.waited_queue_s,
    }
    said = [f"{span(seconds)} of waiting {why}" for why, seconds in waits.items() if seconds]
    return f", with {', '.join(said)}" if said else ""


def _bills(model: StopModel, seen: StopForecast, plan: Plan) -> str:
    share = _share(model)
    what = f"preemptible at {percent(share)} of " if share < 1 else ""
    bills = [
        f"{short_money(cost_usd(seen.billed_chip_s, price.usd_per_chip_hour * share))} "
        f"{what}{price.label}"
        for price in plan.cluster.prices
    ]
    return "".join(f", {bill}" for bill in bills)


def _drawn(drawn: Simulated) -> str:
    def days(spread: Spread) -> str:
        middle, late = spread.p50 / DAY_S, spread.p95 / DAY_S
        return f"mean {spread.mean / DAY_S:.2f}d, half by {middle:.2f}d, 95% by {late:.2f}d"

    return (
        f"simulated {drawn.runs:,} runs: {days(drawn.wall_s)}; {drawn.stops.mean:.1f} stops each "
        f"(95% at most {drawn.stops.p95:.0f})"
    )


def _against_on_demand(
    request: PlanRequest, run: StoppedRun, plan: Plan
) -> tuple[str, dict[str, Any]]:
    """Preemptible against on-demand chips at the lowest prices on file of each."""
    spot = min(plan.cluster.prices, key=lambda price: price.usd_per_chip_hour)
    calm = cheapest(plan.cluster.chip.name, request.today)
    if calm is None:
        return "spot      no on-demand price to compare with is on file", {}
    seen = failures.compare(run, spot.usd_per_chip_hour, calm.usd_per_chip_hour)
    even = seen.break_even_preemption_s
    when = "never" if even is None else f"with preemptions more than {span(even)} apart"
    words = (
        f"spot      {short_money(seen.spot_usd)} against {short_money(seen.on_demand_usd)} on "
        f"demand ({calm.label}): {abs(seen.saving):.0%} {'less' if seen.cheaper else 'more'}; "
        f"cheaper {when if even != 0 else 'however often preempted'}"
    )
    return words, {
        **fields(seen, "spot_usd", "on_demand_usd"),
        "break_even_preemption_s": even,
        "saving_share": seen.saving,
    }
