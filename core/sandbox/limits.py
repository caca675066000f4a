"""A child process that answers requests about untrusted data, with limits of memory and time.

`Child` is the parent's side, `serve` the child's. The child reports when it is ready; from then on
its additional address space is limited, and so is its CPU time for each request, which does not
depend on the load of the machine. A much longer wall-clock limit applies to a child that hangs
without computing. Both sides exchange frames: two lengths, a JSON header, bytes. An invalid answer
of a broken child is only refused, and every wait of the parent has a limit. A child that is killed,
exits or has answered `requests` requests (libraries leak memory) is replaced. A child whose parent
has died ends by itself: at the end of its input, or at one of the two time limits.

This is no isolation: the child can read and write what its parent can (see `isolated`).
"""

import contextlib
import json
import os
import queue
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, Generic, Self, TypeVar

from sabia.core.errors import Failed

PATIENCE = 30  # a request may take so many times its CPU time by the clock
START_S = 600.0  # the first child of a machine may compile code
MAX_ANSWER = 1 << 28
_LENGTHS = struct.Struct(">II")
_BLOCK = 1 << 20
_GRACE_S = 60.0


AChild = TypeVar("AChild", bound="Child")


class PastLimitError(Exception):
    """A request took more than its time, or ended the child."""


class Child:
    """One child, `python -m module`; `ask` may be called from one thread at a time.

    A request may take time_s seconds of CPU, wait_s by the clock (PATIENCE times as much if 0), and
    memory_bytes beyond what the child takes before its first one. `arguments` follow memory_bytes
    on the command line; `environment` replaces that of the parent. What the child reports when it
    is ready is `state`.
    """

    def __init__(
        self, module: str, time_s: float, memory_bytes: int, wait_s: float = 0.0,
        requests: int = 20_000, arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.module, self.time_s, self.memory_bytes = module, time_s, memory_bytes
        self.wait_s, self.requests = wait_s or PATIENCE * time_s, requests
        self.arguments, self.environment = arguments, environment
        self.process: subprocess.Popen[bytes] | None = None
        self.state: dict[str, Any] = {}
        self.asked = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def ask(self, header: dict[str, Any], body: bytes = b"") -> dict[str, Any]:
        """The answer to a request. Raises PastLimitError with the reason."""
        process = self.running()
        self.asked += 1
        limits = {"time_s": self.time_s, "wait_s": self.wait_s}
        try:
            answer = json.loads(exchange(process, frame(header | limits, body), self.wait_s))
        except TimeoutError as error:
            self.close()
            raise PastLimitError(f"did not end within {self.wait_s:g} s") from error
        except (OSError, EOFError, ValueError) as error:
            death = self._death()
            if death == f"signal {int(signal.SIGPROF)}":
                reason = f"took more than {self.time_s:g} s of CPU time"
                raise PastLimitError(reason) from error
            raise PastLimitError(f"died ({death})") from error
        except BaseException:
            self.close()  # interrupted between request and answer
            raise
        return dict(answer)

    def running(self) -> "subprocess.Popen[bytes]":
        """The process, started if there is none that can answer."""
        process = self.process
        if process is not None and process.poll() is None and self.asked < self.requests:
            return process
        self.close()
        self.process, self.asked = self._start(), 0
        try:
            self.state = json.loads(exchange(self.process, b"", START_S))
        except (OSError, EOFError, ValueError) as error:
            raise Failed(f"{self.module} did not start ({self._death()})") from error
        return self.process

    def _death(self) -> str:
        """Why the child ended, in words; it is gone afterwards."""
        process = self.process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        code = process.poll()
        self.close()
        if code is None:
            return "its answer made no sense"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-P", "-m", self.module, str(self.memory_bytes)]
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment = os.environ if self.environment is None else self.environment
        child = subprocess.Popen(
            [*command, *self.arguments], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True, env={**environment, **one_thread},
        )  # fmt: skip
        for pipe in (child.stdin, child.stdout):
            os.set_blocking(_pipe(pipe).fileno(), False)
        return child

    def close(self) -> None:
        """End the child with all of its processes."""
        if self.process is not None:
            if self.process.returncode is None:  # the number is still its own
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                _pipe(pipe).close()
            self.process = None


class Pool(Generic[AChild]):
    """At most `count` children of a process for its threads; a forked process starts its own."""

    def __init__(self, make: Callable[[], AChild], count: int = 1) -> None:
        self.make, self.count = make, count
        self._lock, self._owner = threading.Lock(), 0
        self._free: queue.LifoQueue[AChild] = queue.LifoQueue()

    @contextlib.contextmanager
    def one(self) -> Iterator[AChild]:
        """A child that no other thread uses; waits for one."""
        with self._lock:
            if self._owner != os.getpid():
                self._owner, self._free = os.getpid(), queue.LifoQueue()
                for _ in range(self.count):
                    self._free.put(self.make())
            free = self._free
        child = free.get()
        try:
            yield child
        finally:
            free.put(child)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def frame(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """A message: the lengths of header and body, the header in JSON, the body."""
    header_json = json.dumps(header).encode()
    return _LENGTHS.pack(len(header_json), len(body)) + header_json + body


def exchange(child: "subprocess.Popen[bytes]", message: bytes, time_s: float) -> bytes:
    """Write a frame, read the header of one; raises TimeoutError, EOFError, OSError, ValueError."""
    deadline = time.monotonic() + time_s
    source, sink = _pipe(child.stdout), _pipe(child.stdin)
    rest, answer, wanted = memoryview(message), bytearray(), _LENGTHS.size
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        if rest:
            selector.register(sink, selectors.EVENT_WRITE)
        while rest or len(answer) < wanted:
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                raise TimeoutError
            for key, _ in events:
                if key.fileobj is sink:
                    rest = rest[os.write(sink.fileno(), rest[:_BLOCK]) :]
                    if not rest:
                        selector.unregister(sink)
                    continue
                block = os.read(source.fileno(), _BLOCK)
                if not block:
                    raise EOFError
                answer += block
                if len(answer) >= _LENGTHS.size:
                    size, body = _LENGTHS.unpack_from(answer)
                    if size > MAX_ANSWER or body:
                        raise ValueError("an answer that is none")
                    wanted = _LENGTHS.size + size
    return bytes(answer[_LENGTHS.size :])


def serve(
    answer: Callable[[dict[str, Any], bytes], dict[str, Any]], memory_bytes: int,
    ready: Callable[[], object],
) -> None:  # fmt: skip
    """The child: make `ready`, say so, then answer frames until standard input ends.

    An exception of `answer` is the answer {"error": its type and text}.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not reach the pipe
    ready()
    _limit(memory_bytes)
    reply: dict[str, Any] = {}
    while True:
        answers.write(frame(reply))
        answers.flush()
        try:
            asked, body = received()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, asked["time_s"])
        signal.setitimer(signal.ITIMER_REAL, asked["wait_s"] + _GRACE_S)
        try:
            reply = answer(asked, body)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:200]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def received() -> tuple[dict[str, Any], bytes]:
    """Header and body of the frame at standard input. Raises EOFError at its end."""
    header_bytes, body_bytes = _LENGTHS.unpack(_read(_LENGTHS.size))
    return json.loads(_read(header_bytes)), _read(body_bytes)


def _read(size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        block = os.read(0, min(size - len(data), _BLOCK))
        if not block:
            raise EOFError
        data += block
    return bytes(data)


def _limit(memory_bytes: int) -> None:
    import resource

    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + memory_bytes, taken + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
