"""Extraction in a process of its own: a page that hangs or eats memory costs one page, no more.

The child is `python -m sabia.core.web.sandbox`, with its address space limited; parent and child
speak in frames of a length and JSON, so nothing a broken child says can do more than be refused.
A child that exceeds the time is killed and replaced, and the page refused with the reason.
"""

import base64
import contextlib
import json
import os
import selectors
import struct
import subprocess
import sys
from types import TracebackType
from typing import Any, BinaryIO

from sabia.core.errors import Failed

TIME_S = 20.0
MEMORY_BYTES = 3 << 30
_LENGTH = struct.Struct(">I")


class Unextractable(Failed):
    """The page cannot be turned into text within the limits."""


class Sandbox:
    """One child; `extract` may be called from one thread at a time."""

    def __init__(self, time_s: float = TIME_S, memory_bytes: int = MEMORY_BYTES) -> None:
        self.time_s, self.memory_bytes = time_s, memory_bytes
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def extract(self, body: bytes, content_type: str, url: str, links: bool) -> dict[str, Any]:
        """`extract.Extracted` as a dictionary; raises Unextractable."""
        asked = {"body": base64.b64encode(body).decode(), "type": content_type, "url": url}
        frame = json.dumps(asked | {"links": links}).encode()
        child = self._running()
        try:
            _send(_pipe(child.stdin), frame)
            answer = json.loads(self._receive(child))
        except (OSError, EOFError, ValueError) as error:
            self.close()
            raise Unextractable("extraction died (out of memory?)") from error
        if "error" in answer:
            raise Unextractable(f"extraction failed: {answer['error']}")
        return dict(answer)

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._child is None or self._child.poll() is not None:
            command = [sys.executable, "-P", "-m", "sabia.core.web.sandbox", str(self.memory_bytes)]
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        return self._child

    def _receive(self, child: "subprocess.Popen[bytes]") -> bytes:
        pipe = _pipe(child.stdout)
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            if not selector.select(self.time_s):
                self.close()
                raise Unextractable(f"extraction took more than {self.time_s:g} s")
        return _take(pipe)

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.kill()
            for pipe in (self._child.stdin, self._child.stdout):
                with contextlib.suppress(OSError):
                    _pipe(pipe).close()
            self._child.wait()
            self._child = None


def _pipe(pipe: Any) -> BinaryIO:
    assert pipe is not None
    return pipe  # type: ignore[no-any-return]


def _send(pipe: BinaryIO, frame: bytes) -> None:
    pipe.write(_LENGTH.pack(len(frame)))
    pipe.write(frame)
    pipe.flush()


def _take(pipe: BinaryIO) -> bytes:
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    frame = pipe.read(length)
    if len(frame) < length:
        raise EOFError
    return frame


def _serve(memory_bytes: int) -> None:
    """The child: answer frames until stdin ends."""
    import resource

    from sabia.core.web.extract import extract

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not reach the pipe
    while True:
        try:
            asked = json.loads(_take(sys.stdin.buffer))
        except EOFError:
            return
        _send(answers, json.dumps(_answer(asked, extract)).encode())


def _answer(asked: dict[str, Any], extract: Any) -> dict[str, Any]:
    try:
        body = base64.b64decode(asked["body"])
        return dict(extract(body, asked["type"], asked["url"], asked["links"]).to_json())
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
