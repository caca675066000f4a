"""Where every process stands, as process 0 knows it: who hangs, who is slow.

Training is in lock-step: when one process stops, all come to wait for it, so "nobody has moved for
the time-out" is what a hang looks like, and the one to name is the one behind. In this order:
those that no longer answer; those with the smallest position (step, marks passed within it); those
whose main thread stands elsewhere than most do. A process two steps behind the others is named
even while they move.

Limit = the larger of the time-out and three times the longest pause seen so far (a compilation or
an evaluation may be long), twice that before the second step, plus the patience that a process has
asked for (an upload).

A straggler is a process whose own work a step (without the phases in which it waits for others,
`WAITING`) takes half as long again as the median's.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sabia.core.parallel.slurm_hosts import say_ranks

WAITING = ("reduce", "wait")
SILENT_BEATS = 4
PAUSES = 3
STRAGGLES = 1.5
STRAGGLES_S = 0.05


@dataclass(frozen=True)
class Beat:
    """What a process says of itself: where it is, and for how long (seconds)."""

    step: int = 0
    phase: str = "start"
    marks: int = 0  # passed within this step
    idle: float = 0.0  # since the last mark
    longest: float = 0.0  # pause between two marks so far
    patience: float = 0.0  # asked for in this phase
    step_s: float = 0.0  # a step, smoothed; 0 before the first has ended
    work_s: float = 0.0  # of it, without waiting
    frame: str = ""  # where its main thread stands, once it has not moved for a while

    @property
    def position(self) -> tuple[int, int]:
        """How far it has come."""
        return self.step, self.marks

    @property
    def where(self) -> str:
        """'step 12 (backward)'; before the first step only the phase."""
        return f"step {self.step} ({self.phase})" if self.step else f"the beginning ({self.phase})"


def read_beat(said: Mapping[str, Any]) -> Beat:
    """The beat of a message; raises TypeError, ValueError for what is none."""
    kinds = {name: type(getattr(Beat(), name)) for name in Beat.__dataclass_fields__}
    return Beat(**{name: kinds[name](value) for name, value in said.items() if name in kinds})


@dataclass
class Board:
    """The newest beat of each process; `now` is any steady clock in seconds."""

    hosts: Mapping[int, str]
    hang_s: float
    interval_s: float
    beats: dict[int, tuple[Beat, float]] = field(default_factory=dict)

    def hear(self, rank: int, beat: Beat, now: float) -> None:
        """A beat has come."""
        self.beats[rank] = (beat, now)

    def drop(self, rank: int) -> Beat:
        """A process has left; returns its last beat."""
        return self.beats.pop(rank, (Beat(), 0.0))[0]

    def limit_s(self) -> float:
        """How long nobody may move."""
        beats = [beat for beat, _ in self.beats.values()]
        limit = max(self.hang_s, PAUSES * max(beat.longest for beat in beats))
        early = max(beat.step for beat in beats) < 2
        return limit * (2 if early else 1) + max(beat.patience for beat in beats)

    def hung(self, now: float) -> str:
        """The line that names who holds the run up; '' while it moves, or nobody marks anything."""
        if not any(beat.marks for beat, _ in self.beats.values()):
            return ""
        limit = self.limit_s()
        idle = {rank: beat.idle + now - at for rank, (beat, at) in self.beats.items()}
        front = max(beat.step for beat, _ in self.beats.values())
        left_behind = [r for r in idle if idle[r] > limit and self.beats[r][0].step <= front - 2]
        if left_behind:
            return self._held_up_by(left_behind, idle)
        if min(idle.values()) > limit:
            return self._held_up_by(self._behind(now), idle)
        return ""

    def _behind(self, now: float) -> list[int]:
        """Whom the others wait for; all of them, if that cannot be told."""
        silence = SILENT_BEATS * self.interval_s
        silent = [rank for rank, (_, at) in self.beats.items() if now - at > silence]
        if silent:
            return silent
        positions = {rank: beat.position for rank, (beat, _) in self.beats.items()}
        least = [rank for rank, place in positions.items() if place == min(positions.values())]
        if len(least) < len(positions):
            return least
        frames = {rank: beat.frame for rank, (beat, _) in self.beats.items()}
        usual = statistics.mode(frames.values())
        odd = [rank for rank, frame in frames.items() if frame != usual]
        return odd if 2 * len(odd) < len(frames) and odd else list(frames)

    def _held_up_by(self, ranks: Sequence[int], idle: Mapping[int, float]) -> str:
        waited = max(idle[rank] for rank in ranks)
        first = self.beats[ranks[0]][0]
        stands = f"{first.where}{' in ' + first.frame if first.frame else ''}"
        others = len(self.beats) - len(ranks)
        waiting = f"; the other {others} wait" if others else ""
        return (
            f"{say_ranks(ranks, self.hosts)} {'have' if len(ranks) > 1 else 'has'} not moved for "
            f"{waited:,.0f} s at {stands}{waiting}"
        )

    def _work(self) -> dict[int, float]:
        return {
            rank: beat.work_s for rank, (beat, _) in list(self.beats.items()) if beat.work_s > 0
        }

    def straggler(self) -> str:
        """A note that names the slowest process, '' if none stands out."""
        work = self._work()
        if len(work) < max(2, len(self.hosts) // 2):
            return ""
        usual, slowest = statistics.median_low(work.values()), max(work, key=lambda r: work[r])
        if work[slowest] < max(STRAGGLES * usual, usual + STRAGGLES_S):
            return ""
        return (
            f"{say_ranks([slowest], self.hosts)} is slow: {work[slowest]:.3g} s of its own work a "
            f"step, where the median is {usual:.3g} s; the others wait for it"
        )

    def figures(self) -> dict[str, float]:
        """step_s_median, step_s_max (seconds a step), work_s_median, work_s_max, slowest_rank."""
        work = self._work()
        steps = [beat.step_s for beat, _ in list(self.beats.values()) if beat.step_s > 0]
        if not work or not steps:
            return {}
        return {
            "step_s_median": statistics.median(steps),
            "step_s_max": max(steps),
            "work_s_median": statistics.median(work.values()),
            "work_s_max": max(work.values()),
            "slowest_rank": max(work, key=lambda r: work[r]),
        }
