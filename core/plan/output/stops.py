"""The view of failures, preemptions and checkpoints: their number, and their time and cost."""

import math
from dataclasses import asdict

from sabia.core.plan.money.prices import DAY_S, cheapest, short_money
from sabia.core.plan.output.report import View, fields
from sabia.core.plan.output.table import short_time, span, words
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest
from sabia.core.plan.stops import failures
from sabia.core.plan.stops.failures import StopForecast, StopModel, StoppedRun
from sabia.core.plan.stops.simulation import simulate


def stops(request: PlanRequest, plan: Plan) -> View:
    """The view for the plan's smallest cluster that meets its deadline."""
    cluster, best = plan.cluster, plan.best
    model, expected = cluster.stops, best.expected
    assert model is not None and expected is not None
    run = StoppedRun(model, cluster.chip, best.chips, plan.run.checkpoint_bytes, best.work_s)
    lines = _lines(model, expected, plan)
    figures = asdict(model) | asdict(expected) | fields(expected, "wall_s billed_s goodput")
    figures["wall_over_work"] = expected.wall_s / expected.work_s
    figures = {key: None if value == math.inf else value for key, value in figures.items()}
    if request.settings.simulate:
        process = failures.process_of(run, failures.saving(run))
        simulated = simulate(process, request.settings.simulate, request.settings.seed)
        lines.append(words("simulated", vars(simulated)))
        figures["simulated"] = asdict(simulated)
    if request.settings.spot and model.preemption_s and cluster.prices:
        compared = _against_on_demand(request, run, plan)
        lines.append(compared.text)
        figures["spot"] = compared.report
    return View("\n".join(lines), figures)


def _lines(model: StopModel, expected: StopForecast, plan: Plan) -> list[str]:
    both = {"model": model, "expected": expected}
    rate = "no failure"
    if not math.isinf(expected.mean_time_between_failures_s):
        rate = words("failure_rate", both, window_d=failures.WINDOW_S / DAY_S)
    copies = expected.host_copies
    held = f" ({copies} copies in host memory)" if copies > 1 else ""
    save = words("save_blocking" if model.synchronous else "save_behind", both, copies=held)
    preempted = f", a preemption every {span(model.preemption_s)}" if model.preemption_s else ""
    interval, losses = "one at the end", []
    if not math.isinf(expected.mean_time_between_stops_s):
        interval = f"one every {short_time(expected.interval_s)}"
        losses = [words("losses", both, count=expected.failures + expected.preemptions)]
    waits = {
        "for capacity": expected.waited_capacity_s,
        "for repairs": expected.waited_repair_s,
        f"in the queue after {expected.cuts:.0f} job limits": expected.waited_queue_s,
    }
    waiting = ", ".join(f"{span(s)} of waiting {why}" for why, s in waits.items() if s)
    bills = "".join(f", {short_money(plan.cost_usd(p))} {p.label}" for p in plan.cluster.prices)
    after = {"waiting": f", with {waiting}" if waiting else "", "bills": bills}
    return [
        words("failures", both, rate=rate, preempted=preempted),
        words("save", both, how=save, interval=interval),
        *losses,
        words("expected", both | after, more=expected.wall_s / expected.work_s - 1),
    ]


def _against_on_demand(request: PlanRequest, run: StoppedRun, plan: Plan) -> View:
    """Preemptible and on-demand chips, each at its lowest price on file."""
    spot = min(plan.cluster.prices, key=lambda price: price.usd_per_chip_hour)
    on_demand = cheapest(plan.cluster.chip.name, request.today)
    if on_demand is None:
        return View(words("spot_alone"))
    compared = failures.compare(run, spot.usd_per_chip_hour, on_demand.usd_per_chip_hour)
    even = compared.break_even_preemption_s
    when = "never" if even is None else f"with preemptions more than {span(even)} apart"
    line = words(
        "spot",
        compared=compared,
        label=on_demand.label,
        saving=abs(compared.saving),
        less="less" if compared.saving > 0 else "more",
        when=when if even != 0 else "at any rate of preemptions",
    )
    return View(line, asdict(compared) | {"saving_share": compared.saving})
