"""Process 0's end of the connections: registers ranks, receives heartbeats, ends the run for all.

One daemon thread with one selector serves every connection, so that hundreds may connect at once
and none can block it. It sends what it decides (release, or a Termination) to every process; the
first Termination counts.
"""

import contextlib
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from sabia.core import notes
from sabia.core.parallel.health.connection import Connection, Message, PeerDisconnected, WakeSocket
from sabia.core.parallel.health.heartbeat import Heartbeat, HeartbeatTable
from sabia.core.parallel.health.rendezvous import RankRegistry, RankReport
from sabia.core.parallel.health.shutdown import RESUME_HINT, Termination
from sabia.core.parallel.world import describe_ranks

REPORT_TIMEOUT_S = 10.0
RECONNECT_TIMEOUT_S = 10.0  # of a process whose connection broke before the start
DEATHS_TOGETHER_S = 0.5  # deaths that one line names: a node ends with all its processes
LINGER_S = 2.0
LATE_LINGER_S = 10.0  # before the start
STRAGGLER_NOTE_EVERY_S = 600.0
SPARE_FILES = 256
ORDERLY_CODES = (0, 75)


class RankMonitor:
    """Runs from registration to the end of the run; `ready` is set at release or Termination."""

    def __init__(
        self,
        listener: socket.socket,
        registry: RankRegistry,
        token: str,
        *,
        heartbeats: HeartbeatTable,
        own_heartbeat: Callable[[], Heartbeat],
        on_termination: Callable[[Termination], None],
        timeout_s: float,
    ) -> None:
        """`own_heartbeat`: that of process 0 itself; `on_termination` must return at once."""
        self.registry, self.token, self.heartbeats = registry, token, heartbeats
        self.own_heartbeat, self.on_termination = own_heartbeat, on_termination
        self.timeout_s, self.deadline = timeout_s, time.monotonic() + timeout_s
        self.connections: dict[int, Connection] = {}  # by rank
        self.pending: dict[Connection, float] = {}  # not registered yet, and until when they may
        self.dead: dict[int, float] = {}  # ranks, and when their connection was lost
        self.termination: Termination | None = None
        self.released, self.ready = False, threading.Event()
        self.accepted = 0
        self._shutdown_request: tuple[int, str] | None = None
        self._checked = self._noted = 0.0
        self._listener, self._wakeup = listener, WakeSocket()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup.socket, selectors.EVENT_READ)
        # let this process hold a connection to each other one, as far as the hard limit allows
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = registry.size + 2 * SPARE_FILES
        if hard != resource.RLIM_INFINITY:
            needed = min(needed, hard)
        if soft != resource.RLIM_INFINITY and soft < needed:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        self._thread = threading.Thread(target=self._run, name="sabia monitor", daemon=True)

    def start(self) -> None:
        """Begin to accept connections."""
        self._thread.start()

    def shut_down(self, code: int, reason: str) -> None:
        """Tell all processes that process 0 ends: in order (0, 75), or because it failed."""
        self._shutdown_request = self._shutdown_request or (code, reason)
        self._wakeup.wake()

    def close(self) -> None:
        """Shut down in order unless `shut_down` was called before; waits 3 s at most (11 s before
        the start)."""
        self.shut_down(0, "")
        self._thread.join(LATE_LINGER_S + 1)

    def sockets(self) -> list[socket.socket]:
        """All open sockets, for a forked child to close."""
        connections = (*self.connections.values(), *self.pending)
        return [self._listener, self._wakeup.socket, *(each.socket for each in connections)]

    def _run(self) -> None:
        try:
            while self._shutdown_request is None:
                self._serve(min(self.heartbeats.interval_s, 0.25))
                self._check(time.monotonic())
            self._end(*self._shutdown_request)
        except Exception as error:
            reason = f"process 0 cannot monitor the other processes any more: {error!r}"
            self._terminate(Termination(1, reason))
        finally:
            for connection in (*self.connections.values(), *self.pending):
                connection.close()
            self._selector.close()
            self._listener.close()
            self._wakeup.close()

    # -- messages

    def _serve(self, seconds: float) -> None:
        """Wait so long for events, and handle those that have come."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wakeup.socket:
                self._wakeup.clear()
            else:
                connection: Any = key.fileobj
                self._read(connection)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # no more connections wait, or no more files
            for _ in range(SPARE_FILES):
                connection = Connection(self._listener.accept()[0])
                self.accepted += 1
                self.pending[connection] = time.monotonic() + REPORT_TIMEOUT_S
                self._selector.register(connection, selectors.EVENT_READ)
                # too many that never report: drop the oldest
                if len(self.pending) > self.registry.size + SPARE_FILES // 2:
                    self._drop(next(iter(self.pending)))

    def _read(self, connection: Connection) -> None:
        try:
            for message in connection.receive():
                if connection in self.pending:
                    self._register(connection, message)
                else:
                    self._handle(connection, message)
        except PeerDisconnected as error:
            self._lose(connection, str(error))

    def _register(self, connection: Connection, message: Message) -> None:
        report = RankReport.of_message(message, self.token)
        problem = self.registry.add(report)
        del self.pending[connection]
        connection.send({"accepted": True})
        if problem:
            # it stays pending, so that its rank is still that of the process that came first
            self.pending[connection] = time.monotonic() + REPORT_TIMEOUT_S
            termination = Termination(1, problem)
            self._terminate(termination)
            connection.send(termination.message())
            return
        if report.rank in self.connections:  # a retry: only the new connection counts
            self._drop(self.connections[report.rank])
        self.connections[report.rank] = connection
        self.dead.pop(report.rank, None)
        if self.termination:
            connection.send(self.termination.message())
        elif self.released:
            connection.send({"go": True})

    def _handle(self, connection: Connection, message: Message) -> None:
        """A heartbeat, or the last message of a process that ends."""
        rank = next((rank for rank, known in self.connections.items() if known is connection), None)
        if rank is None:
            return
        if "heartbeat" in message:
            with contextlib.suppress(TypeError, ValueError, AttributeError):
                heartbeat = Heartbeat.of_message(message["heartbeat"])
                self.heartbeats.update(rank, heartbeat, time.monotonic())
        elif "bye" in message:
            self._drop(connection)
            self.heartbeats.drop(rank)
            code, reason = message.get("bye"), str(message.get("reason"))
            name = describe_ranks([rank], self.registry.hosts)
            if code not in ORDERLY_CODES and isinstance(code, int):
                self._terminate(Termination(code, f"{name} failed: {reason}"))
            elif not self.released:
                self._terminate(_stopped_early(name))

    def _lose(self, connection: Connection, reason: str) -> None:
        """A connection broke: a pending one is refused, of a registered one the process died."""
        if connection in self.pending:
            with contextlib.suppress(PeerDisconnected):
                connection.send({"refused": reason})
        for rank, known in self.connections.items():
            if known is connection:
                self.dead[rank] = time.monotonic()
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        self.pending.pop(connection, None)
        items = self.connections.items()
        self.connections = {rank: known for rank, known in items if known is not connection}
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()

    def _send_to_all(self, message: Message | None) -> None:
        for connection in list(self.connections.values()):
            try:
                connection.send(message)
            except PeerDisconnected as error:
                self._lose(connection, str(error))

    # -- checks

    def _check(self, now: float) -> None:
        for connection in [each for each, until in self.pending.items() if now > until]:
            self._drop(connection)
        if self.termination:
            return
        self._fail_dead_ranks(now)
        if not self.released:
            self._check_registration(now)
        elif now - self._checked >= self.heartbeats.interval_s:
            self._checked = now
            self._check_heartbeats(now)

    def _fail_dead_ranks(self, now: float) -> None:
        """End the run when processes have died (before the start: and have not reconnected)."""
        allowed_s = DEATHS_TOGETHER_S if self.released else RECONNECT_TIMEOUT_S
        if not self.dead or now - min(self.dead.values()) < allowed_s:
            return
        name = describe_ranks(list(self.dead), self.registry.hosts)
        if not self.released:
            self._terminate(Termination(1, f"{name} died before the start; find out why"))
            return
        last = self.heartbeats.drop(min(self.dead))
        reason = f"{name} died, last heartbeat at {last.where}; {RESUME_HINT}"
        self._terminate(Termination(75, reason))

    def _check_registration(self, now: float) -> None:
        """Release all once every rank is registered and none differs; give up at the deadline."""
        if not self.registry.complete or self.dead:
            if now > self.deadline:
                self._terminate(Termination(1, self.registry.missing(self.timeout_s)))
            return
        problem = self.registry.differing()
        if problem:
            self._terminate(Termination(1, problem))
            return
        warning = self.registry.settings_differ()
        if warning:
            notes.warn(warning)
        self.heartbeats.hosts = self.registry.hosts
        for rank in range(self.registry.size):
            self.heartbeats.update(rank, Heartbeat(), now)
        self.released = True
        self._send_to_all({"go": True})
        self.ready.set()

    def _check_heartbeats(self, now: float) -> None:
        """End the run if a rank hangs; note a rank that is slow."""
        self.heartbeats.update(0, self.own_heartbeat(), now)
        self._send_to_all(None)  # what earlier calls could not send
        hung = self.heartbeats.hung(now)
        if hung:
            self._terminate(Termination(75, f"{hung}; {RESUME_HINT}", hung=True))
        elif now - self._noted >= STRAGGLER_NOTE_EVERY_S and (slow := self.heartbeats.straggler()):
            self._noted = now
            notes.note(slow)

    # -- the end

    def _terminate(self, termination: Termination) -> None:
        """End the run everywhere; only the first call counts."""
        if self.termination:
            return
        self.termination = termination
        self._send_to_all(termination.message())
        self.ready.set()
        self.on_termination(termination)

    def _end(self, code: int, reason: str) -> None:
        """Tell all processes that process 0 ends, and read what they still send.

        To close a connection with unread messages resets it, and the peer could lose ours. Before
        the start, processes that have not connected yet are told as well.
        """
        name = describe_ranks([0], self.registry.hosts)
        if not self.termination:
            if code not in ORDERLY_CODES:
                self.termination = Termination(code, f"{name} failed: {reason}")
            elif not self.released:
                self.termination = _stopped_early(name)
            self._send_to_all(self.termination.message() if self.termination else {"bye": code})
        for connection in self.connections.values():
            connection.finish_sending()
        late = not self.released and time.monotonic() < self.deadline
        until = time.monotonic() + (LATE_LINGER_S if late else LINGER_S)
        while time.monotonic() < until:
            if not self.connections and not (late and not self.registry.complete):
                return
            self._serve(0.1)


def _stopped_early(name: str) -> Termination:
    return Termination(75, f"{name} was stopped before the start: run again")
