"""The view of failures, preemptions and checkpoints: their number, and their time and cost."""

import math
from dataclasses import asdict
from typing import Any

from sabia.core.plan.money.prices import DAY_S, cheapest, short_money
from sabia.core.plan.output.report import View, fields
from sabia.core.plan.output.table import percent, span
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest
from sabia.core.plan.stops import failures
from sabia.core.plan.stops.failures import StopForecast, StopModel, StoppedRun
from sabia.core.plan.stops.simulation import simulate
from sabia.core.units import format_bytes


def stops(request: PlanRequest, plan: Plan) -> View:
    """The view for the plan's smallest cluster that meets its deadline."""
    cluster, best = plan.cluster, plan.best
    model, expected = cluster.stops, best.expected
    assert model is not None and expected is not None
    size = plan.run.checkpoint_bytes
    run = StoppedRun(model, cluster.chip, best.chips, size, best.work_s)
    lines = _lines(model, expected, plan)
    figures = asdict(model) | asdict(expected) | fields(expected, "wall_s", "billed_s", "goodput")
    figures["wall_over_work"] = expected.wall_s / expected.work_s
    figures = {key: None if value == math.inf else value for key, value in figures.items()}
    if request.settings.simulate:
        process = failures.process_of(run, failures.saving(run))
        simulated = simulate(process, request.settings.simulate, request.settings.seed)
        wall, interruptions = simulated.wall_s, simulated.stops
        lines.append(
            f"simulated {simulated.runs:,} runs: mean {wall.mean / DAY_S:.2f}d, half by "
            f"{wall.p50 / DAY_S:.2f}d, 95% by {wall.p95 / DAY_S:.2f}d; {interruptions.mean:.1f} "
            f"interruptions each (95% at most {interruptions.p95:.0f})"
        )
        figures["simulated"] = asdict(simulated)
    if request.settings.spot and model.preemption_s and cluster.prices:
        line, comparison = _against_on_demand(request, run, plan)
        lines.append(line)
        figures["spot"] = comparison
    return View("\n".join(lines), figures)


def _lines(model: StopModel, expected: StopForecast, plan: Plan) -> list[str]:
    rate = "no failure"
    if not math.isinf(expected.mean_time_between_failures_s):
        rate = (
            f"one every {span(expected.mean_time_between_failures_s)}, "
            f"{expected.failure_probability:.0%} within {failures.WINDOW_S / DAY_S:.0f} days"
        )
    copies = expected.host_copies
    save = (
        f"{short_time(expected.offload_s)} of blocking, {short_time(expected.upload_s)} to "
        f"storage{f' ({copies} copies in host memory)' if copies > 1 else ''}"
    )
    if model.synchronous:
        save = f"{short_time(expected.offload_s)} to storage, blocking"
    preempted = f", a preemption every {span(model.preemption_s)}" if model.preemption_s else ""
    interval, losses = "one at the end", []
    if not math.isinf(expected.mean_time_between_stops_s):
        interval = f"one every {short_time(expected.interval_s)}"
        count = expected.failures + expected.preemptions
        losses = [
            f"losses    {count:.1f} interruptions on average, each loses "
            f"{expected.lost_per_stop_s / 60:.0f} min of work and {model.restart_s / 60:.0f} min "
            f"to restart; {expected.goodput:.0%} of the time is work"
        ]
    waits = {
        "for capacity": expected.waited_capacity_s,
        "for repairs": expected.waited_repair_s,
        f"in the queue after {expected.cuts:.0f} job limits": expected.waited_queue_s,
    }
    waiting = ", ".join(f"{span(s)} of waiting {why}" for why, s in waits.items() if s)
    waiting = f", with {waiting}" if waiting else ""
    bills = "".join(
        f", {short_money(plan.cost_usd(price))} {price.label}" for price in plan.cluster.prices
    )
    return [
        f"failures  {expected.chips} chips failing {percent(model.failures_per_chip_day)} a day: "
        f"{rate}{preempted}",
        f"save      {format_bytes(expected.checkpoint_bytes)}: {save}; {interval}",
        *losses,
        f"expected  {span(expected.work_s)} of work takes {expected.wall_s / DAY_S:.2f}d "
        f"({expected.wall_s / expected.work_s - 1:+.1%}){waiting}{bills}",
    ]


def short_time(seconds: float) -> str:
    """40 min, 12 s, 0.3 s."""
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 2 else f"{seconds:.1f} s"


def _against_on_demand(
    request: PlanRequest, run: StoppedRun, plan: Plan
) -> tuple[str, dict[str, Any]]:
    """Preemptible and on-demand chips, each at its lowest price on file."""
    spot = min(plan.cluster.prices, key=lambda price: price.usd_per_chip_hour)
    on_demand = cheapest(plan.cluster.chip.name, request.today)
    if on_demand is None:
        return "spot      no on-demand price to compare with is on file", {}
    compared = failures.compare(run, spot.usd_per_chip_hour, on_demand.usd_per_chip_hour)
    even = compared.break_even_preemption_s
    when = "never" if even is None else f"with preemptions more than {span(even)} apart"
    words = (
        f"spot      {short_money(compared.spot_usd)} versus {short_money(compared.on_demand_usd)} "
        f"on demand ({on_demand.label}): {abs(compared.saving):.0%} "
        f"{'less' if compared.cheaper else 'more'}; cheaper "
        f"{when if even != 0 else 'at any rate of preemptions'}"
    )
    return words, {
        **fields(compared, "spot_usd", "on_demand_usd"),
        "break_even_preemption_s": even,
        "saving_share": compared.saving,
    }
