"""Where this process is in its run: marks that cost microseconds, and the beat made of them."""

import os
import sys
import threading
import time
from dataclasses import dataclass

from sabia.core.parallel.health.heartbeat import WAITING, Beat

SMOOTHING = 0.2
FRAME_AFTER_BEATS = 2


@dataclass(frozen=True)
class _Mark:
    """The last `at`."""

    step: int
    phase: str
    marks: int
    since: float
    patience: float


class Marks:
    """Where this process is; written by the main thread, read by the watching one."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._mark = _Mark(0, "start", 0, time.monotonic(), 0.0)
        self._longest = self._work = self._step_s = self._work_s = 0.0
        self._began: float | None = None  # the first whole step is the second: compiling, caches
        self._main = threading.main_thread().ident

    def at(self, step: int, phase: str, patience_s: float = 0.0) -> None:
        """The main thread has come to this phase of this step."""
        now, old = time.monotonic(), self._mark
        pause = now - old.since
        if old.phase not in WAITING:
            self._work += pause
        if old.step or old.marks:
            self._longest = max(self._longest, 0.0 if old.patience else pause)
        marks = old.marks + 1
        if step != old.step:
            self._end_step(now)
            marks = 1
        self._mark = _Mark(step, phase, marks, now, patience_s)

    def _end_step(self, now: float) -> None:
        if self._began is not None:
            share = SMOOTHING if self._step_s else 1.0
            self._step_s += share * (now - self._began - self._step_s)
            self._work_s += share * (self._work - self._work_s)
        self._began, self._work = now, 0.0

    def phase(self, name: str) -> None:
        """The same step, another phase."""
        self.at(self._mark.step, name, self._mark.patience)

    def alive(self) -> None:
        """The same phase goes on, and something has been done in it."""
        old = self._mark
        self._mark = _Mark(old.step, old.phase, old.marks, time.monotonic(), old.patience)

    def beat(self) -> Beat:
        """As reported."""
        mark = self._mark
        idle = time.monotonic() - mark.since
        return Beat(
            step=mark.step,
            phase=mark.phase,
            marks=mark.marks,
            idle=idle,
            longest=self._longest,
            patience=mark.patience,
            step_s=self._step_s,
            work_s=self._work_s,
            frame=self._frame() if idle > FRAME_AFTER_BEATS * self._interval_s else "",
        )

    def _frame(self) -> str:
        """'loop.py:120 _batch': the innermost Python frame of the main thread."""
        frame = sys._current_frames().get(self._main or 0)
        if frame is None:
            return ""
        code = frame.f_code
        return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"
