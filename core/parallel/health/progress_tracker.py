"""The progress of this process, tracked in microseconds, and the heartbeat made of it."""

import os
import sys
import threading
import time
from dataclasses import replace

from sabia.core.parallel.health.heartbeat import WAITING_PHASES, Heartbeat

SMOOTHING = 0.2  # weight of the newest step in the exponential moving averages
FRAME_AFTER_INTERVALS = 2


class ProgressTracker:
    """The progress of this process; written by its main thread, read by the heartbeat's thread.

    `_entered`, the phase that the main thread entered last and when, is replaced as a whole (one
    assignment), so neither thread needs a lock.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._entered = Heartbeat(), time.monotonic()
        self._longest_pause_s = self._work_s = self._mean_step_s = self._mean_work_s = 0.0
        self._step_began: float | None = None
        self._main = threading.main_thread().ident

    def enter_phase(self, step: int, phase: str, patience_s: float = 0.0) -> None:
        """The main thread enters this phase of this step."""
        now, (old, since) = time.monotonic(), self._entered
        pause_s = now - since
        if old.phase not in WAITING_PHASES:
            self._work_s += pause_s
        # neither the time before the first phase nor one announced as long raises the limit
        if (old.step or old.phases) and not old.patience_s:
            self._longest_pause_s = max(self._longest_pause_s, pause_s)
        phases = old.phases + 1
        if step != old.step:
            phases = 1
            if self._step_began is not None:
                # mean ← mean + share · (newest - mean), which starts at the first step's value
                share = SMOOTHING if self._mean_step_s else 1.0
                self._mean_step_s += share * (now - self._step_began - self._mean_step_s)
                self._mean_work_s += share * (self._work_s - self._mean_work_s)
            self._step_began, self._work_s = now, 0.0
        self._entered = Heartbeat(step, phase, phases, patience_s=patience_s), now

    def restart_clock(self) -> None:
        """The same phase continues, but the process has made progress in it."""
        self._entered = self._entered[0], time.monotonic()

    def heartbeat(self) -> Heartbeat:
        """The progress as it is reported."""
        entered, since = self._entered
        idle_s = time.monotonic() - since
        return replace(
            entered,
            idle_s=idle_s,
            longest_pause_s=self._longest_pause_s,
            step_s=self._mean_step_s,
            work_s=self._mean_work_s,
            frame=self._frame() if idle_s > FRAME_AFTER_INTERVALS * self._interval_s else "",
        )

    def _frame(self) -> str:
        """'loop.py:120 _batch': the innermost Python frame of the main thread."""
        frame = sys._current_frames().get(self._main or 0)
        if frame is None:
            return ""
        code = frame.f_code
        return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"
