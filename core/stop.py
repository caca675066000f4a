"""Graceful shutdown: SIGTERM, SIGUSR1 and SIGUSR2 set a flag that the work checks.

Data stages check it between batches and trainers between steps; both keep completed work and exit
with 75. Slurm sends SIGTERM on scancel, requeue and preemption, and USR1 or USR2 for `--signal`;
all three are treated alike.
"""

import signal
from types import FrameType

from sabia.core.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_received: list[int] = []


def install() -> None:
    """Install the signal handlers; only in the main thread of a process."""
    for number in SIGNALS:
        signal.signal(number, _remember)


def _remember(number: int, _frame: FrameType | None) -> None:
    _received.append(number)


def requested() -> bool:
    """True once a stop signal has arrived."""
    return bool(_received)


def check() -> None:
    """Raise Interrupted if a stop signal has arrived."""
    if _received:
        name = signal.Signals(_received[0]).name
        raise Interrupted(
            f"stopped by {name}; completed work is kept: run the same command to resume"
        )
