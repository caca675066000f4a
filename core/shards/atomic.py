"""Files that appear completely or not at all: a temporary file beside them, fsync, rename.

A process that is killed leaves at most a file `.NAME.PID.tmp`; the next run that writes NAME
removes those of processes that no longer exist. No reader of this package opens such files.
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
    """A temporary name beside `path`, whose folder is created; temporary files of processes that
    have ended on this host are removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob(f".{path.name}.*.tmp"):
        pid = old.name.removesuffix(".tmp").rpartition(".")[2]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(OSError):
                shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink()
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add this file name to write errors without one, such as those of a full disk."""
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
    """Yield an empty directory beside `path`; on success it is renamed, else removed.

    An existing directory of that name is replaced (for an instant neither exists). Writers must
    sync the files inside; the directory entries are synced here.
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
