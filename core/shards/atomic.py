"""Files that appear whole or not at all: dot-tmp in the same directory, fsync, rename.

A process that dies leaves at most a dot-file `.NAME.PID.tmp`; the next run for the same name
sweeps those whose process is gone. No reader of this package looks at dot-files.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

FAILED_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def fsync_directory(directory: Path) -> None:
    """Make renames in the directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _temporary(path: Path) -> Path:
    """A name beside `path` for what is to take its place, whose folder is made; what processes that
    no longer live on this host left under such names is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob(f".{path.name}.*.tmp"):
        pid = old.name.removesuffix(".tmp").rpartition(".")[2]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(OSError):
                shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink()
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let a failure to write that names no file, as a full disk's does, name this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in FAILED_WRITES:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is synced and renamed, else removed."""
    final = Path(path)
    temporary = _temporary(final)
    try:
        with naming(final):
            yield temporary
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            os.replace(temporary, final)
            fsync_directory(final.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: str | Path, data: bytes | str) -> None:
    """Write a small file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Yield an empty directory beside `path`; on success it takes that name, else it goes.

    A directory of that name is replaced as a whole (for an instant neither is there). Files
    written inside should be synced by their writers; their names are synced here.
    """
    final = Path(path)
    temporary = _temporary(final)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        with naming(final):
            yield temporary
            fsync_directory(temporary)
            replaced = final.with_name(f".{final.name}.old.{os.getpid()}.tmp")
            if final.exists():
                os.rename(final, replaced)
            os.rename(temporary, final)
            fsync_directory(final.parent)
            shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
