"""First runs on a machine: kernels that are not compiled yet compute with their plain form.

Compiling a kernel takes seconds, once; its reference in NumPy or Python computes a few hundred
documents in less. A call of a `SwitchingModule` uses the compiled functions where the cache has
them. Otherwise the reference computes, some documents at a time. Where it is known how much the
process has to compute (`expect`), the caller compiles as soon as that would take the reference
longer, and nothing is compiled if not. Where it is not known, and the reference has taken PLAIN_S
seconds of CPU time in this process, a second process compiles the kernel (sabia.kernels.compile),
and calls use it as soon as its files are there. If that process ends without them, as where no file
can be written, or if one call has more documents than the reference computes in the time that
compiling takes, the caller compiles. Both give the same bits.
"""

import contextlib
import functools
import importlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sabia.kernels.runtime.cache_folder import FUNCTIONS, choice_listeners, has_compiled

PLAIN_S = 1.0  # CPU seconds of the reference before a process compiles
FUNCTION_S = 0.3  # CPU seconds to compile a function
CHUNK = 1 << 16  # bytes of documents that the reference computes before the cache is looked at
_thread = threading.local()


class NotCompiled(Exception):
    """A compiled function is not in the cache, and the caller does not compile."""


class _Rows(NamedTuple):
    """How the arguments of a function follow documents: documents are bytes
    arguments[0][offsets[i]:offsets[i + 1]] with offsets = arguments[1]; or the rows of `each`."""

    documents: bool = False
    each: int = 0  # the argument that has a row for every document or pair, 0: none

    def size(self, arguments: Sequence[Any]) -> int:
        """Bytes of the documents, or rows, 0 where neither is known."""
        if self.documents:
            return int(arguments[1][-1] - arguments[1][0])
        return len(arguments[self.each]) if self.each else 0


# kernel → function → its rows; other functions are computed in one piece
SWITCHING: Mapping[str, Mapping[str, _Rows]] = {
    "language": {"score": _Rows(documents=True)},
    "minhash": {"sketch": _Rows(documents=True), "jaccard": _Rows(each=2),
                "signatures": _Rows(), "gather": _Rows()},
    "quality": {"measure": _Rows(documents=True, each=4)},
}  # fmt: skip


@contextlib.contextmanager
def only_cached() -> Iterator[None]:
    """Context of a thread in which a function that would have to be compiled is NotCompiled."""
    _thread.only_cached = True
    try:
        yield
    finally:
        _thread.only_cached = False


def is_only_cached() -> bool:
    """Whether this thread is in `only_cached`."""
    return getattr(_thread, "only_cached", False)


_expected = 0  # bytes


def expect(size: int) -> None:
    """How many bytes of documents this process has to compute in all; 0: not known."""
    global _expected
    _expected = size


def compile_seconds(kernel: str) -> float:
    """About how many CPU seconds it takes to compile a kernel."""
    return FUNCTION_S * FUNCTIONS[kernel]


class FirstRun:
    """The state of one kernel in this process: CPU seconds of its plain form, and the process that
    compiles it."""

    def __init__(self, kernel: str) -> None:
        self.kernel, self.plain_s, self.plain_bytes = kernel, 0.0, 0
        self._speeds: dict[str, list[float]] = {}  # of functions: seconds for a byte or row
        self._compiler: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._seen = False  # a file of the kernel

    def compiled(self, name: str, size: int, function: Callable[[], Any]) -> Any:
        """function(), which calls compiled functions. Raises NotCompiled where the cache lacks one
        of them and the caller should compute plainly; `size` is what `name` has to compute, in
        bytes or rows."""
        speeds = self._speeds.get(name, [])[1:]  # the first call also makes tables
        large = size * min(speeds, default=0.0) > compile_seconds(self.kernel)
        if large or (self._compiler is not None and self._compiler.poll() is not None):
            return function()
        self._seen = self._seen or has_compiled(self.kernel)
        if not self._seen:
            raise NotCompiled(self.kernel)
        with only_cached():
            return function()

    def plain(self, name: str, size: int, function: Callable[[], Any]) -> Any:
        """function(), which computes plainly; starts the process that compiles when it is time."""
        _announce()
        with self._lock:
            if self._compiler is None and self.plain_s >= PLAIN_S and not _expected:
                self._compiler = _compiler_of(self.kernel)
        started = time.thread_time()
        result = function()
        seconds = time.thread_time() - started
        self.plain_s += seconds
        self._speeds.setdefault(name, []).append(seconds / max(size, 1))
        return result


@functools.cache
def first_run(kernel: str) -> FirstRun:
    """The state of a kernel in this process."""
    return FirstRun(kernel)


class SwitchingModule:
    """The functions of a kernel of SWITCHING, compiled or plain, whichever is there first."""

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._call, name, SWITCHING[self._kernel][name])

    def _call(self, name: str, rows: _Rows, *arguments: object) -> Any:
        state, parts = first_run(self._kernel), []
        rest: tuple[Any, ...] | None = arguments
        while rest is not None:
            compiled = functools.partial(self._function, "numba_impl", name, rest)
            left = _expected - state.plain_bytes if rows.documents else 0
            try:
                parts.append(state.compiled(name, max(rows.size(rest), left), compiled))
                break
            except NotCompiled:
                part, rest = _divided(rest, rows)
                plain = functools.partial(self._function, "reference", name, part)
                parts.append(state.plain(name, rows.size(part), plain))
                state.plain_bytes += rows.size(part) if rows.documents else 0
        return _joined(parts)

    def _function(self, module: str, name: str, arguments: tuple[Any, ...]) -> Any:
        loaded = importlib.import_module(f"sabia.kernels.{self._kernel}.{module}")
        return getattr(loaded, name)(*arguments)


def _divided(
    arguments: tuple[Any, ...], rows: _Rows
) -> tuple[tuple[Any, ...], tuple[Any, ...] | None]:
    """(the arguments of the first CHUNK bytes of documents or rows, those of the rest or None)."""
    if rows.documents:
        offsets = arguments[1]
        count = int(np.searchsorted(offsets[1:], offsets[0] + CHUNK)) + 1
        total = len(offsets) - 1
    elif rows.each:
        count, total = CHUNK // 16, len(arguments[rows.each])
    else:
        return arguments, None
    if count >= total:
        return arguments, None
    first, rest = list(arguments), list(arguments)
    if rows.documents:
        first[1], rest[1] = offsets[: count + 1], offsets[count:]
    if rows.each:
        each = arguments[rows.each]
        first[rows.each], rest[rows.each] = each[:count], each[count:]
    return tuple(first), tuple(rest)


def _joined(parts: list[Any]) -> Any:
    """The results of consecutive parts as one: arrays, or tuples of arrays."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    kind = type(parts[0])
    return kind(*columns) if hasattr(kind, "_fields") else tuple(columns)


@functools.cache
def _announce() -> None:
    for listener in choice_listeners:
        listener(
            "kernels are not compiled on this machine yet: NumPy computes, with the same output,"
            " until they are"
        )


def _compiler_of(kernel: str) -> "subprocess.Popen[bytes]":
    """A process that compiles a kernel, and ends with this one: then its stdin is closed."""
    words = [sys.executable, "-P", "-m", "sabia.kernels.compile", "--until-stdin-ends", kernel]
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere)


def end_with_stdin() -> None:
    """End this process when its stdin does: the process that wants the kernel has ended."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
