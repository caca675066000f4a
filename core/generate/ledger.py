"""What a run has spent on model calls: a file next to its output, shared by all its processes.

Ranks, array tasks and restarts of a run append to the file, each line under an exclusive lock and
with a checksum. A call is charged before it is sent, with an estimate, and settled with its usage
when it has ended. A process that is killed leaves its calls in flight charged with their estimates,
so the recorded spending is never below the real one. A damaged line is left out: of the two lines
of a call, either one is enough to count it.
"""

import fcntl
import json
import os
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sabia.core import notes
from sabia.core.errors import Failed
from sabia.core.generate.calls import Usage

CHARGED, SETTLED = "charged", "settled"
LONGEST_CALL_S = 600.0  # an older call of another host has been lost
Ticket = tuple[str, int]  # (process, number of its call)


class Ledger:
    """Requests and tokens of a run by model; path None: of this process only. Thread-safe."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.requests: Counter[str] = Counter()
        self.answered = 0
        self.used: dict[str, Usage] = {}
        self.total: dict[str, Usage] = {}  # `used` and `reserved`
        self.reserved: dict[Ticket, tuple[str, Usage, float]] = {}
        self._owner = f"{socket.gethostname().partition('.')[0]}-{os.getpid()}-{time.time_ns():x}"
        self._number = self._read_to = 0
        self._file: int | None = None
        self._lock = threading.Lock()
        if path is not None and path.exists():
            self._open()
            with self.locked():
                pass

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclusive access, with the lines of the other processes read. Raises Failed."""
        with self._lock:
            if self.path is None:
                yield
                return
            try:
                file = self._open()
                fcntl.flock(file, fcntl.LOCK_EX)
                try:
                    self._read(file)
                    yield
                finally:
                    fcntl.flock(file, fcntl.LOCK_UN)
            except OSError as error:
                raise Failed(f"{self.path}: {error.strerror} (the record of spending)") from error

    def charge(self, model: str, estimate: Usage) -> Ticket:
        """Record one request that is about to be sent; only inside `locked`."""
        self._number += 1
        ticket = (self._owner, self._number)
        self._append(CHARGED, ticket, model, estimate)
        return ticket

    def settle(self, ticket: Ticket, model: str, usage: Usage) -> None:
        """Replace the estimate of a request that has ended by its usage."""
        with self.locked():
            self._append(SETTLED, ticket, model, usage)

    def waits(self) -> bool:
        """Whether a charged call may still be settled with less than its estimate."""
        return any(self._in_flight(*ticket, at) for ticket, (_, _, at) in self.reserved.items())

    def _in_flight(self, owner: str, _number: int, at: float) -> bool:
        host, pid, _ = owner.rsplit("-", 2)
        if host == self._owner.rsplit("-", 2)[0]:
            return owner == self._owner or os.path.exists(f"/proc/{pid}")
        return time.time() - at < LONGEST_CALL_S

    def _open(self) -> int:
        if self._file is None:
            assert self.path is not None
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        return self._file

    def _append(self, kind: str, ticket: Ticket, model: str, usage: Usage) -> None:
        tokens = (usage.prompt_tokens, usage.completion_tokens)
        at = round(time.time(), 3)
        if self._file is not None:
            text = json.dumps((kind, *ticket, model, *tokens, at)).encode()
            line = b"%08x %s\n" % (zlib.crc32(text), text)
            if os.write(self._file, line) != len(line):
                raise Failed(f"{self.path}: the disk is full (the record of spending)")
            self._read_to += len(line)
        self._count(kind, ticket, model, usage, at)

    def _count(self, kind: str, ticket: Ticket, model: str, usage: Usage, at: float) -> None:
        total = self.total.get(model, Usage()) + usage
        if kind == CHARGED:
            self.requests[model] += 1
            self.reserved[ticket] = (model, usage, at)
            self.total[model] = total
            return
        charged = self.reserved.pop(ticket, None)
        if charged is None:  # its first line is damaged
            self.requests[model] += 1
        self.total[model] = total if charged is None else total - charged[1]
        self.answered += usage.completion_tokens > 0
        self.used[model] = self.used.get(model, Usage()) + usage

    def _read(self, file: int) -> None:
        """Count the lines that other processes have appended."""
        size = os.fstat(file).st_size
        if size < self._read_to:
            raise Failed(f"{self.path}: has become shorter (expected that nothing else writes it)")
        while self._read_to < size:
            new = os.pread(file, size - self._read_to, self._read_to)
            for line in new.splitlines():
                self._count_line(line)
            self._read_to += len(new)
            if not new.endswith(b"\n"):  # the disk was full, or the machine lost power
                self._read_to += os.write(file, b"\n")

    def _count_line(self, line: bytes) -> None:
        text = line[9:]
        try:
            if int(line[:8], 16) != zlib.crc32(text):
                raise ValueError("damaged")
            kind, owner, number, model, prompt, completion, at = json.loads(text)
        except ValueError:
            notes.warn(f"{self.path}: left out a damaged line of the record of spending")
            return
        self._count(kind, (owner, number), model, Usage(prompt, completion), at)
