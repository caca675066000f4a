"""Process 0's end of the connections: takes the roll, hears the heartbeats, ends the run for all.

One daemon thread with one selector serves every connection, so that hundreds may come at once and
none can hold it up. What it decides (release, or an End) it tells everybody; the first End counts.
"""

import contextlib
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from sabia.core import notes
from sabia.core.parallel.health.connection import Gone, Link, Message
from sabia.core.parallel.health.heartbeat import Beat, Board, read_beat
from sabia.core.parallel.health.rendezvous import Register, Report
from sabia.core.parallel.health.shutdown import AGAIN, End
from sabia.core.parallel.slurm_hosts import say_ranks

HELLO_WITHIN_S = 10.0
COMES_BACK_S = 10.0  # a process whose connection broke before the start
TOGETHER_S = 0.5  # deaths that are told in one line: a node takes all its processes along
LINGER_S = 2.0
LATE_S = 10.0
STRAGGLER_EVERY_S = 600.0
SPARE_FILES = 256
QUIET_CODES = (0, 75)


class Bell:
    """Wakes a thread that waits in a selector."""

    def __init__(self) -> None:
        self.socket, self._other = socket.socketpair()
        self.socket.setblocking(False)

    def ring(self) -> None:
        """Wake it."""
        with contextlib.suppress(OSError):
            self._other.send(b"!")

    def hear(self) -> None:
        """Be ready for the next ring."""
        with contextlib.suppress(OSError):
            self.socket.recv(64)

    def close(self) -> None:
        """Close both ends."""
        self.socket.close()
        self._other.close()


class Hub:
    """Runs from the roll call to the end of the run; `ready` is set at release and at an End."""

    def __init__(
        self,
        listener: socket.socket,
        register: Register,
        token: str,
        *,
        board: Board,
        own_beat: Callable[[], Beat],
        on_end: Callable[[End], None],
        within_s: float,
    ) -> None:
        """`own_beat`: where process 0 itself stands; `on_end` must return at once."""
        self.register, self.token, self.board = register, token, board
        self.own_beat, self.on_end = own_beat, on_end
        self.within_s, self.deadline = within_s, time.monotonic() + within_s
        self.links: dict[int, Link] = {}
        self.strangers: dict[Link, float] = {}  # and until when each may say who it is
        self.dead: dict[int, float] = {}  # and when its connection was lost
        self.end: End | None = None
        self.released, self.ready = False, threading.Event()
        self.accepted = 0
        self._farewell: tuple[int, str] | None = None
        self._looked = self._noted = 0.0
        self._listener, self._bell = listener, Bell()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._bell.socket, selectors.EVENT_READ)
        _allow_files(register.size)
        self._thread = threading.Thread(target=self._run, name="sabia hub", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def leave(self, code: int, why: str) -> None:
        """Tell all that process 0 goes: in good order (0, 75), or that it failed."""
        self._farewell = self._farewell or (code, why)
        self._bell.ring()

    def close(self) -> None:
        """Leave in good order unless `leave` said otherwise; waits 3 s at most (11 s before the
        start)."""
        self.leave(0, "")
        self._thread.join(LATE_S + 1)

    def sockets(self) -> list[socket.socket]:
        """All open ones, for a forked child to close."""
        links = [link.socket for link in (*self.links.values(), *self.strangers)]
        return [self._listener, self._bell.socket, *links]

    def _run(self) -> None:
        try:
            while self._farewell is None:
                self._serve(min(self.board.interval_s, 0.25))
                self._tick(time.monotonic())
            self._say_farewell(*self._farewell)
        except Exception as error:
            self._finish(End(1, f"process 0 cannot watch over the others: {error!r}"))
        finally:
            for link in (*self.links.values(), *self.strangers):
                link.close()
            self._selector.close()
            self._listener.close()
            self._bell.close()

    def _serve(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._bell.socket:
                self._bell.hear()
            else:
                link: Any = key.fileobj
                self._read(link)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # nobody left waiting, or no more files
            for _ in range(SPARE_FILES):
                link = Link(self._listener.accept()[0])
                self.accepted += 1
                self.strangers[link] = time.monotonic() + HELLO_WITHIN_S
                self._selector.register(link, selectors.EVENT_READ)
                if len(self.strangers) > self.register.size + SPARE_FILES // 2:
                    self._drop(next(iter(self.strangers)))

    def _read(self, link: Link) -> None:
        try:
            for message in link.pull():
                if link in self.strangers:
                    self._meet(link, message)
                else:
                    self._hear(link, message)
        except Gone as error:
            self._lose(link, str(error))

    def _meet(self, link: Link, message: Message) -> None:
        report = Report.of_hello(message, self.token)
        problem = self.register.add(report)
        del self.strangers[link]
        link.push({"heard": True})
        if problem:
            self.strangers[link] = time.monotonic() + HELLO_WITHIN_S
            self._finish(End(1, problem))
            link.push(End(1, problem).message())
            return
        if report.rank in self.links:  # it has tried again, and this is the new connection
            self._drop(self.links[report.rank])
        self.links[report.rank] = link
        self.dead.pop(report.rank, None)
        if self.end:
            link.push(self.end.message())
        elif self.released:
            link.push({"go": True})

    def _hear(self, link: Link, message: Message) -> None:
        rank = next((rank for rank, known in self.links.items() if known is link), None)
        if rank is None:
            return
        if "beat" in message:
            with contextlib.suppress(TypeError, ValueError, AttributeError):
                self.board.hear(rank, read_beat(message["beat"]), time.monotonic())
        elif "bye" in message:
            self._drop(link)
            self.board.drop(rank)
            self._left(rank, message)

    def _left(self, rank: int, message: Message) -> None:
        """It ends in good order: fine after the start, if it did not fail."""
        code, why = message.get("bye"), str(message.get("why"))
        name = say_ranks([rank], self.register.hosts)
        if code not in QUIET_CODES and isinstance(code, int):
            self._finish(End(code, f"{name} failed: {why}"))
        elif not self.released:
            self._finish(End(75, f"{name} was stopped before the start: run again"))

    def _lose(self, link: Link, why: str) -> None:
        """A connection broke: a stranger's is refused, a process has died."""
        if link in self.strangers:
            with contextlib.suppress(Gone):
                link.push({"refused": why})
        for rank, known in self.links.items():
            if known is link:
                self.dead[rank] = time.monotonic()
        self._drop(link)

    def _drop(self, link: Link) -> None:
        self.strangers.pop(link, None)
        self.links = {rank: known for rank, known in self.links.items() if known is not link}
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link)
        link.close()

    def _tick(self, now: float) -> None:
        for link in [link for link, until in self.strangers.items() if now > until]:
            self._drop(link)
        if self.end:
            return
        self._bury(now)
        if not self.released:
            self._take_roll(now)
        elif now - self._looked >= self.board.interval_s:
            self._looked = now
            self._look(now)

    def _bury(self, now: float) -> None:
        """End the run when processes have died (before the start: and have not come back)."""
        allowed = TOGETHER_S if self.released else COMES_BACK_S
        if not self.dead or now - min(self.dead.values()) < allowed:
            return
        name = say_ranks(list(self.dead), self.register.hosts)
        if not self.released:
            self._finish(End(1, f"{name} died before the start; look at what became of it"))
            return
        beat = self.board.drop(min(self.dead))
        self._finish(End(75, f"{name} died, last heard of at {beat.where}; {AGAIN}"))

    def _take_roll(self, now: float) -> None:
        if self.register.complete and not self.dead:
            problem = self.register.differing()
            if problem:
                self._finish(End(1, problem))
                return
            self._release(now)
        elif now > self.deadline:
            self._finish(End(1, self.register.missing(self.within_s)))

    def _release(self, now: float) -> None:
        warning = self.register.settings_differ()
        if warning:
            notes.warn(warning)
        self.board.hosts = self.register.hosts
        for rank in range(self.register.size):
            self.board.hear(rank, Beat(), now)
        self.released = True
        self._tell({"go": True})
        self.ready.set()

    def _look(self, now: float) -> None:
        """Has anything stopped? Is anybody slow?"""
        self.board.hear(0, self.own_beat(), now)
        self._tell(None)
        hung = self.board.hung(now)
        if hung:
            self._finish(End(75, f"{hung}; {AGAIN}", hangs=True))
        elif now - self._noted >= STRAGGLER_EVERY_S and (slow := self.board.straggler()):
            self._noted = now
            notes.note(slow)

    def _tell(self, message: Message | None) -> None:
        for link in list(self.links.values()):
            try:
                link.push(message)
            except Gone as error:
                self._lose(link, str(error))

    def _finish(self, end: End) -> None:
        if self.end:
            return
        self._tell_end(end)
        self.ready.set()
        self.on_end(end)

    def _say_farewell(self, code: int, why: str) -> None:
        """Say it, and hear the others out: closing over unread words could cut ours off.

        Before the start, those who are still on their way are told, too.
        """
        name = say_ranks([0], self.register.hosts)
        if not self.end and code not in QUIET_CODES:
            self._tell_end(End(code, f"{name} failed: {why}"))
        elif not self.end and not self.released:
            self._tell_end(End(75, f"{name} was stopped before the start: run again"))
        elif not self.end:
            self._tell({"bye": code})
        for link in self.links.values():
            link.end()
        late = not self.released and time.monotonic() < self.deadline
        until = time.monotonic() + (LATE_S if late else LINGER_S)
        while (self.links or (late and not self.register.complete)) and time.monotonic() < until:
            self._serve(0.1)

    def _tell_end(self, end: End) -> None:
        self.end = end
        self._tell(end.message())


def beat_message(beat: Beat) -> dict[str, Any]:
    """A beat as sent."""
    return {"beat": asdict(beat)}


def _allow_files(size: int) -> None:
    """Let this process hold a connection of each other one, as far as the hard limit goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = size + 2 * SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
