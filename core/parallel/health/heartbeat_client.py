"""The end of the connections at all processes but 0: waits for the start, beats, hears the end."""

import contextlib
import selectors
import threading
import time
from collections.abc import Callable

from sabia.core import notes, stop
from sabia.core.errors import Failed, Interrupted
from sabia.core.parallel.health.connection import Gone, Link
from sabia.core.parallel.health.monitor import Bell, beat_message
from sabia.core.parallel.health.progress_tracker import Marks
from sabia.core.parallel.health.shutdown import AGAIN, End
from sabia.core.parallel.slurm_hosts import say_ranks


class Client:
    """The other processes' end: beats, and hears of the end of the run."""

    def __init__(
        self, link: Link, marks: Marks, interval_s: float, on_end: Callable[[End], None], host: str
    ) -> None:
        self.link, self.marks, self.interval_s = link, marks, interval_s
        self.on_end, self.host = on_end, host
        self._bell, self._farewell = Bell(), (0, "")
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="sabia watch", daemon=True)

    def wait_for_go(self, within_s: float) -> None:
        """Wait until process 0 releases all; raises Failed, Interrupted or what it has decided."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            stop.check()
            try:
                message = self.link.next(0.5) or {}
            except Gone as error:
                raise Failed(f"rank 0 ({self.host}) ended before the start") from error
            if "go" in message:
                self.marks.alive()
                return
            if "end" in message:
                raise End.of_message(message).error()
            if "bye" in message:
                raise Interrupted(f"rank 0 ({self.host}) was stopped before the start: run again")
        raise Failed(f"rank 0 ({self.host}) did not start the run within {within_s:g} s")

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def leave(self, code: int, why: str) -> None:
        """Say farewell: in good order (0, 75), or that this process failed."""
        if not self._leaving:
            self._farewell, self._leaving = (code, why), True
            self._bell.ring()

    def close(self) -> None:
        """Leave in good order unless `leave` said otherwise."""
        self.leave(0, "")
        if self._thread.ident is None:
            self._part()
        else:
            self._thread.join(2.0)

    def sockets(self) -> list:
        """All open ones, for a forked child to close."""
        return [self.link.socket, self._bell.socket]

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.link, selectors.EVENT_READ)
                selector.register(self._bell.socket, selectors.EVENT_READ)
                self._beat_until_the_end(selector)
        except Gone:
            what = f"{say_ranks([0], {0: self.host})} died or cannot be reached"
            self.on_end(End(75, f"{what}; {AGAIN}"))
        except Exception as error:
            notes.warn(f"this process is not watched any more: {error!r}")
        self._part()

    def _beat_until_the_end(self, selector: selectors.BaseSelector) -> None:
        due = time.monotonic()
        while not self._leaving:
            if time.monotonic() >= due:
                self.link.push(beat_message(self.marks.beat()))
                due = time.monotonic() + self.interval_s
            selector.select(max(due - time.monotonic(), 0.0))
            if self._leaving:
                return
            for message in self.link.pull():
                if "end" in message:
                    self.on_end(End.of_message(message))
                if "end" in message or "bye" in message:
                    return

    def _part(self) -> None:
        code, why = self._farewell
        with contextlib.suppress(Gone):
            self.link.push({"bye": code, "why": why[:1000]})
        self.link.end()
        self.link.close()
        self._bell.close()
