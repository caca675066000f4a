"""From a plan to its launch script (`--emit`): layout, time limit and checkpoint interval."""

import os
import re
import shlex

from sabia.core.errors import UsageError
from sabia.core.plan.output.launch import LaunchPlan, launch_script
from sabia.core.plan.output.layout import flags_of
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest
from sabia.core.plan.stops.failures import StopModel, StoppedRun, saving
from sabia.core.units import format_count, parse_count


def script(request: PlanRequest, plan: Plan) -> str:
    """The launch script of the plan's best row, with the interruptions of the options.

    Raises UsageError.
    """
    best, layouts = plan.best, plan.layouts
    assert layouts is not None and best.layout is not None  # --emit is only with a layout
    flags = flags_of(layouts, best.layout)
    architecture = layouts.problem.workload.architecture
    if architecture.counted_only:
        raise UsageError(
            f"--emit: sabia pretrain cannot train {architecture.name} (expected a family that it "
            "trains)"
        )
    if not flags:
        raise UsageError(
            f"--emit: starts sabia pretrain, not {layouts.problem.stack.name}; omit --stack"
        )
    chip, size = plan.cluster.chip, plan.run.checkpoint_bytes
    run = StoppedRun(plan.cluster.stops or StopModel(), chip, best.chips, size, best.work_s)
    try:
        saved = saving(run)
        save_s = saved.offload_s + saved.upload_s
    except UsageError:  # no bandwidth of the chip is on file
        save_s = 60.0
    path = request.settings.model
    words = os.path.basename(os.path.abspath(path)) if path else format_count(request.run.params)
    slug = re.sub(r"[^a-z0-9]+", "-", f"sabia-{words.removesuffix('.json')}".lower())
    launch = LaunchPlan(
        name=slug[:40].strip("-"),
        chip=chip,
        chips=best.chips,
        command=(*_command(request), *shlex.split(flags)[2:]),
        wall_s=best.finishes_s,
        save_s=save_s,
        mtbf_s=run.mean_time_between_stops_s,
        spot=request.settings.spot or request.settings.preempt is not None,
    )
    return launch_script(request.settings.emit or "", launch)


def _command(request: PlanRequest) -> tuple[str, ...]:
    """`pretrain`, its inputs, and the tokens of the run."""
    given = request.settings.pretrain_args
    path = request.settings.model or "config.json"
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    words = shlex.split(given) if given else ["tokens/", "--config-json", path]
    if "--tokens" in words or "--steps" in words:
        return ("pretrain", *words)
    short, tokens = format_count(request.run.tokens, 2), request.run.tokens
    exact = short if parse_count(short) == tokens else f"{tokens:.0f}"
    return ("pretrain", *words, "--tokens", exact)
