"""A content-addressed cache of finished calls that survives kill -9 and is shared by processes.

A directory of append-only segments, one per process: lines of a 64-digit key, a space, the JSON of
the reply with its key and digest, a line break; a damaged line counts as absent. `append` returns
after fsync, so every reply that was used is on disk. Reading merges all segments; a last line
without a line break (its writer died, or is still writing) is ignored. The index holds file
positions, not replies: about 200 bytes per call.
"""

import json
import os
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from sabia.core.shards.atomic import fsync_directory, sealed, unsealed

KEY_DIGITS = 64
REFRESH_S = 1.0


class CallCache:
    """key → reply, in a directory. Thread-safe."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._locations: dict[str, tuple[Path, int, int]] = {}
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
            return None if location is None else self._read(key, *location)

    def append(self, replies: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Store finished calls; when it returns they survive a kill and a power failure."""
        lines = [(key, json.dumps(sealed({**reply, "": key})).encode()) for key, reply in replies]
        with self._lock:
            if self._segment is None:
                name = f"calls-{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.log"
                self._segment = open(self._directory / name, "xb")  # noqa: SIM115 - kept open
                fsync_directory(self._directory)
            segment = self._segment
            path, offset = Path(segment.name), segment.tell()
            for key, line in lines:
                segment.write(key.encode() + b" " + line + b"\n")
                start = offset + KEY_DIGITS + 1
                self._locations.setdefault(key, (path, start, len(line)))
                offset = start + len(line) + 1
            segment.flush()
            os.fsync(segment.fileno())
            self._read_to[path] = offset

    def close(self) -> None:
        """Close the segment; the cache can still be read."""
        with self._lock:
            if self._segment is not None:
                self._segment.close()
                self._segment = None

    def _refresh(self) -> None:
        """Index the complete lines that were added to the segments."""
        self._refreshed = time.monotonic()
        for path in sorted(self._directory.glob("calls-*.log")):
            offset = self._read_to.get(path, 0)
            if path.stat().st_size <= offset:
                continue
            with path.open("rb") as file:
                file.seek(offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    key = line[:KEY_DIGITS].decode("ascii", "replace")
                    length = len(line) - KEY_DIGITS - 2
                    if length > 0 and line[KEY_DIGITS : KEY_DIGITS + 1] == b" ":
                        self._locations.setdefault(key, (path, offset + KEY_DIGITS + 1, length))
                    offset += len(line)
            self._read_to[path] = offset

    def _read(self, key: str, path: Path, start: int, length: int) -> dict[str, Any] | None:
        try:
            with path.open("rb") as file:
                file.seek(start)
                reply = unsealed(json.loads(file.read(length)))
                return reply if reply.pop("", key) == key else None
        except (OSError, ValueError):  # the segment was removed or damaged: call again
            return None
