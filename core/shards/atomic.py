"""Files that appear completely or not at all: a temporary file beside them, fsync, rename.

A process that is killed leaves at most a file `.NAME.HOST-PID-RANDOM.tmp`; the next run on the same
host that writes NAME, or completes a directory of parts, removes those of processes that no longer
exist. No reader of this package opens such files.
"""

import contextlib
import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

JSON_KEY = "xxh3"  # of a JSON object: the 128-bit XXH3 of its other entries
FAILED_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def fsync_directory(directory: Path) -> None:
    """Make renames in the directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _temporary(path: Path) -> Path:
    """A temporary name beside `path`, whose folder is created and swept of those of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, glob.escape(path.name))
    return path.with_name(f".{path.name}.{_host()}-{os.getpid()}-{secrets.token_hex(4)}.tmp")


def _host() -> str:
    return socket.gethostname().partition(".")[0]


def sweep(folder: Path, names: str = "*") -> None:
    """Remove the temporary files, for names of a glob, of processes that ended on this host."""
    for old in folder.glob(f".{names}.*.tmp"):
        if is_abandoned(old):
            with contextlib.suppress(OSError):
                shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink()


def is_abandoned(temporary: Path) -> bool:
    """Whether the process that wrote a temporary file ended on this host."""
    made_by = temporary.name.removesuffix(".tmp").rpartition(".")[2].rsplit("-", 2)
    if len(made_by) != 3 or made_by[0] != _host() or not made_by[1].isdigit():
        return False
    try:
        fields = Path(f"/proc/{made_by[1]}/stat").read_bytes().rpartition(b")")[2].split()
        up_s = float(Path("/proc/uptime").read_text().split()[0])
        started = time.time() - up_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return started > temporary.stat().st_mtime + 60  # another process has its number now
    except FileNotFoundError:
        return True
    except (OSError, ValueError, IndexError):
        return False


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
def atomic_path(path: str | Path, new: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it is synced and renamed, else removed.

    new: raise FileExistsError instead of replacing a file that has appeared in the meantime.
    """
    final = Path(path)
    temporary = _temporary(final)
    try:
        with naming(final):
            yield temporary
            with open(temporary, "rb") as written:
                os.fsync(written.fileno())
            (_rename_new if new else os.replace)(temporary, final)
            fsync_directory(final.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _rename_new(temporary: Path, final: Path) -> None:
    """Rename a file, or raise FileExistsError; by a second link, where the file system has them."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        raise
    except OSError:
        if final.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final)) from None
        os.replace(temporary, final)


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
            replaced = _temporary(final)
            if final.exists():
                os.rename(final, replaced)
            os.rename(temporary, final)
            fsync_directory(final.parent)
            shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def scratch_directory(name: str, folder: str | None = None) -> Iterator[Path]:
    """Yield an empty directory, which is removed at the end; after a kill by the next call with
    this name. folder: None: that for temporary files."""
    temporary = _temporary(Path(folder or tempfile.gettempdir()) / name)
    temporary.mkdir(0o700)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _xxh3(content: bytes = b"") -> Any:
    """A 128-bit XXH3; imported here, because the planner writes files without digests."""
    from xxhash import xxh3_128

    return xxh3_128(content)


def file_digest(path: str | Path) -> str:
    """The digest of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, _xxh3).hexdigest()


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object atomically, with the digest of its entries."""
    write_atomic(path, json.dumps(sealed(content), indent=1) + "\n")


def read_json(path: str | Path) -> dict[str, Any]:
    """What `write_json` wrote; objects without a digest are taken as they are.

    Raises OSError, and ValueError if it is not a JSON object or not as it was written.
    """
    return unsealed(json.loads(Path(path).read_text("utf-8")))


def sealed(content: Mapping[str, Any]) -> dict[str, object]:
    """A JSON object with the digest of its entries."""
    return {**content, JSON_KEY: _json_digest(content)}


def unsealed(content: object) -> dict[str, Any]:
    """The entries without their digest; ValueError if they are not those of the digest."""
    if not isinstance(content, dict):
        raise ValueError("not a JSON object")
    digest, last = content.pop(JSON_KEY, None), next(reversed(content), "")
    rest = {key: value for key, value in content.items() if key != last}
    if digest is None and content.get(last) == _json_digest(rest):
        raise ValueError("the name of the digest is not as it was written (damaged bits)")
    if digest is not None and digest != _json_digest(content):
        raise ValueError("not as it was written (damaged bits)")
    return content


def _json_digest(content: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(content))  # keys as they are read back
    return str(_xxh3(json.dumps(plain, sort_keys=True).encode()).hexdigest())
