"""Every other process's end of the connection: waits for the start, sends heartbeats, ends."""

import contextlib
import selectors
import threading
import time
from collections.abc import Callable

from sabia.core import notes, stop
from sabia.core.errors import Failed, Interrupted
from sabia.core.parallel.health.connection import Connection, PeerDisconnected, WakeSocket
from sabia.core.parallel.health.progress_tracker import ProgressTracker
from sabia.core.parallel.health.shutdown import MAX_REASON_CHARS, RESUME_HINT, Termination
from sabia.core.parallel.world import describe_ranks


class HeartbeatClient:
    """Sends heartbeats to process 0 and receives the end of the run."""

    def __init__(
        self,
        connection: Connection,
        progress: ProgressTracker,
        interval_s: float,
        on_termination: Callable[[Termination], None],
        host: str,
    ) -> None:
        """`host`: that of process 0; `on_termination` must return at once."""
        self.connection, self.progress, self.interval_s = connection, progress, interval_s
        self.on_termination, self.leader = on_termination, describe_ranks([0], {0: host})
        self._wakeup = WakeSocket()
        self._shutdown_request: tuple[int, str] | None = None
        self._thread = threading.Thread(target=self._run, name="sabia heartbeat", daemon=True)

    def wait_for_release(self, timeout_s: float) -> None:
        """Wait until process 0 releases all; raises Failed, Interrupted or its Termination."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            stop.check()
            try:
                message = self.connection.next_message(0.5) or {}
            except PeerDisconnected as error:
                raise Failed(f"{self.leader} ended before the start") from error
            if "go" in message:
                self.progress.restart_clock()
                return
            if "end" in message:
                raise Termination.of_message(message).error()
            if "bye" in message:
                raise Interrupted(f"{self.leader} was stopped before the start: run again")
        raise Failed(f"{self.leader} did not start the run within {timeout_s:g} s")

    def start(self) -> None:
        """Begin to send heartbeats."""
        self._thread.start()

    def shut_down(self, code: int, reason: str) -> None:
        """Tell process 0 that this process ends: in order (0, 75), or because it failed."""
        if not self._shutdown_request:
            self._shutdown_request = (code, reason)
            self._wakeup.wake()

    def close(self) -> None:
        """Shut down in order unless `shut_down` was called before."""
        self.shut_down(0, "")
        if self._thread.ident is None:  # never started: stopped before the release
            self._disconnect()
        else:
            self._thread.join(2.0)

    def sockets(self) -> list:
        """All open sockets, for a forked child to close."""
        return [self.connection.socket, self._wakeup.socket]

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.connection, selectors.EVENT_READ)
                selector.register(self._wakeup.socket, selectors.EVENT_READ)
                self._send_heartbeats(selector)
        except PeerDisconnected:
            reason = f"{self.leader} died or cannot be reached; {RESUME_HINT}"
            self.on_termination(Termination(75, reason))
        except Exception as error:
            notes.warn(f"this process sends no heartbeats any more: {error!r}")
        self._disconnect()

    def _send_heartbeats(self, selector: selectors.BaseSelector) -> None:
        """Every `interval_s`, until this process shuts down or process 0 ends the run."""
        due = time.monotonic()
        while not self._shutdown_request:
            if time.monotonic() >= due:
                self.connection.send({"heartbeat": vars(self.progress.heartbeat())})
                due = time.monotonic() + self.interval_s
            selector.select(max(due - time.monotonic(), 0.0))
            if self._shutdown_request:
                return
            for message in self.connection.receive():
                if "end" in message:
                    self.on_termination(Termination.of_message(message))
                if "end" in message or "bye" in message:
                    return

    def _disconnect(self) -> None:
        code, reason = self._shutdown_request or (0, "")
        with contextlib.suppress(PeerDisconnected):
            self.connection.send({"bye": code, "reason": reason[:MAX_REASON_CHARS]})
        self.connection.finish_sending()
        self.connection.close()
        self._wakeup.close()
