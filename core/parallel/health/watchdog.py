"""The watchdog of a run of several processes: registration at the start, heartbeats until the end.

The trainer reports its progress, `watchdog.enter_phase(step, "backward")`: a few microseconds and
no I/O. A daemon thread of each process sends that to process 0 every 5 s over the connection of the
registration (see `rendezvous`, `monitor`). When a process dies (its connection closes without a
last message, or its host does not answer for 80 s), fails, or blocks the run longer than the hang
time-out (see `heartbeat`; 30 minutes by default, more after long pauses), process 0 tells all, and
each ends with one line that names the rank, its host and its last step and phase: code 75 for a
death or a hang (run again to resume), the error's own code for a failure.

The main thread's next `enter_phase` raises that end as an exception. A main thread that does not
call it within the grace time (it is inside a collective) is not waited for: the daemon thread
writes all threads' stacks into the run's directory, prints the line and ends the process. An
exception that a lost peer causes in a collective (connection reset) is replaced by the termination
that explains it. `patience_s` announces a phase that may be long; the phases in
`heartbeat.WAITING_PHASES` count as waiting for others, which distinguishes stragglers from the
ranks that wait for them.

A run of one process has no watchdog, `enter_phase` does nothing, and nothing else of this package
is imported.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sabia.core import stop
from sabia.core.errors import SabiaError
from sabia.core.parallel.world import World

if TYPE_CHECKING:
    from sabia.core.parallel.health.heartbeat import HeartbeatTable
    from sabia.core.parallel.health.heartbeat_client import HeartbeatClient
    from sabia.core.parallel.health.monitor import RankMonitor
    from sabia.core.parallel.health.shutdown import Termination

TERMINATION_WAIT_S = 5.0


@dataclass(frozen=True)
class WatchdogConfig:
    """What the trainer requires of the watchdog; times in seconds.

    must_match: name → text that must be equal in all processes (such as a hash of the options);
    directory: the run's, for the stacks; start_timeout_s: 0 means World.timeout_s.
    """

    must_match: Mapping[str, str] = field(default_factory=dict)
    hang_timeout_s: float = 1800.0
    interval_s: float = 5.0
    grace_s: float = 5.0
    start_timeout_s: float = 0.0
    directory: Path | None = None


class Watchdog:
    """The watchdog of one process of several; use `opened`."""

    def __init__(self, world: World, config: WatchdogConfig) -> None:
        from sabia.core.parallel.health.progress_tracker import ProgressTracker

        self.world, self.config = world, config
        self.progress = ProgressTracker(config.interval_s)
        self.termination: Termination | None = None
        self._terminated, self._closed = threading.Event(), threading.Event()
        self._peer: RankMonitor | HeartbeatClient | None = None

    def start(self) -> None:
        """Register, and wait for the release of all ranks; raises Failed, Interrupted."""
        from sabia.core.parallel.health import rendezvous

        world, config = self.world, self.config
        timeout_s = config.start_timeout_s or world.timeout_s
        size = {"number of processes": str(world.size)}
        report = rendezvous.RankReport(
            world.rank,
            must_match={**rendezvous.versions(), **size, **config.must_match},
            settings=rendezvous.settings_fingerprint(),
        )
        token = rendezvous.job_token(world.launcher)
        if not world.leads:
            from sabia.core.parallel.health.heartbeat_client import HeartbeatClient

            registration = rendezvous.RegistrationClient(
                world.host, world.port, world.size, report, token, timeout_s, stop.check
            )
            client = self._peer = HeartbeatClient(
                registration.register(),
                self.progress,
                config.interval_s,
                self._on_termination,
                world.host,
            )
            client.wait_for_release(timeout_s + 60)
            client.start()
            return
        from sabia.core.parallel.health.heartbeat import HeartbeatTable
        from sabia.core.parallel.health.monitor import RankMonitor
        from sabia.core.parallel.world import hosts_of_ranks

        monitor = self._peer = RankMonitor(
            rendezvous.listen(world.host, world.port, world.size),
            rendezvous.RankRegistry(world.size, report, hosts_of_ranks(os.environ, world.size)),
            token,
            heartbeats=HeartbeatTable({}, config.hang_timeout_s, config.interval_s),
            own_heartbeat=self.progress.heartbeat,
            on_termination=self._on_termination,
            timeout_s=timeout_s,
        )
        monitor.start()
        while not monitor.ready.wait(0.2):
            stop.check()
        if monitor.termination:
            raise monitor.termination.error()
        self.progress.restart_clock()

    def enter_phase(self, step: int, phase: str, patience_s: float = 0.0) -> None:
        """See the module; raises Interrupted or Failed when the run has been ended."""
        if self.termination:
            raise self.termination.error()
        self.progress.enter_phase(step, phase, patience_s)

    def figures(self) -> dict[str, float]:
        """HeartbeatTable.figures at process 0, {} elsewhere."""
        heartbeats: HeartbeatTable | None = getattr(self._peer, "heartbeats", None)
        return heartbeats.figures() if heartbeats else {}

    @contextlib.contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Tell the other processes of an exception that ends this one; replace an exception that
        the end of another process has caused."""
        try:
            yield
        except BaseException as error:
            cause: BaseException = error
            if isinstance(error, Exception) and not isinstance(error, SabiaError):
                # a collective may break before process 0 has noticed the death and told us
                self._terminated.wait(TERMINATION_WAIT_S)
                cause = self.termination.error() if self.termination else error
            if self._peer:
                from sabia.core.parallel.health.shutdown import exit_code

                reason = " ".join(str(cause).split()) or repr(cause)
                self._peer.shut_down(exit_code(cause), reason)
            if cause is error:
                raise
            raise cause from error

    def _on_termination(self, termination: Termination) -> None:
        if self.termination is None:
            self.termination = termination
            self._terminated.set()
            threading.Thread(target=self._enforce, args=(termination,), daemon=True).start()

    def _enforce(self, termination: Termination) -> None:
        """End the process if the main thread does not."""
        if not self._closed.wait(self.config.grace_s):
            from sabia.core.parallel.health.shutdown import terminate_process

            terminate_process(termination, self.world.rank, self.config.directory)

    def close(self) -> None:
        """Shut down in order; the other processes may continue to their own end."""
        if self._peer:
            self._peer.close()
        self._closed.set()

    def close_in_child(self) -> None:
        """In a forked child: close its copies of the sockets, which would stay open after the death
        of this process and hide it."""
        if self._peer:
            for each in self._peer.sockets():
                with contextlib.suppress(OSError):
                    os.close(each.detach())


_current: Watchdog | None = None


def enter_phase(step: int, phase: str, patience_s: float = 0.0) -> None:
    """This process enters a phase of a step (steps count from 1; 0 is before the first).

    patience_s: how much longer than the hang time-out the phase may take.
    """
    if _current:
        _current.enter_phase(step, phase, patience_s)


def figures() -> dict[str, float]:
    """At process 0 the steps' times over all processes (see HeartbeatTable); elsewhere {}."""
    return _current.figures() if _current else {}


def terminated() -> bool:
    """Whether the run has been ended because a process died, failed or hangs."""
    return bool(_current and _current.termination)


@contextlib.contextmanager
def reporting_errors() -> Iterator[None]:
    """See Watchdog.reporting_errors; for a block inside `opened` after which a backend may wait for
    the other processes."""
    with _current.reporting_errors() if _current else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def opened(world: World, config: WatchdogConfig | None = None) -> Iterator[Watchdog | None]:
    """Register this rank and run the watchdog until the end of the block; None for one process.

    Raises Failed when the registration fails, Interrupted when a process dies later.
    """
    global _current
    if world.size == 1:
        yield None
        return
    watchdog = Watchdog(world, config or WatchdogConfig())
    try:
        with watchdog.reporting_errors():
            watchdog.start()
            _current = watchdog
            yield watchdog
    finally:
        _current = None
        watchdog.close()


def _close_in_child() -> None:
    global _current
    if _current:
        _current.close_in_child()
        _current = None


os.register_at_fork(after_in_child=_close_in_child)
