"""The launch script of a plan: `--emit slurm|xpk|skypilot`.

`launch_script(kind, plan)` returns the text. The command is `sabia pretrain` with the plan's
layout. launch.toml has the schedulers' names of chips; a chip without a name, or a number of chips
that cannot be rented, is an error that names the valid ones.

Slurm: a header, the command, and a body (data/slurm_body.sh), the same as in
examples/slurm/train.sbatch: one srun for all processes; USR1 before the time limit and TERM at a
preemption make sabia save and exit with 75, and the job is requeued. The requested time limit is
for the expected time; a longer run continues after the requeue.

xpk (TPUs on Google Kubernetes Engine) starts the command once on every host of a slice; GKE sets
TPU_WORKER_HOSTNAMES, which sabia reads. SkyPilot (any cloud) runs the task's `run` on every node
with SKYPILOT_NODE_RANK and SKYPILOT_NODE_IPS. On GPUs the script starts one process per GPU with
the variables of torchrun (torchrun itself does not return the exit code of its processes); on TPU
hosts it sets the variables that sabia reads. Both restart a run that exits with 75. Option names
are those of AI-Hypercomputer/xpk src/xpk/parser/workload.py (2026-06) and of SkyPilot's YAML
reference and managed jobs (2026-11).

From a plan to its launch script (`--emit`): layout, time limit and checkpoint interval.
"""

import math
import os
import re
import shlex
import string
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.catalogue import read_data, read_text
from sabia.core.plan.chips import Chip
from sabia.core.plan.output.layout import flags_of
from sabia.core.plan.planner import Plan
from sabia.core.plan.request import PlanRequest
from sabia.core.plan.stops.failures import StopModel, StoppedRun, saving
from sabia.core.units import format_count, format_duration, parse_count

FILE = "launch.toml"
_LONGEST_NAME = 40
_LONGEST_SIDE = 64  # cubes of 4·4·4 chips
_START_S = 600  # environment, rendezvous, compilation
_MARGIN = 1.25  # of a time limit over the expected time
_LONGEST_S = 24 * 3600  # longest requested limit; a longer run continues after a requeue
_RESTARTS = 3  # after errors, at most
INTERRUPTED = 75  # sabia's exit code of a run that continues after a restart


@dataclass(frozen=True)
class LaunchPlan:
    """Input of a launch script.

    name: of the job. command: arguments of `sabia` with the layout, without -o. outputs: the run's
    directory, the value of -o. wall_s: expected seconds with interruptions. save_s: seconds of a
    save, reserved before the limit. mtbf_s: mean time between interruptions, from which sabia
    chooses the checkpoint interval (`--save-every auto`) if the command has none (inf: none are
    expected). spot: preemptible chips.
    """

    name: str
    chip: Chip
    chips: int
    command: tuple[str, ...]
    wall_s: float
    outputs: str = "run"
    save_s: float = 60
    mtbf_s: float = math.inf
    spot: bool = False

    def words_to(self, outputs: str) -> tuple[str, ...]:
        """The arguments of `sabia`, with the checkpoint interval and the directory."""
        words = self.command
        if "--save-every" not in words:
            words += ("--save-every", "auto")
            if self.mtbf_s < math.inf and "--mtbf" not in words:
                words += ("--mtbf", f"{max(1, round(self.mtbf_s))}s")
        return (*words, "-o", outputs)

    def line_to(self, outputs: str) -> str:
        """The shell command that writes to `outputs`."""
        return shlex.join(("sabia", *self.words_to(outputs)))

    @property
    def node_chips(self) -> int:
        """Chips per node; UsageError if the last node would not be whole."""
        whole = self.chip.node_chips
        if self.chips > whole and self.chips % whole:
            down = self.chips // whole * whole
            raise UsageError(
                f"--chips: {self.chips} {self.chip.name} are not whole nodes of {whole} (expected "
                f"a multiple, such as {down} or {down + whole})"
            )
        return min(self.chips, whole)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.chips // self.node_chips

    @property
    def limit_s(self) -> float:
        """The requested time limit: the run, at least a start, and time for the last save."""
        return min(max(self.wall_s * _MARGIN, _START_S) + self.lead_s, _LONGEST_S)

    @property
    def lead_s(self) -> int:
        """Seconds before the end for the last save: twice its time, at least 3 min."""
        return math.ceil(max(180, 2 * self.save_s))

    @property
    def about(self) -> str:
        """One line about the plan."""
        kind = "spot " if self.spot else ""
        return f"{self.chips} {kind}{self.chip.name} for {format_duration(self.wall_s)}"


def name_for(chip: Chip, launcher: str, field: str) -> Any:
    """The chip's name in `field`; UsageError if the launcher has none."""
    names = read_data(FILE)
    name = names.get(chip.name, {}).get(field)
    if name is None:
        known = ", ".join(name for name, row in names.items() if field in row)
        raise UsageError(f"--emit {launcher}: no name for {chip.name} (expected one of {known})")
    return name


def slice_of(plan: LaunchPlan, launcher: str, field: str = "tpu") -> str:
    """The type of one slice with all the plan's TPUs, such as v5p-1024; UsageError if none."""
    prefix = name_for(plan.chip, launcher, field)
    names = read_data(FILE)[plan.chip.name]
    if not _is_slice(names, plan.chips):
        sizes = ", ".join(map(str, names.get("slices", ())))
        if "slice_step" in names:
            sizes += f" or a box of cubes of {names['slice_step']}, up to {names['slice_most']}"
        raise UsageError(
            f"--chips: {plan.chips} {plan.chip.name} are not a slice (expected {sizes}; sabia does "
            "not start a run over several slices)"
        )
    return f"{prefix}-{plan.chips * names.get('cores', 1)}"


def _is_slice(names: Mapping[str, Any], chips: int) -> bool:
    """Small sizes are listed; larger slices are boxes of cubes, up to 64 of them along a side."""
    listed = chips in names.get("slices", ())
    if listed or "slice_step" not in names:
        return listed
    cubes, rest = divmod(chips, names["slice_step"])
    if rest or not 0 < chips <= names["slice_most"]:
        return False
    sides = range(1, _LONGEST_SIDE + 1)
    return any(cubes % (a * b) == 0 and cubes // (a * b) in sides for a in sides for b in sides)


def launch_script(kind: str, plan: LaunchPlan) -> str:
    """The script or task file of `plan` for slurm, xpk or skypilot. Raises UsageError."""
    return {"slurm": slurm, "xpk": xpk, "skypilot": skypilot}[kind](plan)


class _Template(string.Template):
    """A file of data/ with %{names}; `$` is that of the shell."""

    delimiter = "%"


def _text(file: str, plan: LaunchPlan, **values: object) -> str:
    """The template `file`, filled with the plan's figures and `values`."""
    common = {name: getattr(plan, name) for name in ("about", "name", "nodes", "node_chips")}
    common |= {"lead": plan.lead_s, "restarts": _RESTARTS, "interrupted": INTERRUPTED}
    return _Template(read_text(file)).substitute(common | values)


def slurm(plan: LaunchPlan) -> str:
    """The text of the batch script. Raises UsageError on chips without a Slurm name."""
    if plan.chip.family not in ("GPU", "CPU"):
        raise UsageError(f"--emit slurm: starts GPUs and CPUs only, not {plan.chip.name}")
    # the generic resource of each node (gres.conf); some sites need a type after it
    gres = f"#SBATCH --gres=gpu:{plan.node_chips}\n" if plan.chip.family == "GPU" else ""
    minutes = max(1, math.ceil(plan.limit_s / 60))
    time = f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"
    words = shlex.join(plan.words_to(plan.outputs))
    head = _text("slurm_head.sh", plan, gres=gres, time=time, words=words)
    return head + read_text("slurm_body.sh")


_MANY = 1000  # restarts after preemptions, which are not errors
_MOUNT = "/outputs"  # mount point of persistent storage, a bucket that SkyPilot creates and keeps


def xpk(plan: LaunchPlan) -> str:
    """A shell script with one `xpk workload create`. Raises UsageError except for TPU slices."""
    values = {"chips": slice_of(plan, "xpk"), "spot": "  --spot \\\n" * plan.spot}
    values["command"] = shlex.quote(plan.line_to(plan.outputs))
    return _text("xpk.sh", plan, restarts=_MANY if plan.spot else _RESTARTS, **values)


def skypilot(plan: LaunchPlan) -> str:
    """A task file for `sky jobs launch`. Raises UsageError on chips without a SkyPilot name.

    On GPUs it starts one process per GPU of a node and returns its exit code.
    """
    tpu, run = plan.chip.family == "TPU", plan.line_to(str(PurePosixPath(_MOUNT) / plan.outputs))
    if tpu:
        chips = slice_of(plan, "skypilot", "skypilot")
    else:
        chips = f"{name_for(plan.chip, 'skypilot', 'skypilot')}:{plan.node_chips}"
    if tpu or plan.chips > 1:
        run = _text(f"skypilot_{'tpu' if tpu else 'gpus'}.sh", plan, command=run)
    lines = textwrap.indent(run.rstrip("\n"), "  ")
    spot, nodes = str(plan.spot).lower(), 1 if tpu else plan.nodes
    return _text("skypilot.yaml", plan, chips=chips, spot=spot, nodes=nodes, run=lines)


def script(request: PlanRequest, plan: Plan) -> str:
    """The launch script of the plan's best row, with the interruptions of the options.

    Raises UsageError.
    """
    best, problem = plan.best, plan.problem
    assert problem is not None  # --emit is only with a layout
    flags = flags_of(request, plan)
    architecture = problem.workload.architecture
    if architecture.counted_only:
        raise UsageError(
            f"--emit: sabia pretrain cannot train {architecture.name} (expected a family that it "
            "trains)"
        )
    if not flags:
        raise UsageError(f"--emit: starts sabia pretrain, not {problem.stack.name}; omit --stack")
    chip, size = plan.cluster.chip, plan.run.checkpoint_bytes
    run = StoppedRun(plan.cluster.stops or StopModel(), chip, best.chips, size, best.work_s)
    try:
        saved = saving(run)
        save_s = saved.offload_s + saved.upload_s
    except UsageError:  # no bandwidth of the chip is on file
        save_s = 60.0
    path = request.settings.model
    words = os.path.basename(os.path.abspath(path)) if path else format_count(request.run.params)
    launch = LaunchPlan(
        name=job_name(words.removesuffix(".json")),
        chip=chip,
        chips=best.chips,
        command=(*_command(request), *shlex.split(flags)[2:]),
        wall_s=best.finishes_s,
        save_s=save_s,
        mtbf_s=run.mean_time_between_stops_s,
        spot=request.settings.spot or request.settings.preempt is not None,
    )
    return launch_script(request.settings.emit or "", launch)


def job_name(model: str) -> str:
    """A name that xpk and Kubernetes take: a-z, 0-9 and -, from a letter to a letter or digit."""
    return re.sub(r"[^a-z0-9]+", "-", f"sabia-{model}".lower())[:_LONGEST_NAME].strip("-")


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
