"""Graceful shutdown: SIGTERM, SIGUSR1 and SIGUSR2 set a flag that the work checks.

Data stages check it between batches and trainers between steps; both keep completed work and exit
with 75. Slurm sends SIGTERM on scancel, requeue and preemption, and USR1 or USR2 for `--signal`;
all three are treated alike. Where nothing checks the flag for GRACE_S (a model is loaded, another
process is waited for), Interrupted is raised in the main thread, as KeyboardInterrupt is at Ctrl-C;
except in a loop that is `polling` the flag, because it saves its state first.

Python runs a handler between two steps of the main thread: a signal that arrives right before a
system call blocks would wait for the end of that call. So the number of each signal is also written
to a pipe (signal.set_wakeup_fd), and a thread that reads it sends SIGALRM to the main thread, which
ends the call: at once, and again until the signal is answered.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from sabia.core.errors import Interrupted

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
GRACE_S = 5.0
SOON_S, AGAIN_S = 0.05, 0.5  # from a signal to the first SIGALRM, and between two of them
TIMES = 3  # SIGALRM is sent at least: it can arrive right before a call, too
_received: list[int] = []
_loops: list[str] = []  # that are polling
_due: list[float] = []  # when Interrupted is raised, on time.monotonic's clock; empty: not at all


def install() -> None:
    """Install the signal handlers; only in the main thread of a process."""
    signal.signal(signal.SIGALRM, _raise)
    for number in SIGNALS:
        signal.signal(number, _remember)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_interrupt_calls, args=(reader,), daemon=True).start()


def _interrupt_calls(reader: int) -> None:
    """Send SIGALRM to the main thread soon after each signal, and while one is not answered."""
    main, left = threading.main_thread().ident or 0, 0
    while True:
        waits = AGAIN_S if left or _due else None
        if select.select([reader], [], [], waits)[0]:
            if set(os.read(reader, 512)) == {signal.SIGALRM}:
                continue  # sent here
            left = TIMES
            time.sleep(SOON_S)
        if left or _due:
            left = max(left - 1, 0)
            signal.pthread_kill(main, signal.SIGALRM)


def _remember(number: int, _frame: FrameType | None) -> None:
    _received.append(number)
    if not _loops:
        _due[:] = [time.monotonic() + GRACE_S]


def _raise(_number: int, _frame: FrameType | None) -> None:
    if _due and not _loops and time.monotonic() >= _due[0]:
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
        _due[:] = [time.monotonic() + GRACE_S]
        os.kill(os.getpid(), signal.SIGALRM)  # wakes the thread


def requested() -> bool:
    """True once a stop signal has arrived; nothing is raised by itself after that."""
    if _received:
        _due.clear()
    return bool(_received)


def check() -> None:
    """Raise Interrupted if a stop signal has arrived."""
    if _received:
        _due.clear()
        name = signal.Signals(_received[0]).name
        raise Interrupted(
            f"stopped by {name}; completed work is kept: run the same command to resume"
        )
