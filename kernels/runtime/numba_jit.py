"""numba.njit with a cache of compiled functions that processes, clones and versions can share.

A compiled function is one file in `cache_folder.writable_cache_folder("numba")` (NUMBA_CACHE_DIR
names another). Its name has a digest of all it depends on: the source of its module and of those
that this imports, the types of the arguments, the settings, Python, numba, llvmlite and the
processor. (numba's own cache does not see changes in an imported module, and its index can name
another function's code after two processes have written at once.) A file appears whole and begins
with a digest of its content; one that is damaged is compiled again. One process compiles a
function, others wait for its file. Loading skips the tables that only a compiler needs, which take
longer than all else.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import re
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import serialize
from numba.core.compiler import CompileResult
from numba.core.runtime import _nrt_python

from sabia.kernels.runtime.cache_folder import compile_listeners, compiled_folder
from sabia.kernels.runtime.first_runs import NotCompiled, is_only_cached

if sys.platform != "win32":
    import fcntl

DIGEST_BYTES = 16
UNUSED_S = 60 * 86_400  # files of other versions are removed when they were not loaded for so long
WAIT_S = 120.0  # for a process that compiles the same function
# a module, or a package and the modules of it that follow on the line
_IMPORT = re.compile(
    r"^\s*(?:from|import) (sabia\.kernels[.\w]*)(?: import ([\w, ]+))?", re.MULTILINE
)
_KERNELS = Path(__file__).parents[1]


def njit(**settings: object) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit(**settings)` whose compiled functions are kept (see above)."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**settings)(function)
        dispatcher._cache = CompiledFiles(function, repr(sorted(settings.items())))
        return dispatcher

    return decorate


def read_only(array: np.ndarray) -> np.ndarray:
    """A read-only view: one compiled form serves arrays and read-only buffers."""
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


class CompiledFiles:
    """The files of one function; has the methods of numba's `FunctionCache`."""

    def __init__(self, function: Callable[..., Any], settings: str) -> None:
        self.name = f"{function.__module__.removeprefix('sabia.kernels.')}.{function.__qualname__}"
        self.module, self.settings = function.__module__, settings
        self.cache_path = ""
        self._lock = contextlib.ExitStack()  # held while this process compiles

    def load_overload(self, signature: object, target: Any) -> Any:
        """The compile result of a signature, or None: then numba compiles it. Raises NotCompiled
        where there is none and the thread is `only_cached`."""
        path = self._path(signature, target)
        stored = _read(path)
        if stored is None and is_only_cached():
            raise NotCompiled(self.name)
        if stored is None:
            self._lock.close()
            self._lock.enter_context(_locked(path))
            stored = _read(path)  # another process may have written it meanwhile
        if stored is None:
            for listener in compile_listeners:
                listener(self.name)
            target.refresh()  # load what a compiler needs
            return None
        self._lock.close()
        _add_runtime_symbols()
        return CompileResult._rebuild(target, *pickle.loads(stored))

    def save_overload(self, signature: object, result: Any) -> None:
        """Write a result that was compiled; a folder that cannot be written keeps nothing."""
        with self._lock, contextlib.suppress(OSError):
            path = self._path(signature, result.target_context)
            _write(path, serialize.dumps(result._reduce()))
            _remove_unused(path.parent, self.name)

    def _path(self, signature: object, target: Any) -> Path:
        folder = compiled_folder()
        self.cache_path = str(folder)
        parts = (
            source_digest(self.module), str(signature), self.settings, sys.version,
            numba.__version__, llvmlite.__version__, *target.codegen().magic_tuple(),
        )  # fmt: skip
        key = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=12).hexdigest()
        return folder / f"{self.name}-{key}.bin"


@functools.cache
def source_digest(module: str) -> str:
    """A digest of the source of a module of kernels and of those it imports, in turn."""
    todo, sources = [module], dict[str, bytes]()
    while todo:
        name = todo.pop()
        stem = _KERNELS.joinpath(*name.split(".")[2:])
        files = stem.with_suffix(".py"), stem / "__init__.py"
        path = next((path for path in files if path.exists()), None)
        if name not in sources and path is not None:
            sources[name] = path.read_bytes()
            for imported, names in _IMPORT.findall(sources[name].decode()):
                todo += [imported, *(f"{imported}.{one.strip()}" for one in names.split(","))]
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(sources):
        digest.update(f"{name} {len(sources[name])} ".encode() + sources[name])
    return digest.hexdigest()


@functools.cache
def _add_runtime_symbols() -> None:
    """Give LLVM the addresses of numba's memory functions, as its compiler does."""
    for name, address in _nrt_python.c_helpers.items():
        llvmlite.binding.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


def _read(path: Path) -> bytes | None:
    """The content of a file that is whole, else None."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, stored = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    if _digest(stored) != digest:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return stored


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{socket.gethostname()}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(_digest(content) + content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()


def _remove_unused(folder: Path, name: str) -> None:
    """Remove files of a function that no process has loaded for long, and those of killed ones."""
    for path in folder.glob(f"{name}-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > UNUSED_S:
                path.unlink()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, after the process that has it; without one where none can be made,
    or when that process takes too long."""
    if sys.platform == "win32":
        yield
        return
    lock = path.with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(lock, "wb")  # noqa: SIM115
    except OSError:
        yield
        return
    with file:
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield
        lock.unlink(missing_ok=True)
