"""Extraction in a child process: a page that hangs or uses too much memory costs only itself.

The child is `python -m sabia.core.web.extraction.sandbox`. It reports when it is ready; from then
on its additional address space is limited, and so is its CPU time for each page, which does not
depend on the load of the machine. A much longer wall-clock limit applies to a child that hangs
without computing. Parent and child exchange frames: two lengths, a JSON header, the bytes of the
page. An invalid answer of a broken child is only refused, and every wait of the parent has a limit.
A child that is killed, exits or has extracted PAGES_PER_CHILD pages (libraries leak memory) is
replaced. A child whose parent has died ends by itself: at the end of its input, or at one of the
two time limits if it is extracting a page.
"""

import contextlib
import json
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
from typing import Any, BinaryIO

from sabia.core.errors import Failed

TIME_S = 20.0  # of CPU, for a page
PATIENCE = 30  # a page may take so many times as long by the clock
START_S = 600.0  # the scanner is compiled once a machine
MEMORY_BYTES = 2 << 30  # beyond what the child takes before its first page
PAGES_PER_CHILD = 20_000
MAX_ANSWER = 1 << 28
_LENGTHS = struct.Struct(">II")
_BLOCK = 1 << 20
_GRACE_S = 60.0


class Unextractable(Failed):
    """The page cannot be turned into text within the limits."""


class Sandbox:
    """One child; `extract` may be called from one thread at a time.

    A page may take time_s seconds of CPU, wait_s by the clock (PATIENCE times as much if 0), and
    memory_bytes.
    """

    def __init__(
        self, time_s: float = TIME_S, memory_bytes: int = MEMORY_BYTES, wait_s: float = 0.0
    ) -> None:
        self.time_s, self.memory_bytes = time_s, memory_bytes
        self.wait_s = wait_s or PATIENCE * time_s
        self._child: subprocess.Popen[bytes] | None = None
        self._pages = 0

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def extract(self, body: bytes, content_type: str, url: str, links: bool) -> dict[str, Any]:
        """`extract.Extracted` as a dictionary; raises Unextractable."""
        child = self._running()
        asked = {"type": content_type, "url": url, "links": links, "time_s": self.time_s}
        asked["wait_s"] = self.wait_s
        self._pages += 1
        try:
            answer = json.loads(_exchange(child, _frame(asked, body), self.wait_s))
        except TimeoutError as error:
            self.close()
            raise Unextractable(f"extraction did not end within {self.wait_s:g} s") from error
        except (OSError, EOFError, ValueError) as error:
            death = self._death()
            if death == f"signal {int(signal.SIGPROF)}":
                reason = f"extraction took more than {self.time_s:g} s of CPU time"
                raise Unextractable(reason) from error
            raise Unextractable(f"extraction died ({death})") from error
        if "error" in answer:
            raise Unextractable(f"extraction failed: {answer['error']}")
        return dict(answer)

    def _running(self) -> "subprocess.Popen[bytes]":
        child = self._child
        if child is not None and child.poll() is None and self._pages < PAGES_PER_CHILD:
            return child
        self.close()
        self._child, self._pages = _start(self.memory_bytes), 0
        try:
            _exchange(self._child, b"", START_S)
        except (OSError, EOFError, ValueError) as error:
            raise Failed(f"the extraction process did not start ({self._death()})") from error
        return self._child

    def _death(self) -> str:
        """Why the child ended, in words; it is gone afterwards."""
        child = self._child
        assert child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
        code = child.poll()
        self.close()
        if code is None:
            return "its answer made no sense"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                _pipe(pipe).close()
            self._child = None


def _start(memory_bytes: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "sabia.core.web.extraction.sandbox", str(memory_bytes)]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    child = subprocess.Popen(
        command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True, env=os.environ | one_thread,
    )  # fmt: skip
    for pipe in (child.stdin, child.stdout):
        os.set_blocking(_pipe(pipe).fileno(), False)
    return child


def _pipe(pipe: Any) -> BinaryIO:
    assert pipe is not None
    return pipe


def _frame(header: dict[str, Any], body: bytes = b"") -> bytes:
    header_json = json.dumps(header).encode()
    return _LENGTHS.pack(len(header_json), len(body)) + header_json + body


def _exchange(child: "subprocess.Popen[bytes]", frame: bytes, time_s: float) -> bytes:
    """Write a frame, read the header of one; raises TimeoutError, EOFError, OSError, ValueError."""
    deadline = time.monotonic() + time_s
    source, sink = _pipe(child.stdout), _pipe(child.stdin)
    rest, answer, wanted = memoryview(frame), bytearray(), _LENGTHS.size
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


def _serve(memory_bytes: int) -> None:
    """The child: say that it is ready, then answer frames until stdin ends."""
    from sabia.core.web.extraction import extract

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not reach the pipe
    extract.warm_up()
    _limit(memory_bytes)
    answer: dict[str, Any] = {}
    while True:
        answers.write(_frame(answer))
        answers.flush()
        lengths = sys.stdin.buffer.read(_LENGTHS.size)
        if len(lengths) < _LENGTHS.size:
            return
        header_bytes, body_bytes = _LENGTHS.unpack(lengths)
        asked = json.loads(sys.stdin.buffer.read(header_bytes))
        body = sys.stdin.buffer.read(body_bytes)
        signal.setitimer(signal.ITIMER_PROF, asked["time_s"])
        signal.setitimer(signal.ITIMER_REAL, asked["wait_s"] + _GRACE_S)
        try:
            answer = vars(extract.extract(body, asked["type"], asked["url"], asked["links"]))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:200]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _limit(memory_bytes: int) -> None:
    import resource

    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + memory_bytes, taken + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
