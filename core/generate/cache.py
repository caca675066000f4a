"""A content-addressed cache of finished calls that outlives kill -9 and is shared by processes.

A directory of append-only segments, one a process: lines of a 64-digit key, a space, the JSON of
the reply, a line end. `append` returns after fsync, so an answer that was used is an answer that is
kept. Reading merges all segments; a last line without its line end (its writer died, or is still
writing) is not there yet. The index holds places, not replies: about 200 bytes a call.
"""

import json
import os
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from sabia.core.shards.atomic import fsync_directory

KEY_DIGITS = 64
REFRESH_S = 1.0


class CallCache:
    """key → reply, in a directory. Thread-safe."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._places: dict[str, tuple[Path, int, int]] = {}
        self._read_to: dict[Path, int] = {}
        self._segment: BinaryIO | None = None
        self._lock = threading.Lock()
        self._refreshed = 0.0
        self._directory.mkdir(parents=True, exist_ok=True)
        self._refresh()

    def __len__(self) -> int:
        return len(self._places)

    def get(self, key: str) -> dict[str, Any] | None:
        """The reply of a finished call, or None; looks for other processes' new ones on a miss."""
        with self._lock:
            if key not in self._places and time.monotonic() - self._refreshed > REFRESH_S:
                self._refresh()
            place = self._places.get(key)
            return None if place is None else self._read(*place)

    def append(self, replies: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Keeps finished calls; when it returns they survive a kill and a power cut."""
        lines = [(key, json.dumps(reply, ensure_ascii=True).encode()) for key, reply in replies]
        with self._lock:
            segment = self._segment or self._new_segment(self._directory)
            path, offset = Path(segment.name), segment.tell()
            for key, line in lines:
                segment.write(key.encode() + b" " + line + b"\n")
                start = offset + KEY_DIGITS + 1
                self._places.setdefault(key, (path, start, len(line)))
                offset = start + len(line) + 1
            segment.flush()
            os.fsync(segment.fileno())
            self._read_to[path] = offset

    def close(self) -> None:
        """Closes the segment; the cache may go on being read."""
        with self._lock:
            if self._segment is not None:
                self._segment.close()
                self._segment = None

    def _new_segment(self, directory: Path) -> BinaryIO:
        name = f"calls-{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.log"
        self._segment = open(directory / name, "xb")  # noqa: SIM115 - open for the cache's life
        fsync_directory(directory)
        return self._segment

    def _refresh(self) -> None:
        self._refreshed = time.monotonic()
        for path in sorted(self._directory.glob("calls-*.log")):
            start = self._read_to.get(path, 0)
            if path.stat().st_size > start:
                self._read_to[path] = self._scan(path, start)

    def _scan(self, path: Path, offset: int) -> int:
        """Indexes whole lines from `offset` on; returns where the next scan begins."""
        with path.open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                key = line[:KEY_DIGITS].decode("ascii", "replace")
                length = len(line) - KEY_DIGITS - 2
                if length > 0 and line[KEY_DIGITS : KEY_DIGITS + 1] == b" ":
                    self._places.setdefault(key, (path, offset + KEY_DIGITS + 1, length))
                offset += len(line)
        return offset

    def _read(self, path: Path, start: int, length: int) -> dict[str, Any] | None:
        try:
            with path.open("rb") as file:
                file.seek(start)
                return json.loads(file.read(length))
        except (OSError, ValueError):  # somebody removed or damaged the segment: call again
            return None
