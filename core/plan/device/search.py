"""The best layout of a run on a number of chips, or on each of several: exhaustive, in arrays.

What fits (survey.py) is ordered by step time, or by chips x time, which is proportional to the cost
of a token; layouts that are equal by memory. The Pareto front over (step time, chips, cost) is
kept: two of these determine the third, so it is that of the first two. calculon (SC 2023) searches
in the same exhaustive way, one layout at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sabia.core.plan.device.search_fixes import infeasible
from sabia.core.plan.device.search_rules import SearchProblem, check_pinned
from sabia.core.plan.device.survey import Survey, TimedLayout

Objective = Literal["time", "cost"]
RANKED = 10  # meshes in a list of the best
SHOWN = 8  # layouts in a table
HARDLY_MORE = 1.02  # of the cost: within it the smaller cluster is better, as it is easier to rent


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    best: by the objective; equal ones by memory. front: Pareto-optimal in time, chips and cost,
    fastest first. ranked: the best layout of each of the best meshes. survey: all candidates.
    """

    survey: Survey
    best: TimedLayout
    front: tuple[TimedLayout, ...]
    ranked: tuple[TimedLayout, ...]

    @property
    def sizes(self) -> int:
        """Different numbers of chips on the Pareto front."""
        return len({row.chips for row in self.front})

    def shown(self, chosen: Sequence[TimedLayout]) -> list[TimedLayout]:
        """The layouts to show: the chosen ones, and alternatives."""
        others = self.ranked if self.sizes == 1 else _thinned(self.front)
        rows = {row.layout.described: row for row in (*chosen, *others[:SHOWN])}
        return sorted(rows.values(), key=lambda row: row.step_s)

    def cheapest_in_time(
        self, limits_s: Sequence[float], end: Callable[[TimedLayout], tuple[float, float]]
    ) -> list[TimedLayout]:
        """For each limit the fewest chips within HARDLY_MORE of the least cost of those in time.

        end: (seconds until the end, billed chip-seconds) of a layout. Where none is in time, the
        one that ends first.
        """
        ends, chosen = [(row, *end(row)) for row in self.front], list[TimedLayout]()
        first = min(ends, key=lambda each: each[1])
        for limit_s in limits_s:
            in_time = [each for each in ends if each[1] <= limit_s * (1 + 1e-12)] or [first]
            most = min(billed_s for *_, billed_s in in_time) * HARDLY_MORE
            alike = (row for row, _, billed_s in in_time if billed_s <= most)
            chosen.append(min(alike, key=lambda row: (row.chips, row.step_s)))
        return chosen


def search(problem: SearchProblem, counts: Sequence[int], objective: Objective) -> SearchResult:
    """The best layouts on each of some numbers of chips.

    Raises UsageError on values that no layout has, Infeasible naming the smallest change that makes
    the run fit.
    """
    counts = sorted(set(counts))
    check_pinned(problem.workload, problem.chip, problem.can, problem.pinned)
    survey = Survey(problem, counts)
    if not survey.fitting:
        raise infeasible(problem, counts, survey)
    import numpy as np

    from sabia.core.plan.device.candidates import front

    seconds, sizes, total, mesh = survey.gathered()
    work = sizes * seconds
    first, second = (seconds, work) if objective == "time" else (work, seconds)
    order = np.lexsort((total, second, first))
    _, first_of_mesh = np.unique(mesh[order], return_index=True)
    ranked = [survey.row(n) for n in order[np.sort(first_of_mesh)[:RANKED]].tolist()]
    kept = order[front(seconds[order], sizes[order])].tolist()
    return SearchResult(survey, ranked[0], tuple(survey.row(n) for n in kept), tuple(ranked))


def _thinned(front: tuple[TimedLayout, ...]) -> list[TimedLayout]:
    """At most SHOWN layouts of a front, evenly from the fastest to the smallest."""
    step = max(1, (len(front) - 1) / (SHOWN - 1))
    return [front[round(n * step)] for n in range(min(SHOWN, len(front)))]
