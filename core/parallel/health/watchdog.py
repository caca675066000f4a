"""The watch over the processes of a run: a roll call at the start, heartbeats until the end.

The trainer says where it is, `watch.at(step, "backward")`: a few microseconds and no I/O. A daemon
thread of each process reports that to process 0 every 5 s over the connection of the roll call
(see `rollcall`, `hub`). When a process dies (its connection closes without a farewell, or its
host does not answer for 80 s), fails, or holds the run up longer than the hang time-out (see
`board`; 30 minutes by default, more after long pauses), process 0 tells all, and each ends with one
line that names the rank, its host and its last step and phase: code 75 for a death or a hang (run
again to resume from the last checkpoint), the error's own code for a failure.

The next `at` of the main thread raises that end as an exception. A main thread that does not come
there within the grace time (it sits in a collective) is not waited for: the daemon thread writes
all threads' stacks into the run's directory, prints the line and ends the process. An exception
that a lost peer causes in a collective (connection reset) is replaced by the end that explains it.
`patience_s` announces a phase that may be long; the phases in `board.WAITING` count as waiting for
others, so that stragglers can be told from those that wait for them.

Without other processes there is no watch, and `at` does nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sabia.core import stop
from sabia.core.errors import SabiaError
from sabia.core.parallel.health import rendezvous
from sabia.core.parallel.health.heartbeat import Board
from sabia.core.parallel.health.heartbeat_client import Client
from sabia.core.parallel.health.monitor import Hub
from sabia.core.parallel.health.progress_tracker import Marks
from sabia.core.parallel.health.shutdown import End, end_process, exit_code
from sabia.core.parallel.slurm_hosts import hosts_of_ranks
from sabia.core.parallel.world import World

VERDICT_S = 5.0


@dataclass(frozen=True)
class Guard:
    """What the trainer wants of the watch; times in seconds.

    same: name → text that must be equal in all processes (a hash of the options, say); directory:
    the run's, for the stacks; start_timeout_s: 0 means World.timeout_s.
    """

    same: Mapping[str, str] = field(default_factory=dict)
    hang_timeout_s: float = 1800.0
    interval_s: float = 5.0
    grace_s: float = 5.0
    start_timeout_s: float = 0.0
    directory: Path | None = None


class Watch:
    """The watch of one process of several; use `opened`."""

    def __init__(self, world: World, guard: Guard) -> None:
        self.world, self.guard, self.marks = world, guard, Marks(guard.interval_s)
        self.ending: End | None = None
        self._ended, self._closed = threading.Event(), threading.Event()
        self._end: Hub | Client | None = None

    def start(self) -> None:
        """The roll call; raises Failed, Interrupted."""
        world, guard = self.world, self.guard
        within_s = guard.start_timeout_s or world.timeout_s
        same = {**rendezvous.versions(), "number of processes": str(world.size), **guard.same}
        report = rendezvous.Report(
            world.rank, local_rank=world.local_rank, same=same, settings=rendezvous.settings()
        )
        if world.leads:
            self._lead(report, within_s)
        else:
            self._follow(report, within_s)

    def _lead(self, report: rendezvous.Report, within_s: float) -> None:
        world, guard = self.world, self.guard
        register = rendezvous.Register(world.size, report, hosts_of_ranks(os.environ, world.size))
        hub = self._end = Hub(
            rendezvous.listen(world.host, world.port, world.size),
            register,
            rendezvous.job_token(world.launcher),
            board=Board({}, guard.hang_timeout_s, guard.interval_s),
            own_beat=self.marks.beat,
            on_end=self._on_end,
            within_s=within_s,
        )
        hub.start()
        while not hub.ready.wait(0.2):
            stop.check()
        if hub.end:
            raise hub.end.error()
        self.marks.alive()

    def _follow(self, report: rendezvous.Report, within_s: float) -> None:
        world, guard = self.world, self.guard
        token = rendezvous.job_token(world.launcher)
        caller = rendezvous.Caller(
            world.host, world.port, world.size, report, token, within_s, stop.check
        )
        client = self._end = Client(
            caller.call(), self.marks, guard.interval_s, self._on_end, world.host
        )
        client.wait_for_go(within_s + 60)
        client.start()

    def at(self, step: int, phase: str, patience_s: float = 0.0) -> None:
        """See the module; raises Interrupted or Failed when the run has ended meanwhile."""
        if self.ending:
            raise self.ending.error()
        self.marks.at(step, phase, patience_s)

    def figures(self) -> dict[str, float]:
        """Board.figures at process 0, {} elsewhere."""
        return self._end.board.figures() if isinstance(self._end, Hub) else {}

    @contextlib.contextmanager
    def parting(self) -> Iterator[None]:
        """Tell the others of an exception that ends this process; replace one that another's end
        has caused."""
        try:
            yield
        except BaseException as error:
            cause = self._cause(error)
            if self._end:
                self._end.leave(exit_code(cause), " ".join(str(cause).split()) or repr(cause))
            if cause is error:
                raise
            raise cause from error

    def _cause(self, error: BaseException) -> BaseException:
        if isinstance(error, SabiaError) or not isinstance(error, Exception):
            return error
        self._ended.wait(VERDICT_S)
        return self.ending.error() if self.ending else error

    def _on_end(self, end: End) -> None:
        if self.ending is None:
            self.ending = end
            self._ended.set()
            threading.Thread(target=self._enforce, args=(end,), daemon=True).start()

    def _enforce(self, end: End) -> None:
        """End the process if the main thread does not."""
        if not self._closed.wait(self.guard.grace_s):
            end_process(end, self.world.rank, self.guard.directory)

    def close(self) -> None:
        """Leave; the others may go on to their own end."""
        if self._end:
            self._end.close()
        self._closed.set()

    def forget(self) -> None:
        """In a forked child: close its copies, so that they do not outlive this process."""
        if self._end:
            for each in self._end.sockets():
                with contextlib.suppress(OSError):
                    os.close(each.detach())


_current: Watch | None = None


def at(step: int, phase: str, patience_s: float = 0.0) -> None:
    """This process has come to a phase of a step (steps count from 1; 0 is before the first).

    patience_s: how much longer than the hang time-out the phase may take.
    """
    if _current:
        _current.at(step, phase, patience_s)


def phase(name: str) -> None:
    """Another phase of the same step, for code that does not know the step's number."""
    if _current:
        _current.marks.phase(name)


def figures() -> dict[str, float]:
    """At process 0 the steps' times over all processes (see Board.figures); elsewhere {}."""
    return _current.figures() if _current else {}


def ended() -> bool:
    """Whether the run has been ended because a process died, failed or hangs."""
    return bool(_current and _current.ending)


@contextlib.contextmanager
def parting() -> Iterator[None]:
    """See Watch.parting; for a block inside `opened` after which a backend may wait for others."""
    with _current.parting() if _current else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def opened(world: World, guard: Guard | None = None) -> Iterator[Watch | None]:
    """Take the roll and watch until the end of the block; None where there is one process.

    Raises Failed when the roll call fails, Interrupted when a process dies later.
    """
    global _current
    if world.size == 1:
        yield None
        return
    watch = Watch(world, guard or Guard())
    try:
        with watch.parting():
            watch.start()
            _current = watch
            yield watch
    finally:
        _current = None
        watch.close()


def _forget_in_child() -> None:
    global _current
    if _current:
        _current.forget()
        _current = None


os.register_at_fork(after_in_child=_forget_in_child)
