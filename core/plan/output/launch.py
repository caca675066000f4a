"""A plan as a script that starts it: `--emit slurm|xpk|skypilot`.

`launch_script(kind, plan)` gives the text. The command is that of `sabia pretrain` with the plan's
layout; what a scheduler calls a chip is data (launch.toml), and a chip that it does not know, or a
number of chips that it does not rent, is refused with what it does.
"""

import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.catalogue import check_entry, read_data
from sabia.core.plan.chips import Chip
from sabia.core.units import format_duration

FILE = "launch.toml"
_OPTIONAL = {"gres", "tpu", "cores", "slices", "slice_step", "slice_most", "skypilot"}
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # what xpk and Kubernetes take
_LONGEST_NAME = 40
_LONGEST_SIDE = 64  # cubes of 4·4·4 chips
_START_S = 600  # environment, roll call, compilation
INTERRUPTED = 75  # sabia's exit code of a run that goes on when it is started again


@dataclass(frozen=True)
class LaunchPlan:
    """What a script starts.

    name: of the job. command: words behind `sabia`, the layout among them, without -o. outputs: the
    run's directory, which becomes -o. wall_s: expected seconds, stops included; margin: what a time
    limit adds. longest_s: longest time limit that is asked for at once; a longer run goes on when
    its job is queued again. save_s: seconds that a save takes, for which there must be time before
    the limit. save_every_s: the checkpoint interval, which becomes --save-every where the command
    has none. spot: chips that may be taken away. restarts: after errors, at most. infra: SkyPilot's
    cloud/region/zone; bucket: that holds its outputs (None: it makes one); image: a container's.
    """

    name: str
    chip: Chip
    chips: int
    command: tuple[str, ...]
    wall_s: float
    outputs: str = "run"
    margin: float = 1.25
    longest_s: float = 24 * 3600
    save_s: float = 60
    save_every_s: float | None = None
    spot: bool = False
    restarts: int = 3
    infra: str | None = None
    bucket: str | None = None
    image: str | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) > _LONGEST_NAME:
            raise UsageError(
                f"job name: {self.name!r} (expected at most {_LONGEST_NAME} of a-z, 0-9 and -, "
                "beginning with a letter)"
            )

    def words_to(self, outputs: str) -> tuple[str, ...]:
        """The words behind `sabia`, with the checkpoint interval and the directory."""
        words = self.command
        if self.save_every_s is not None and "--save-every" not in words:
            words += ("--save-every", f"{max(1, round(self.save_every_s))}s")
        return (*words, "-o", outputs)

    def line_to(self, outputs: str) -> str:
        """The command that writes to `outputs`, as a shell reads it."""
        return shlex.join(("sabia", *self.words_to(outputs)))

    @property
    def line(self) -> str:
        """The command."""
        return self.line_to(self.outputs)

    @property
    def node_chips(self) -> int:
        """Chips of each node; UsageError where the last node would be a part of one."""
        whole = self.chip.node_chips
        if self.chips > whole and self.chips % whole:
            down = self.chips // whole * whole
            raise UsageError(
                f"--chips: {self.chips} {self.chip.name} are no whole nodes of {whole} (expected "
                f"such as {down} or {down + whole})"
            )
        return min(self.chips, whole)

    @property
    def nodes(self) -> int:
        """Hosts of all chips."""
        return self.chips // self.node_chips

    @property
    def limit_s(self) -> float:
        """The time limit to ask for: the run, at least a start, and time to save at the end."""
        return min(max(self.wall_s * self.margin, _START_S) + self.lead_s, self.longest_s)

    @property
    def lead_s(self) -> int:
        """Seconds before the end in which the run must be able to save: twice a save, 3 min."""
        return math.ceil(max(180, 2 * self.save_s))

    @property
    def about(self) -> str:
        """One line on what is planned."""
        kind = "spot " if self.spot else ""
        return f"{self.chips} {kind}{self.chip.name} for {format_duration(self.wall_s)}"


@dataclass(frozen=True)
class Names:
    """What launchers call a chip; None where it cannot be asked for."""

    source: str
    date: date
    gres: str | None = None
    tpu: str | None = None
    cores: int = 1
    slices: tuple[int, ...] = ()
    slice_step: int = 0
    slice_most: int = 0
    skypilot: str | None = None


def load_names() -> dict[str, Names]:
    """All entries of launch.toml by chip."""
    rows = read_data(FILE)
    return {name: _names(name, row) for name, row in rows.items()}


def _names(chip: str, row: Mapping[str, Any]) -> Names:
    check_entry(FILE, chip, dict(row), {"source", "date"}, _OPTIONAL)
    return Names(**{**row, "slices": tuple(row.get("slices", ()))})


def name_for(chip: Chip, launcher: str, field: str) -> Any:
    """The chip's name in `field`; UsageError where the launcher has none."""
    names = load_names()
    found = getattr(names.get(chip.name), field, None)
    if found is None:
        known = ", ".join(name for name, row in names.items() if getattr(row, field) is not None)
        raise UsageError(f"--emit {launcher}: no name for {chip.name} (expected one of {known})")
    return found


def slice_of(plan: LaunchPlan, launcher: str, field: str = "tpu") -> str:
    """The type of one slice of all the plan's TPUs, such as v5p-1024; UsageError without one."""
    prefix = name_for(plan.chip, launcher, field)
    names = load_names()[plan.chip.name]
    if not _is_slice(names, plan.chips):
        sizes = ", ".join(map(str, names.slices))
        if names.slice_step:
            sizes += f" or a box of cubes of {names.slice_step}, up to {names.slice_most}"
        raise UsageError(
            f"--chips: {plan.chips} {plan.chip.name} are no slice (expected {sizes}; a run over "
            "several slices is not started by sabia)"
        )
    return f"{prefix}-{plan.chips * names.cores}"


def _is_slice(names: Names, chips: int) -> bool:
    """Small sizes are listed; larger slices are boxes of cubes, up to 64 of them along a side."""
    cubes, rest = divmod(chips, names.slice_step) if names.slice_step else (0, 0)
    if chips in names.slices or rest or not 0 < chips <= names.slice_most:
        return chips in names.slices
    sides = range(1, _LONGEST_SIDE + 1)
    return any(cubes % (a * b) == 0 and cubes // (a * b) in sides for a in sides for b in sides)


def launch_script(kind: str, plan: LaunchPlan) -> str:
    """The script or task file of `plan` for slurm, xpk or skypilot. Raises UsageError."""
    from sabia.core.plan.output import launch_cloud, launch_slurm

    makers: dict[str, Callable[[LaunchPlan], str]] = {
        "slurm": launch_slurm.script,
        "xpk": launch_cloud.xpk,
        "skypilot": launch_cloud.skypilot,
    }
    return makers[kind](plan)
