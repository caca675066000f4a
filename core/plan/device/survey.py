"""All layouts of some numbers of chips: their memory, and the step time of those that fit.

Every layout that the model and the software allow (search_rules.py, candidates.py) is evaluated by
`device_memory`, and `step_time` predicts the step of what fits: the same formulas that evaluate one
layout, on arrays of all. The settings that are names (recomputation, ZeRO level) are tried one
after another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sabia.core.plan.device.layout import AXES, Layout
from sabia.core.plan.device.memory import Memory, device_memory
from sabia.core.plan.device.search_rules import SearchProblem, has_experts, rules_of
from sabia.core.plan.device.step_time import StepTime, step_time

if TYPE_CHECKING:
    from sabia.core.plan.device.candidates import Candidates

CHUNK = 32768  # candidates at a time: bounds the memory of a search
TOO_LARGE = "more than the memory of a chip"
NOT_PLACED = "no interleaving or placing of experts goes with the mesh"


@dataclass(frozen=True)
class TimedLayout:
    """One layout with its memory and step time."""

    layout: Layout
    memory: Memory
    time: StepTime

    @property
    def chips(self) -> int:
        """Number of devices."""
        return int(self.layout.chips)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return float(self.time.total_s)


def priced(problem: SearchProblem, layout: Layout) -> TimedLayout:
    """Memory and step time of one layout in plain numbers."""
    time = step_time(problem.workload, layout, problem.chip, problem.stack)
    return TimedLayout(layout, device_memory(problem.workload, layout, problem.stack), time)


class Survey:
    """All layouts of some numbers of chips: which fit, and their step times.

    least: (bytes, layout) of the candidate that needs the least memory, None without candidates.
    fewest: the smallest number of chips on which any fits. timed: whether step times are computed.
    candidates, fitting: numbers of all candidates and of those that fit; meshes: all meshes.
    parts: (those that fit, bytes, seconds) of each setting.
    """

    def __init__(self, problem: SearchProblem, counts: Sequence[int], timed: bool = True) -> None:
        from sabia.core.plan.device.candidates import all_meshes, candidates_of

        self.problem, self.timed = problem, timed
        self.least: tuple[float, Layout] | None = None
        self.candidates = self.fitting = 0
        self.fewest: int | None = None
        self.parts: list[tuple[Candidates, Any, Any]] = []
        self._measured, self._fitting = list[Any](), list[Any]()  # numbers of meshes
        workload, can, pinned = problem.workload, problem.can, problem.pinned
        every = rules_of(workload, problem.chip, can)
        rules = [r for r in every if not (r.advice and r.mesh_fields <= {*pinned})]
        routed = has_experts(workload.architecture)
        axes = [axis for axis in AXES if axis in can.axes and (routed or axis != "expert")]
        self.meshes = all_meshes(counts, rules, axes, pinned)
        for some in _settings(problem, candidates_of(self.meshes, workload, can, pinned)):
            self._measure(some)

    def _measure(self, some: Candidates) -> None:
        import numpy as np

        self.candidates += some.size
        self._measured.append(some.mesh)
        problem = self.problem
        total = device_memory(problem.workload, some.layout, problem.stack).total
        total = np.broadcast_to(total, some.mesh.shape)
        smallest = int(total.argmin())
        if self.least is None or total[smallest] < self.least[0]:
            self.least = float(total[smallest]), some.one(smallest)
        chosen = np.flatnonzero(total <= problem.memory_limit_bytes)
        self.fitting += len(chosen)
        if not len(chosen):
            return
        fitting = some.where(chosen)
        fewest = int(fitting.layout.chips.min())
        self.fewest = fewest if self.fewest is None else min(fewest, self.fewest)
        if self.timed:
            self._fitting.append(fitting.mesh)
            given = (problem.workload, fitting.layout, problem.chip, problem.stack)
            seconds = np.broadcast_to(step_time(*given).total_s, chosen.shape)
            self.parts.append((fitting, total[chosen], seconds))

    @property
    def rejected(self) -> dict[str, int]:
        """Number of meshes without any layout, by the reason."""
        measured, fitting = _different(self._measured), _different(self._fitting)
        more = {NOT_PLACED: len(self.meshes.left) - measured, TOO_LARGE: measured - fitting}
        return self.meshes.rejected | {reason: count for reason, count in more.items() if count}

    def gathered(self) -> tuple[Any, ...]:
        """(seconds, chips, bytes, mesh) of all that fits, an array each."""
        import numpy as np

        parts = ((s, some.layout.chips, total, some.mesh) for some, total, s in self.parts)
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))

    def row(self, number: int) -> TimedLayout:
        """The layout of index `number` in `gathered`, in plain numbers."""
        for fitting, _, _ in self.parts:
            if number < fitting.size:
                return priced(self.problem, fitting.one(number))
            number -= fitting.size
        raise IndexError(number)


def _different(arrays: list[Any]) -> int:
    import numpy as np

    return len(np.unique(np.concatenate(arrays))) if arrays else 0


def _settings(problem: SearchProblem, grid: Candidates) -> Iterator[Candidates]:
    """The grid with each recomputation, ZeRO level and placement of experts, in chunks.

    Settings that are not possible, or equal to another one, are left out.
    """
    import numpy as np

    can, pinned = problem.can, problem.pinned
    recompute, zero, placements = (
        [pinned[name]] if name in pinned else list(can.choices(name))
        for name in ("recompute", "zero", "experts_over_tensor")
    )
    zero = [level for level in zero if level] or zero  # level 0 over fsdp equals data
    kinds = [kind for kind in problem.workload.architecture.layers if kind.experts]
    layout = grid.layout
    for policy, level, over_tensor in itertools.product(recompute, zero, placements):
        mask = np.ones(grid.size, bool)
        if level != zero[-1]:  # without fsdp all levels are the same
            mask &= layout.fsdp > 1
        if over_tensor:
            mask &= (layout.tensor > 1) & bool(kinds)
        for kind in kinds:
            ranks = layout.expert * layout.tensor
            whole, sliced = kind.experts % ranks, kind.expert_width % layout.tensor
            mask &= (whole if over_tensor else sliced) == 0
        for start in range(0, grid.size, CHUNK):
            some = grid.where(slice(start, start + CHUNK)).where(mask[start : start + CHUNK])
            if some.size:
                names = {"recompute": policy, "zero": level, "experts_over_tensor": over_tensor}
                yield replace(some, layout=replace(some.layout, **names))
