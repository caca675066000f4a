"""The best layout of a run on a number of chips, or on each of several: exhaustive, in arrays.

Every layout that the model and the software allow (search_rules.py, candidates.py) is weighed by
`device_memory`, and what fits is timed by `step_time`: the same formulas that price one layout, on
arrays of all. The settings that are names (recomputation, ZeRO level) are tried one after another.

What fits is ordered by step time, or by chips x time, which is
proportional to the cost of a token; equal ones by memory. The Pareto front over (step time, chips,
cost) is kept: two of these decide the third, so it is that of the first two. calculon (SC 2023)
searches in the same exhaustive way, one layout at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from sabia.core.errors import UsageError
from sabia.core.plan.chips import Chip
from sabia.core.plan.device.layout import AXES, Layout, Workload
from sabia.core.plan.device.memory import Memory, device_memory
from sabia.core.plan.device.search_rules import (
    Abilities,
    abilities_of,
    check_pinned,
    has_experts,
    rules_of,
)
from sabia.core.plan.device.stack import Stack
from sabia.core.plan.device.step_time import StepTime, step_time

if TYPE_CHECKING:
    from sabia.core.plan.device.candidates import Candidates, Meshes, Pinned


UTILISATION = 0.9  # of the usable memory: allocators leave holes
CHUNK = 32768  # candidates at a time: bounds the memory of a search
TOO_LARGE = "more than the memory of a chip"
NOT_PLACED = "no interleaving or placing of experts goes with the mesh"


@dataclass(frozen=True)
class Question:
    """What is searched for: everything but the numbers of chips.

    pinned: fields of a layout that must have a value. utilisation: share of a chip's usable memory
    that may be filled.
    """

    workload: Workload
    chip: Chip
    stack: Stack
    pinned: Pinned
    utilisation: float = UTILISATION

    @property
    def room_bytes(self) -> float:
        """What a device may hold."""
        return self.chip.usable_hbm_bytes * self.utilisation

    @property
    def can(self) -> Abilities:
        """What the software can do."""
        return abilities_of(self.stack, self.chip)


@dataclass(frozen=True)
class Row:
    """One layout, weighed and timed. token_chip_s: seconds of one chip for a token, its cost."""

    layout: Layout
    memory: Memory
    time: StepTime
    token_chip_s: float

    @property
    def chips(self) -> int:
        """Devices in all."""
        return int(self.layout.chips)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return float(self.time.total_s)


def priced(question: Question, layout: Layout) -> Row:
    """One layout in plain numbers, weighed and timed."""
    time = step_time(question.workload, layout, question.chip, question.stack)
    memory = device_memory(question.workload, layout, question.stack)
    tokens = question.workload.batch_tokens
    return Row(layout, memory, time, float(time.total_s) * int(layout.chips) / tokens)


class Survey:
    """All layouts of some numbers of chips: which fit, how long their steps take.

    least: (bytes, layout) of the candidate that needs the least memory, None without candidates.
    fewest: the smallest number of chips on which any fits. timed: else they are only weighed.
    candidates: how many were weighed; fitting: how many fit; meshes: ways to lay chips along axes.
    parts: (those that fit, bytes, seconds) of each setting.
    """

    def __init__(self, question: Question, counts: Sequence[int], timed: bool = True) -> None:
        self.question, self.timed = question, timed
        self.least: tuple[float, Layout] | None = None
        self.candidates = self.fitting = 0
        self.fewest: int | None = None
        self.parts: list[tuple[Candidates, Any, Any]] = []  # fitting ones, bytes, seconds
        self.meshes, every = _every(question, counts)
        self._marks: dict[str, list[Any]] = {"weighed": [], "fitting": []}  # numbers of meshes
        for some in every:
            self._weigh(some)

    def _weigh(self, some: Candidates) -> None:
        import numpy as np

        self.candidates += some.size
        self._marks["weighed"].append(some.mesh)
        question = self.question
        total = device_memory(question.workload, some.layout, question.stack).total
        total = np.broadcast_to(total, some.mesh.shape)
        smallest = int(total.argmin())
        if self.least is None or total[smallest] < self.least[0]:
            self.least = float(total[smallest]), some.one(smallest)
        chosen = np.flatnonzero(total <= question.room_bytes)
        self.fitting += len(chosen)
        if not len(chosen):
            return
        fitting = some.where(chosen)
        fewest = int(fitting.layout.chips.min())
        self.fewest = fewest if self.fewest is None else min(fewest, self.fewest)
        if self.timed:
            self._time(fitting, total[chosen])

    def _time(self, fitting: Candidates, total: Any) -> None:
        import numpy as np

        question = self.question
        self._marks["fitting"].append(fitting.mesh)
        given = (question.workload, fitting.layout, question.chip, question.stack)
        seconds = np.broadcast_to(step_time(*given).total_s, total.shape)
        self.parts.append((fitting, total, seconds))

    @property
    def fell(self) -> dict[str, int]:
        """Meshes by the reason why none of their layouts can be had."""
        weighed, fitting = (_different(self._marks[name]) for name in ("weighed", "fitting"))
        more = {NOT_PLACED: self.meshes.size - weighed, TOO_LARGE: weighed - fitting}
        return self.meshes.fell | {reason: count for reason, count in more.items() if count}

    def gathered(self) -> tuple[Any, Any, Any, Any]:
        """(seconds, chips, bytes, mesh) of all that fits, an array each."""
        import numpy as np

        parts = [
            (seconds, fitting.layout.chips, total, fitting.mesh)
            for fitting, total, seconds in self.parts
        ]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return columns[0], columns[1], columns[2], columns[3]

    def row(self, number: int) -> Row:
        """One of these, in plain numbers."""
        for fitting, _, _ in self.parts:
            if number < fitting.size:
                return priced(self.question, fitting.one(number))
            number -= fitting.size
        raise IndexError(number)


def _different(arrays: list[Any]) -> int:
    import numpy as np

    return len(np.unique(np.concatenate(arrays))) if arrays else 0


def _every(question: Question, counts: Sequence[int]) -> tuple[Meshes, Iterator[Candidates]]:
    """All meshes of these numbers of chips, and their candidates setting by setting."""
    from sabia.core.plan.device.candidates import all_meshes, candidates_of

    workload, can = question.workload, question.can
    rules = [
        rule
        for rule in rules_of(workload, question.chip, can)
        if not (rule.advice and rule.mesh_fields <= {*question.pinned})
    ]
    routed = has_experts(workload.architecture)
    axes = [axis for axis in AXES if axis in can.axes and (routed or axis != "expert")]
    meshes = all_meshes(counts, rules, axes, question.pinned)
    grid = candidates_of(meshes, workload, can, question.pinned)
    return meshes, _settings(question, grid)


def _settings(question: Question, grid: Candidates) -> Iterator[Candidates]:
    """The grid under each recomputation, ZeRO level and placing of experts, in chunks."""
    can, pinned = question.can, question.pinned
    recompute, zero, over = (
        [pinned[name]] if name in pinned else list(can.choices(name))
        for name in ("recompute", "zero", "experts_over_tensor")
    )
    zero = [level for level in zero if level] or zero  # 0 over fsdp is what data is
    for policy, level, placed in itertools.product(recompute, zero, over):
        mask = _useful(question, grid, level, level == zero[-1], placed)
        for start in range(0, grid.size, CHUNK):
            some = grid.where(slice(start, start + CHUNK)).where(mask[start : start + CHUNK])
            if some.size:
                names = {"recompute": policy, "zero": level, "experts_over_tensor": placed}
                yield replace(some, layout=replace(some.layout, **names))


def _useful(question: Question, grid: Candidates, level: int, only: bool, placed: bool) -> Any:
    """Where this setting exists and is not another one by a second name."""
    import numpy as np

    layout, mask = grid.layout, np.ones(grid.size, bool)
    if not only:  # without fsdp all levels are the same
        mask &= layout.fsdp > 1
    if placed:
        mask &= layout.tensor > 1
    kinds = [kind for kind in question.workload.architecture.layers if kind.experts]
    for kind in kinds:
        if placed:
            mask &= kind.experts % (layout.expert * layout.tensor) == 0
        else:
            mask &= kind.expert_width % layout.tensor == 0
    return mask & bool(kinds) if placed else mask


Objective = Literal["time", "cost"]
RANKED = 10
HARDLY_MORE = 1.02  # of a bill: the smaller cluster is taken, as it is easier to get


@dataclass(frozen=True)
class Found:
    """Outcome of a search.

    best: by the objective; equal ones by memory. front: no other is faster and smaller and cheaper,
    fastest first. ranked: the best layout of each of the best meshes. survey: what was looked at.
    """

    survey: Survey
    best: Row
    front: tuple[Row, ...]
    ranked: tuple[Row, ...]

    def cheapest_within(self, step_s: float) -> Row | None:
        """The fewest chips that cost hardly more than the cheapest of those in time; or None."""
        fast = [row for row in self.front if row.step_s <= step_s * (1 + 1e-12)]
        least = min((row.token_chip_s for row in fast), default=0.0)
        alike = [row for row in fast if row.token_chip_s <= least * HARDLY_MORE]
        return min(alike, key=lambda row: (row.chips, row.step_s), default=None)

    @property
    def fastest(self) -> Row:
        """The layout with the shortest step."""
        return self.front[0]


def search(question: Question, chips: int | Sequence[int], objective: Objective = "time") -> Found:
    """The best layouts on `chips` devices, or on each number of `chips`.

    Raises UsageError on values that no layout has, Infeasible naming the smallest change that makes
    the run fit.
    """
    counts = [chips] if isinstance(chips, int) else sorted(set(chips))
    if not counts or min(counts) < 1:
        raise UsageError(f"--chips: {min(counts, default=0)} (expected 1 or more)")
    if not 0 < question.utilisation <= 1:
        raise UsageError(
            f"--utilisation: {question.utilisation:g} (expected above 0 and at most 1)"
        )
    check_pinned(question.workload, question.chip, question.can, question.pinned)
    survey = Survey(question, counts)
    if not survey.fitting:
        from sabia.core.plan.device.search_fixes import infeasible

        raise infeasible(question, counts, survey)
    return _found(survey, objective)


def _found(survey: Survey, objective: Objective) -> Found:
    """The best of what fits."""
    import numpy as np

    from sabia.core.plan.device.candidates import front

    seconds, chips, total, mesh = survey.gathered()
    work = chips * seconds
    first, second = (seconds, work) if objective == "time" else (work, seconds)
    order = np.lexsort((total, second, first))
    ranked = [survey.row(n) for n in _best_of_meshes(order, mesh)]
    kept = order[front(seconds[order], chips[order])].tolist()
    return Found(survey, ranked[0], tuple(survey.row(n) for n in kept), tuple(ranked))


def _best_of_meshes(order: Any, mesh: Any) -> list[int]:
    """The first RANKED of `order` that are of different meshes."""
    import numpy as np

    _, places = np.unique(mesh[order], return_index=True)
    return order[np.sort(places)[:RANKED]].tolist()
