"""Bytes of a shard at any position, by pread(2).

Nothing is mapped, so that a shard which is cut short while a run reads it is an error with its name
and not a SIGBUS. At most OPEN_FILES files are open at a time.
"""

import contextlib
import os
from functools import lru_cache

import pyarrow as pa

from sabia.core.errors import BadData

OPEN_FILES = 64
Bytes = bytes | memoryview


class _Descriptor:
    """A file that is open for reading as long as this object is used."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(self.number, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.number)


@lru_cache(OPEN_FILES)
def _opened(path: str, version: tuple[int, ...]) -> _Descriptor:
    """An open file; BadData if it is another version than the one whose index was read."""
    try:
        descriptor = _Descriptor(path)
    except OSError as error:
        raise BadData(f"{path}: {error.strerror or error}") from error
    if _version(os.fstat(descriptor.number)) != version:
        raise BadData(f"{path}: the file has changed since it was opened (expected the same file "
                      "during a run)")  # fmt: skip
    return descriptor


def _version(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_ino, status.st_dev


class FileBytes:
    """The bytes of a local file."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self.name, self._version = path, _version(os.stat(path))
        self.size = self._version[0]

    def read(self, position: int, size: int) -> bytes:
        """`size` bytes; BadData if the file ends before."""
        data = self.read_some(position, size)
        if len(data) != size:
            raise BadData(
                f"{self.name}: cut short: it ends before byte {position + size:,} (of "
                f"{self.size:,} bytes when it was opened)"
            )
        return data

    def read_some(self, position: int, size: int) -> bytes:
        """At most `size` bytes, fewer at the end of the file."""
        if position < 0 or not 0 <= size <= self.size:
            raise BadData(f"{self.name}: {size} bytes at {position} (damaged bits)")
        try:
            return os.pread(self._file.number, size, position)
        except OSError as error:
            raise BadData(f"{self.name}: {error.strerror or error}") from error

    def is_current(self) -> bool:
        """Whether the path still names this file, of whatever size."""
        try:
            return _version(os.stat(self.name))[1:] == self._version[1:]
        except OSError:
            return False

    def will_need(self, position: int, size: int) -> None:
        """Let the system read in advance."""
        with contextlib.suppress(OSError, OverflowError):
            os.posix_fadvise(self._file.number, position, size, os.POSIX_FADV_WILLNEED)

    @property
    def _file(self) -> _Descriptor:
        return _opened(self.name, self._version)


class BufferBytes:
    """The bytes of a buffer in memory."""

    def __init__(self, buffer: pa.Buffer, name: str) -> None:
        self.name, self._buffer = name, memoryview(buffer)
        self.size = len(self._buffer)

    def read(self, position: int, size: int) -> memoryview:
        """`size` bytes; BadData if the buffer ends before."""
        data = self.read_some(position, size)
        if len(data) != size:
            raise BadData(f"{self.name}: ends before byte {position + size:,}")
        return data

    def read_some(self, position: int, size: int) -> memoryview:
        """At most `size` bytes, fewer at the end."""
        return self._buffer[position : position + size]

    def will_need(self, position: int, size: int) -> None:
        """The bytes are in memory."""


ShardBytes = FileBytes | BufferBytes
