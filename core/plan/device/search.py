"""The best layout of a run on a number of chips, or on each of several: exhaustive, in arrays.

What fits of all layouts (search_survey.py) is ordered by step time, or by chips x time, which is
proportional to the cost of a token; equal ones by memory. The Pareto front over (step time, chips,
cost) is kept: two of these decide the third, so it is that of the first two. calculon (SC 2023)
searches in the same exhaustive way, one layout at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sabia.core.errors import UsageError
from sabia.core.plan.chips import Chip
from sabia.core.plan.device.search_rules import check_pinned
from sabia.core.plan.device.search_survey import UTILISATION, Question, Row, Survey
from sabia.core.plan.device.stack import Stack
from sabia.core.plan.device.workload import Workload

if TYPE_CHECKING:
    from sabia.core.plan.device.candidates import Pinned

Objective = Literal["time", "cost"]
RANKED = 10
HARDLY_MORE = 1.02  # of a bill: the smaller cluster is taken, as it is easier to get


@dataclass(frozen=True)
class Found:
    """Outcome of a search.

    best: by the objective; equal ones by memory. front: no other is faster and smaller and cheaper,
    fastest first. ranked: the best layout of each of the best meshes. meshes: ways to lay the chips
    along axes; fell: how many of these fell, by reason. candidates: layouts that were weighed;
    fitting: those that fit and were timed.
    """

    objective: Objective
    best: Row
    front: tuple[Row, ...]
    ranked: tuple[Row, ...]
    meshes: int
    fell: dict[str, int]
    candidates: int
    fitting: int

    @property
    def binding(self) -> str:
        """What limits the best layout."""
        return str(self.best.time.binding)

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


def search(
    workload: Workload,
    chip: Chip,
    stack: Stack,
    chips: int | Sequence[int],
    objective: Objective = "time",
    *,
    pinned: Pinned | None = None,
    utilisation: float = UTILISATION,
) -> Found:
    """The best layouts on `chips` devices, or on each number of `chips`.

    Raises UsageError on values that no layout has, Infeasible naming the smallest change that makes
    the run fit.
    """
    counts = [chips] if isinstance(chips, int) else sorted(set(chips))
    question = Question(workload, chip, stack, pinned or {}, utilisation)
    check_question(question, counts)
    survey = Survey(question, counts)
    if not survey.fitting:
        from sabia.core.plan.device.search_fixes import infeasible

        raise infeasible(question, counts, survey)
    return _found(survey, objective)


def check_question(question: Question, counts: Sequence[int]) -> None:
    """Raise UsageError on numbers that describe no search."""
    if not counts or min(counts) < 1:
        raise UsageError(f"--chips: {min(counts, default=0)} (expected 1 or more)")
    if not 0 < question.utilisation <= 1:
        raise UsageError(
            f"--utilisation: {question.utilisation:g} (expected above 0 and at most 1)"
        )
    check_pinned(question.workload, question.chip, question.can, question.pinned)


def _found(survey: Survey, objective: Objective) -> Found:
    """The best of what fits."""
    import numpy as np

    from sabia.core.plan.device.pareto import front

    seconds, chips, total, mesh = survey.gathered()
    work = chips * seconds
    first, second = (seconds, work) if objective == "time" else (work, seconds)
    order = np.lexsort((total, second, first))
    ranked = [survey.row(n) for n in _best_of_meshes(order, mesh)]
    return Found(
        objective=objective,
        best=ranked[0],
        front=tuple(survey.row(n) for n in order[front(seconds[order], chips[order])].tolist()),
        ranked=tuple(ranked),
        meshes=survey.meshes.total,
        fell=survey.fell,
        candidates=survey.candidates,
        fitting=survey.fitting,
    )


def _best_of_meshes(order: Any, mesh: Any) -> list[int]:
    """The first RANKED of `order` that are of different meshes."""
    import numpy as np

    _, places = np.unique(mesh[order], return_index=True)
    return order[np.sort(places)[:RANKED]].tolist()
