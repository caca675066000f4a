"""Objects at URLs: read, written whole, listed and removed, each with retries and one-line errors.

Nothing is visible before it is whole: an object is put in one request, or in parts that are joined
by a last one (multipart upload). Nothing is renamed, because stores copy and delete for that. A
request that fails is repeated after the time that the server asks for (Retry-After), else with
exponential backoff. What a retry cannot change (no credentials, no such bucket) fails at once.
"""

import contextlib
import errno
import functools
import io
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import unquote, urlsplit

from sabia.core import notes, stop
from sabia.core.errors import Failed, MissingBackend, SabiaError, UsageError
from sabia.core.shards.atomic import atomic_path

ATTEMPTS = 6
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
OUTER_ATTEMPTS = {"gs": 3, "gcs": 3}  # where the package repeats each request for a minute
REQUEST_ATTEMPTS = 4  # of each request of an operation, such as a part of an upload
PART_BYTES = 16 << 20  # of an upload; smaller objects are put in one request
READ_BYTES = 8 << 20  # that are requested at once
TAIL_BYTES = 64 << 10  # at the end of an object, which are read once: footers of Parquet
CHUNK_BYTES = 8 << 20  # so that the interpreter lock changes hands rarely
LOOK_S = 0.2  # interval at which a wait checks for a stop signal
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}  # protocol → extra of this package
WHOLE = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory")  # a put is whole or nothing
LOCAL = ("file", "local")
BUSY = (429, 500, 502, 503, 504)  # HTTP statuses of a server that should be asked again
# errors that a retry cannot change
PERMANENT = (PermissionError, NotImplementedError, FileNotFoundError, IsADirectoryError,
             FileExistsError, NotADirectoryError, SabiaError, ImportError)  # fmt: skip
PERMANENT_NUMBERS = (errno.EPERM, errno.ENOSYS, getattr(errno, "EREMCHG", errno.ENOSYS))
T = TypeVar("T")


class NoObject(Failed):
    """There is no such object, or no such bucket (1)."""


def is_url(name: str) -> bool:
    """True for fsspec URLs such as s3://bucket/key."""
    return "://" in name


def plain_path(name: str) -> str:
    """A path instead of a URL file://…; other names as they are."""
    protocol, sign, _ = name.partition("://")
    return unquote(urlsplit(name).path) if sign and protocol in LOCAL else name


def locate(url: str) -> tuple[Any, str]:
    """(fsspec file system, path in it) of a URL; MissingBackend without its package."""
    import fsspec

    protocol = url.partition("://")[0]
    try:
        return fsspec.core.url_to_fs(url, use_listings_cache=False, **_settings(protocol))
    except ImportError as error:
        raise MissingBackend(f"{url}: {protocol}:// needs a package; pip install "
                             f"{_package(protocol)}") from error  # fmt: skip
    except ValueError as error:
        raise UsageError(f"{url}: {error}") from error
    except Exception as error:
        raise failure(url, error) from error


def _package(protocol: str) -> str:
    from fsspec.registry import known_implementations

    if protocol in EXTRAS:
        return f"'sabia[{EXTRAS[protocol]}]'"
    return str(known_implementations.get(protocol, {}).get("class", protocol)).split(".")[0]


def _settings(protocol: str) -> dict[str, object]:
    """Of s3fs: how single requests are repeated."""
    if EXTRAS.get(protocol) == "gs":  # it logs tracebacks of what is tried again
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL + 1)
    if EXTRAS.get(protocol) != "s3":
        return {}
    import fsspec

    given = dict(fsspec.config.conf.get(protocol, {}).get("config_kwargs", {}))
    retries = {"total_max_attempts": REQUEST_ATTEMPTS, "mode": "legacy"}
    return {"session": _session(os.getpid()), "config_kwargs": {"retries": retries} | given}


@functools.lru_cache(1)
def _session(_process: int) -> Any:
    """A session of S3 that waits as long as servers ask; one for a process."""
    from aiobotocore.session import AioSession

    session = AioSession()
    session.get_component("event_emitter").register_first("needs-retry.s3", _asked_wait)
    return session


def _asked_wait(response: Any, attempts: int, **_: object) -> float | None:
    """Seconds until a request of S3 is repeated, where its answer says so."""
    if response is None or attempts >= REQUEST_ATTEMPTS or response[0].status_code not in BUSY:
        return None
    return _seconds(response[0].headers.get("retry-after"))


def _seconds(text: Any) -> float | None:
    try:
        return min(max(0.0, float(text)), LONGEST_WAIT_S)
    except (TypeError, ValueError):
        return None


def retried(url: str, work: Callable[..., T], *args: Any, **named: object) -> T:
    """work(…), repeated while that may help; raises what `failure` makes of the last error."""
    import tenacity

    backoff = tenacity.wait_random_exponential(FIRST_WAIT_S, LONGEST_WAIT_S)

    def wait(state: Any) -> float:
        asked = _asked(state.outcome.exception())
        return backoff(state) if asked is None else asked

    def say(state: Any) -> None:
        reason, pause = _reason(state.outcome.exception()), state.next_action.sleep
        notes.note(f"{url}: {reason}; tried again in {pause:.1f} s")

    most = OUTER_ATTEMPTS.get(url.partition("://")[0], ATTEMPTS)
    attempts = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(most), wait=wait, sleep=_sleep, before_sleep=say,
        retry=tenacity.retry_if_exception(_may_pass), reraise=True,
    )  # fmt: skip
    try:
        return attempts(work, *args, **named)
    except SabiaError:
        raise
    except Exception as error:
        raise failure(url, error) from error


def _sleep(seconds: float) -> None:
    """Sleep; in the main thread a stop signal ends it, with Interrupted."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if threading.current_thread() is threading.main_thread():
            stop.check()
        time.sleep(min(left, LOOK_S))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _may_pass(error: BaseException) -> bool:
    """Whether an error may be gone when the same is tried again."""
    if not isinstance(error, Exception) or isinstance(error, PERMANENT) or _lacks_access(error):
        return False
    status = str(getattr(error, "code", ""))  # of gcsfs
    if status.startswith("4") and status not in ("408", "429"):
        return False
    return not (isinstance(error, OSError) and error.errno in PERMANENT_NUMBERS)


def _lacks_access(error: BaseException) -> bool:
    """Whether there are no credentials, or they are refused."""
    names = (type(one).__name__ for one in _chain(error))
    refused = isinstance(error, PermissionError) or getattr(error, "code", 0) in (401, 403)
    return refused or any("Credential" in n or n in ("ProfileNotFound", "RefreshError")
                          for n in names)  # fmt: skip


def _asked(error: BaseException) -> float | None:
    """The seconds of a header Retry-After in an error."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        about = response.get("ResponseMetadata", {}) if isinstance(response, dict) else response
        headers = about.get("HTTPHeaders") if isinstance(about, dict) else getattr(
            about if about is not None else one, "headers", None)  # fmt: skip
        if headers and (seconds := _seconds(headers.get("retry-after"))) is not None:
            return seconds
    return None


def _reason(error: BaseException) -> str:
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return text if text and isinstance(error, OSError) else f"{type(error).__name__}: {text}"


def failure(url: str, error: BaseException) -> SabiaError:
    """The error for the user, with the URL on one line."""
    if isinstance(error, SabiaError):
        return error
    if _lacks_access(error):
        return Failed(f"{url}: access is refused ({_reason(error)}; expected credentials that may "
                      "read and write there)")  # fmt: skip
    if isinstance(error, FileNotFoundError):
        return NoObject(f"{url}: no such object or bucket ({_reason(error)})")
    return Failed(f"{url}: {_reason(error)}")


class _Object(io.RawIOBase):
    """An object that is open for reading, at any position and as often as needed."""

    def __init__(self, url: str) -> None:
        files, key = locate(url)
        self.url, self._at, self._tail = url, 0, b""
        self._file = retried(url, files.open, key, "rb", block_size=READ_BYTES)
        self.size = int(self._file.size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """As that of a file: all bytes that are asked for, fewer only at the end."""
        left = max(0, self.size - self._at)
        count = left if size is None or size < 0 else min(size, left)
        start, end = self._at, self._at + count
        tail = max(0, self.size - TAIL_BYTES)
        if not count:
            return b""
        if start >= tail:
            self._tail = self._tail or retried(self.url, self._range, tail, self.size)
            data = self._tail[start - tail : end - tail]
        else:
            data = retried(self.url, self._range, start, end)
        self._at = end
        return data

    def _range(self, start: int, end: int) -> bytes:
        self._file.seek(start)
        data = bytes(self._file.read(end - start))
        if len(data) != end - start:
            raise ConnectionError(f"{len(data)} of {end - start} bytes arrived")
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def open_object(url: str) -> BinaryIO:
    """An object, open for reading. Raises SabiaError."""
    return _Object(url)  # type: ignore[return-value]  # a raw file of bytes


def read_object(url: str) -> bytes:
    """The bytes of an object. Raises SabiaError."""
    with open_object(url) as file:
        return file.read()


def exists(url: str) -> bool:
    """Whether there is an object or a folder at the URL."""
    files, key = locate(url)
    return bool(retried(url, files.exists, key))


def is_there(name: str) -> bool:
    """Whether there is something at a local path or a URL."""
    return exists(name) if is_url(name) else os.path.exists(name)


def version(url: str, about: dict[str, Any]) -> str:
    """What the store says of an object's content: its version or ETag, and size; '' if nothing."""
    given = [f"{name}={about[name]}" for name in VERSIONS if about.get(name)]
    return f"{url} {about.get('size')} {' '.join(given)}" if given else ""


VERSIONS = ("VersionId", "generation", "ETag", "etag", "md5Hash", "content_md5")


def about_object(url: str) -> dict[str, object]:
    """What the store says of an object. Raises SabiaError."""
    files, key = locate(url)
    return dict(retried(url, files.info, key))


def objects_below(url: str) -> dict[str, dict[str, Any]]:
    """Relative path → what the store says of each object below a folder; {} without any."""
    files, key = locate(url)
    root = key.rstrip("/")
    try:
        below = retried(url, files.find, root, detail=True)
    except NoObject:
        return {}
    below = {path[len(root) :].lstrip("/"): about for path, about in below.items()}
    return {name: about for name, about in sorted(below.items()) if name}


def matching(url: str) -> list[str]:
    """The URLs of objects that match a URL with wildcards, sorted."""
    files, key = locate(url)
    folder = re.split(r"[*?\[]", url)[0].rpartition("/")[0]
    root = key[: len(key) - len(url) + len(folder)]
    return sorted(folder + path[len(root) :] for path in retried(url, files.glob, key))


def remove(url: str) -> None:
    """Remove an object or a local file, if it is there. Raises SabiaError."""
    if not is_url(url):
        Path(url).unlink(missing_ok=True)
        return
    files, key = locate(url)
    with contextlib.suppress(NoObject):
        retried(url, files.rm_file, key)


def put(url: str, data: bytes) -> None:
    """Write a small object, whole. Raises SabiaError."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        upload(file.name, url)


def upload(path: str | Path, url: str) -> None:
    """Copy a local file to a URL, where it is seen when it is whole. Raises SabiaError."""
    files, key = locate(url)
    if set(LOCAL) & {*_protocols(files)}:
        with atomic_path(key) as temporary:
            shutil.copyfile(path, temporary)
        return
    retried(url, _put, files, key, str(path))


def _protocols(files: Any) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)


def _put(files: Any, key: str, path: str) -> None:
    names = _protocols(files)
    small = os.path.getsize(path) <= PART_BYTES or "memory" in names
    if small and set(WHOLE) & {*names}:
        files.pipe_file(key, Path(path).read_bytes())
        return
    if not set(WHOLE) & {*names}:
        files.makedirs(key.rpartition("/")[0], exist_ok=True)
    target = files.open(key, "wb", block_size=PART_BYTES, autocommit=False)
    if not hasattr(target, "commit"):
        raise NotImplementedError(f"{names[0]}:// has no way to write a file that is seen whole")
    try:
        with open(path, "rb", buffering=0) as source:
            while chunk := source.read(CHUNK_BYTES):
                target.write(chunk)
        target.close()
        target.commit()
    except BaseException:
        with contextlib.suppress(Exception):  # its parts are not seen in any case
            target.discard()
        raise


def download(url: str, path: str | Path) -> None:
    """Copy an object to a local file, which appears when it is whole. Raises SabiaError."""
    with open_object(url) as source, atomic_path(path) as temporary, open(temporary, "wb") as file:
        shutil.copyfileobj(source, file, CHUNK_BYTES)
