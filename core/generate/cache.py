"""A content-addressed cache of finished calls that survives kill -9 and is shared by processes.

A directory of append-only segments, one per process: lines of a 64-digit key, a space, the JSON of
the reply with its key and digest, a line break; a damaged line counts as absent. A reply survives a
kill once it is written, and a power failure after `sync`. Reading merges all segments; of several
replies to a key the last one counts, and a last line without a line break (its writer died, or is
still writing) is ignored. The index holds file positions, not replies: about 200 bytes per call.
"""

import errno
import json
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from sabia.core.shards.atomic import fsync_directory, sealed, unsealed

KEY_DIGITS = 64
Location = tuple[Path, int, int]  # file, first byte of the reply, length
REFRESH_S = 1.0


class CallCache:
    """key → reply, in a directory. Thread-safe."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._locations: dict[str, Location] = {}
        self._read_to: dict[Path, int] = {}
        self._segment: BinaryIO | None = None
        self._lock = threading.Lock()
        self._refreshed = 0.0
        self._directory.mkdir(parents=True, exist_ok=True)
        self._refresh()

    def __len__(self) -> int:
        return len(self._locations)

    def get(self, key: str) -> dict[str, Any] | None:
        """The reply of a finished call, or None; a miss looks for new calls of other processes."""
        with self._lock:
            if key not in self._locations and time.monotonic() - self._refreshed > REFRESH_S:
                self._refresh()
            location = self._locations.get(key)
            if location is None:
                return None
            return self._read(key, location) or self._search(key)

    def append(self, replies: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Store finished calls; when it returns they survive a kill and a power failure."""
        self.write_all(list(replies))
        self.sync()

    def write(self, key: str, reply: Mapping[str, Any]) -> None:
        """Store a finished call; when it returns it survives a kill of this process."""
        self.write_all([(key, reply)])

    def write_all(self, replies: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Store several at once, so that a kill leaves all of them or none."""
        texts = [json.dumps(sealed({**reply, "": key})).encode() for key, reply in replies]
        lines = [
            key.encode() + b" " + text + b"\n"
            for (key, _), text in zip(replies, texts, strict=True)
        ]
        if not lines:
            return
        with self._lock:
            if self._segment is None:
                name = f"calls-{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.log"
                path = self._directory / name
                self._segment = open(path, "xb", buffering=0)  # noqa: SIM115 - kept open
                fsync_directory(self._directory)
            path = Path(self._segment.name)
            start = self._read_to.get(path, 0)
            if self._segment.write(b"".join(lines)) != sum(map(len, lines)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            for (key, _), text, line in zip(replies, texts, lines, strict=True):
                self._locations[key] = (path, start + KEY_DIGITS + 1, len(text))
                start += len(line)
            self._read_to[path] = start

    def sync(self) -> None:
        """Make the calls written so far survive a power failure; others may write meanwhile."""
        with self._lock:
            segment = self._segment
        if segment is not None:
            os.fsync(segment.fileno())

    def close(self) -> None:
        """Close the segment; the cache can still be read."""
        with self._lock:
            if self._segment is not None:
                self._segment.close()
                self._segment = None

    def _refresh(self) -> None:
        """Index the complete lines that were added to the segments."""
        self._refreshed = time.monotonic()
        for path in self._segments():
            if path.stat().st_size > self._read_to.get(path, 0):
                for key, location in self._lines(path, self._read_to.get(path, 0)):
                    self._locations[key] = location
                    self._read_to[path] = sum(location[1:]) + 1

    def _segments(self) -> list[Path]:
        return sorted(self._directory.glob("calls-*.log"))

    @staticmethod
    def _lines(path: Path, offset: int) -> Iterator[tuple[str, Location]]:
        """Key and location of the complete lines of a segment from an offset on."""
        with path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                key = line[:KEY_DIGITS].decode("ascii", "replace")
                length = len(line) - KEY_DIGITS - 2
                if length > 0:
                    yield key, (path, offset + KEY_DIGITS + 1, length)
                offset += len(line)

    def _search(self, key: str) -> dict[str, Any] | None:
        """The last undamaged reply to a key whose indexed line is damaged; None: call again."""
        del self._locations[key]
        for path in reversed(self._segments()):
            of_key = [location for name, location in self._lines(path, 0) if name == key]
            for location in reversed(of_key):
                if (reply := self._read(key, location)) is not None:
                    self._locations[key] = location
                    return reply
        return None

    @staticmethod
    def _read(key: str, location: Location) -> dict[str, Any] | None:
        path, start, length = location
        try:
            with path.open("rb") as file:
                file.seek(start)
                reply = unsealed(json.loads(file.read(length)))
                return reply if reply.pop("", key) == key else None
        except (OSError, ValueError):  # the segment was removed or damaged
            return None
