"""Graceful shutdown: SIGTERM, SIGUSR1 and SIGUSR2 set a flag that the work checks.

Data stages check it between batches and trainers between steps; both keep completed work and exit
with 75. Slurm sends SIGTERM on scancel, requeue and preemption, and USR1 or USR2 for `--signal`;
all three are treated alike. Where nothing checks the flag for GRACE_S (a model is loaded, another
process is waited for), Interrupted is raised in the main thread, as KeyboardInterrupt is at Ctrl-C;
except in a loop that is `polling` the flag, because it saves its state first.
"""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from sabia.core.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
GRACE_S = 5.0
_received: list[int] = []
_loops: list[str] = []  # that are polling


def install() -> None:
    """Install the signal handlers; only in the main thread of a process."""
    signal.signal(signal.SIGALRM, _raise)
    for number in SIGNALS:
        signal.signal(number, _remember)


def _remember(number: int, _frame: FrameType | None) -> None:
    _received.append(number)
    if not _loops:
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)


def _raise(_number: int, _frame: FrameType | None) -> None:
    if not _loops:
        check()


@contextlib.contextmanager
def polling(loop: str) -> Iterator[None]:
    """Context of a loop, named for tracebacks, that asks `requested` at every step and saves its
    state: nothing is raised in it between two steps."""
    _loops.append(loop)
    try:
        yield
    finally:
        _loops.remove(loop)
    if _received and not _loops:  # a signal during the last step
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)


def requested() -> bool:
    """True once a stop signal has arrived; nothing is raised by itself after that."""
    if _received:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return bool(_received)


def check() -> None:
    """Raise Interrupted if a stop signal has arrived."""
    if _received:
        signal.setitimer(signal.ITIMER_REAL, 0)
        name = signal.Signals(_received[0]).name
        raise Interrupted(
            f"stopped by {name}; completed work is kept: run the same command to resume"
        )
