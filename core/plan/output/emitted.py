"""From a plan to the script that starts it (`--emit`): its layout, its time limit, its saves."""

import os
import re
import shlex

from sabia.core.errors import UsageError
from sabia.core.plan.output.launch import LaunchPlan, launch_script
from sabia.core.plan.output.layout import flags_of
from sabia.core.plan.output.stops import stopped_run
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest
from sabia.core.plan.stops.failures import forecast
from sabia.core.units import format_count, parse_count


def script(request: PlanRequest, plan: Plan) -> str:
    """The text of `--emit` for the plan's best row. Raises UsageError."""
    return launch_script(request.settings.emit or "", launch_plan(request, plan))


def launch_plan(request: PlanRequest, plan: Plan) -> LaunchPlan:
    """What the script starts; with stops as `--failure-rate` and its kin say."""
    best, layouts = plan.best, plan.layouts
    assert layouts is not None and best.layout is not None  # --emit is only with a layout
    flags = flags_of(layouts, best.layout)
    model = layouts.problem.workload.architecture
    if model.counted_only:
        raise UsageError(
            f"--emit: sabia pretrain has no {model.name}, whose layout is for other software "
            "(expected a family that it trains)"
        )
    if not flags:
        raise UsageError(
            f"--emit: starts sabia pretrain, not {layouts.problem.stack.name}; leave out --stack"
        )
    wall_s, save_s, every_s = _times(request, plan)
    return LaunchPlan(
        name=_name(request),
        chip=plan.cluster.chip,
        chips=best.chips,
        command=(*_command(request), *shlex.split(flags)[2:]),
        wall_s=wall_s,
        save_s=save_s,
        save_every_s=every_s,
        spot=request.settings.spot or request.settings.preempt is not None,
    )


def _command(request: PlanRequest) -> tuple[str, ...]:
    """`pretrain`, its inputs, and the tokens of the run."""
    given = request.settings.pretrain_args
    words = shlex.split(given) if given else ["tokens/", *_model(request)]
    if "--tokens" in words or "--steps" in words:
        return ("pretrain", *words)
    return ("pretrain", *words, "--tokens", _count(request.run.tokens))


def _model(request: PlanRequest) -> list[str]:
    path = request.settings.model
    if path is None:
        return ["--config-json", "config.json"]
    inside = os.path.join(path, "config.json")
    return ["--config-json", inside if os.path.isdir(path) else path]


def _count(value: float) -> str:
    """1T, or all digits where that would round."""
    short = format_count(value, 2)
    return short if parse_count(short) == value else f"{value:.0f}"


def _name(request: PlanRequest) -> str:
    path = request.settings.model
    words = os.path.basename(os.path.abspath(path)) if path else format_count(request.run.params)
    slug = re.sub(r"[^a-z0-9]+", "-", f"sabia-{words.removesuffix('.json')}".lower())
    return slug[:40].strip("-")


def _times(request: PlanRequest, plan: Plan) -> tuple[float, float, float | None]:
    """(wall time, time of a save, interval of saves); without stops where no rate is on file."""
    try:
        seen = forecast(stopped_run(request, plan))
    except UsageError:
        return plan.best.finishes_s, 60.0, None
    return seen.wall_s, seen.offload_s + seen.upload_s, seen.interval_s
