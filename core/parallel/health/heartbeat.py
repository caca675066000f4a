"""The newest heartbeat of every process, as process 0 has it: which ranks hang, which are slow.

Training is in lock-step: when one process stops, all others soon wait for it. A hang is therefore
"no process has made progress for the time-out", and the rank to name is the one that is behind,
in this order: ranks that send no heartbeats any more; ranks with the smallest position (step,
phases entered within it); ranks whose main thread executes another line than most do. A process
that is two steps behind the others is named even while they make progress.

Limit = the larger of the time-out and three times the longest pause so far (a compilation or an
evaluation may be long), twice that before the second step, plus the extra time that a process has
asked for (`patience_s`, for an upload) and that still sends heartbeats.

A straggler is a process whose own work per step (without the phases in which it waits for others,
`WAITING_PHASES`) takes at least 1.5 times the median.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sabia.core.parallel.world import describe_ranks

WAITING_PHASES = ("reduce", "wait")
SILENT_INTERVALS = 4  # heartbeats missed in a row until a rank counts as silent
LONGEST_PAUSES = 3
STRAGGLER_RATIO = 1.5  # of the median work, and
STRAGGLER_S = 0.05  # at least so much more than it


@dataclass(frozen=True)
class Heartbeat:
    """Where a process is, and for how long."""

    step: int = 0
    phase: str = "start"
    phases: int = 0  # entered within this step
    idle_s: float = 0.0  # since the last phase was entered
    longest_pause_s: float = 0.0  # between two phases so far
    patience_s: float = 0.0  # asked for in this phase
    step_s: float = 0.0  # of a step, smoothed; 0 before the first has ended
    work_s: float = 0.0  # of it, without waiting
    frame: str = ""  # the line its main thread executes, once that has been idle for a while

    @property
    def position(self) -> tuple[int, int]:
        """(step, phases entered within it): how far the process has come."""
        return self.step, self.phases

    @property
    def where(self) -> str:
        """'step 12 (backward)'; before the first step only the phase."""
        return f"step {self.step} ({self.phase})" if self.step else f"the beginning ({self.phase})"

    @classmethod
    def of_message(cls, fields: Mapping[str, Any]) -> Heartbeat:
        """The heartbeat in a message; raises TypeError, ValueError if it is malformed."""
        kinds = {name: type(getattr(cls(), name)) for name in cls.__dataclass_fields__}
        # names that this version does not know are ignored
        return cls(**{name: kinds[name](x) for name, x in fields.items() if name in kinds})


@dataclass
class HeartbeatTable:
    """The newest heartbeat of each process; `now` is any steady clock in seconds."""

    hosts: Mapping[int, str]
    hang_s: float
    interval_s: float
    newest: dict[int, tuple[Heartbeat, float]] = field(default_factory=dict)  # and when received

    def update(self, rank: int, heartbeat: Heartbeat, now: float) -> None:
        """Store a heartbeat that has arrived."""
        self.newest[rank] = (heartbeat, now)

    def drop(self, rank: int) -> Heartbeat:
        """Remove a process that has ended; returns its last heartbeat."""
        return self.newest.pop(rank, (Heartbeat(), 0.0))[0]

    def _silent(self, now: float) -> list[int]:
        """The ranks that send no heartbeats any more."""
        silence_s = SILENT_INTERVALS * self.interval_s
        return [rank for rank, (_, at) in self.newest.items() if now - at > silence_s]

    def limit_s(self, now: float) -> float:
        """How long all processes may be without progress."""
        heartbeats = [heartbeat for heartbeat, _ in self.newest.values()]
        pause_s = max(heartbeat.longest_pause_s for heartbeat in heartbeats)
        limit_s = max(self.hang_s, LONGEST_PAUSES * pause_s)
        if max(heartbeat.step for heartbeat in heartbeats) < 2:  # compiling, filling caches
            limit_s *= 2
        waited_for = self.newest.keys() - self._silent(now)
        return limit_s + max((self.newest[r][0].patience_s for r in waited_for), default=0.0)

    def hung(self, now: float) -> str:
        """The line that names the ranks that hang; '' if none do, or no phase was ever entered."""
        if not any(heartbeat.phases for heartbeat, _ in self.newest.values()):
            return ""
        limit_s = self.limit_s(now)
        # time passes after a heartbeat was sent, too: a rank that sends none stays idle
        idle_s = {rank: newest.idle_s + now - at for rank, (newest, at) in self.newest.items()}
        front = max(heartbeat.step for heartbeat, _ in self.newest.values())
        late = {rank for rank, (heartbeat, _) in self.newest.items() if heartbeat.step <= front - 2}
        ranks = [rank for rank in idle_s if rank in late and idle_s[rank] > limit_s]
        if not ranks and min(idle_s.values()) > limit_s:
            ranks = self._ranks_behind(now)
        if not ranks:
            return ""
        waited_s = max(idle_s[rank] for rank in ranks)
        first = self.newest[ranks[0]][0]
        frame = f" in {first.frame}" if first.frame else ""
        others = len(self.newest) - len(ranks)
        return (
            f"{describe_ranks(ranks, self.hosts)} {'have' if len(ranks) > 1 else 'has'} made no "
            f"progress for {waited_s:,.0f} s at {first.where}{frame}"
            + (f"; the other {others} wait" if others else "")
        )

    def _ranks_behind(self, now: float) -> list[int]:
        """The ranks that the others wait for; all ranks if nothing tells them apart."""
        if silent := self._silent(now):
            return silent
        positions = {rank: heartbeat.position for rank, (heartbeat, _) in self.newest.items()}
        last = [rank for rank, at in positions.items() if at == min(positions.values())]
        if len(last) < len(positions):
            return last
        # all are in the same phase: most execute the line that waits, the hung ones another
        frames = {rank: heartbeat.frame for rank, (heartbeat, _) in self.newest.items()}
        usual = statistics.mode(frames.values())
        odd = [rank for rank, frame in frames.items() if frame != usual]
        return odd if odd and 2 * len(odd) < len(frames) else list(frames)

    def _work_s(self) -> dict[int, float]:
        # a copy of the items: the main thread calls this while the monitor's thread updates
        items = list(self.newest.items())
        return {rank: newest.work_s for rank, (newest, _) in items if newest.work_s}

    def straggler(self) -> str:
        """A note that names the slowest process; '' if none is much slower than the others."""
        work_s = self._work_s()
        if len(work_s) < max(2, len(self.hosts) // 2):
            return ""
        # the lower median: with two processes the faster one is the measure
        median_s = statistics.median_low(work_s.values())
        slowest = max(work_s, key=work_s.__getitem__)
        if work_s[slowest] < max(STRAGGLER_RATIO * median_s, median_s + STRAGGLER_S):
            return ""
        return (
            f"{describe_ranks([slowest], self.hosts)} is slow: {work_s[slowest]:.3g} s of its own "
            f"work per step, where the median is {median_s:.3g} s; the others wait for it"
        )

    def figures(self) -> dict[str, float]:
        """step_s_median, step_s_max (seconds per step), work_s_median, work_s_max, slowest_rank."""
        work_s = self._work_s()
        steps_s = [newest.step_s for newest, _ in list(self.newest.values()) if newest.step_s]
        if not work_s or not steps_s:
            return {}
        return {
            "step_s_median": statistics.median(steps_s),
            "step_s_max": max(steps_s),
            "work_s_median": statistics.median(work_s.values()),
            "work_s_max": max(work_s.values()),
            "slowest_rank": max(work_s, key=work_s.__getitem__),
        }
