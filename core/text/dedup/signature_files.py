"""Sketch segments: the hashes of documents from the first pass of dedup, on disk in columns.

A segment holds rows in input order. Its files: `digests` (uint64, in chunks of CHUNK_ROWS rows, a
band's values of a chunk together, so that one band can be read alone), `exact` (uint64, 2 a row),
`worth` (float64), `counts` (uint32, shingles of the row), `shingles` (uint32) and `ids` (an Arrow
stream). `worth` is the priority of the rule of `--keep`. In a scratch or index directory the files
have names, and `segment.json` is written last, so that a segment is complete or absent; otherwise
they are unnamed and disappear with the process. Memory holds exact hashes, priorities, counts and
shingle offsets: 36 bytes per document.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core.errors import BadData
from sabia.core.shards.atomic import read_json, write_json
from sabia.core.shards.spools import IdSpool, Spool
from sabia.kernels.minhash.definitions import Sketches
from sabia.kernels.minhash.interface import gather

CHUNK_ROWS = 1 << 16
VERSION = 1
_NAMES = ("digests", "exact", "worth", "counts", "shingles", "ids")
_MANIFEST = "segment.json"
UNIQUE = np.uint64(0xFFFFFFFFFFFFFFFF)  # with the row number: an exact hash that no other row has


class SegmentWriter:
    """Writes sketches batch by batch; `directory` must exist, None creates unnamed files."""

    def __init__(self, bands: int, with_shingles: bool, directory: Path | None = None) -> None:
        self.bands, self.with_shingles, self.directory = bands, with_shingles, directory
        self.spools = {n: Spool(str(directory / n) if directory else "") for n in _NAMES}
        self.ids = IdSpool(self.spools["ids"])
        self.pending = np.empty((bands, CHUNK_ROWS), np.uint64)
        self.rows = self.pending_rows = 0

    def add(self, sketches: Sketches, priority: np.ndarray, ids: pa.Array) -> None:
        """Append rows."""
        self.spools["exact"].append(sketches.exact)
        self.spools["worth"].append(priority.astype(np.float64))
        self.spools["counts"].append(sketches.counts.astype(np.uint32))
        if self.with_shingles:
            self.spools["shingles"].append(sketches.shingles)
        self.ids.append(ids)
        self.rows += len(priority)
        digests = sketches.digests
        while len(digests):
            first, part = self.pending_rows, digests[: CHUNK_ROWS - self.pending_rows]
            self.pending[:, first : first + len(part)] = part.T
            self.pending_rows += len(part)
            if self.pending_rows == CHUNK_ROWS:
                self._write_chunk()
            digests = digests[len(part) :]

    def _write_chunk(self) -> None:
        self.spools["digests"].append(self.pending[:, : self.pending_rows])
        self.pending_rows = 0

    def close(self, about: dict[str, Any] | None = None) -> "Segment":
        """Flush; in a directory write `segment.json` with `about`."""
        if self.pending_rows:
            self._write_chunk()
        self.ids.close()
        for spool in self.spools.values():
            spool.file.flush()
        if self.directory:
            sizes = {n: (self.directory / n).stat().st_size for n in _NAMES}
            manifest = {"version": VERSION, "rows": self.rows, "bands": self.bands, "sizes": sizes}
            manifest |= {"shingles": self.with_shingles, "about": about or {}}
            manifest["crc32"] = {n: _checksum(self.directory / n) for n in _NAMES}
            write_json(self.directory / _MANIFEST, manifest)
        return Segment(self.rows, self.bands, self.with_shingles, self.spools)


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


@dataclass(frozen=True)
class Segment:
    """Rows on disk; see the module's docstring."""

    rows: int
    bands: int
    with_shingles: bool
    spools: dict[str, Spool]

    @classmethod
    def open(cls, directory: Path) -> "Segment":
        """A segment in a directory; raises BadData if a file is missing, truncated or changed."""
        manifest = read_manifest(directory)
        if manifest is None:
            raise BadData(f"{directory}: no sketches here, or sketches of another version")
        for name in _NAMES:
            path = directory / name
            if not path.exists() or path.stat().st_size != manifest["sizes"][name]:
                raise BadData(f"{path}: missing or truncated; compute the sketches again")
            if "crc32" in manifest and _checksum(path) != manifest["crc32"][name]:
                raise BadData(f"{path}: changed since it was written; create it again")
        spools = {name: Spool(str(directory / name), "rb") for name in _NAMES}
        return cls(manifest["rows"], manifest["bands"], manifest["shingles"], spools)

    def column(self, name: str, dtype: Any, width: int = 1) -> np.ndarray:
        """`exact`, `worth` or `counts` as an array in memory."""
        file = self.spools[name].file
        file.seek(0)
        values = np.fromfile(file, dtype, self.rows * width)
        return values.reshape(self.rows, width) if width > 1 else values

    def chunks(self, band: int) -> Iterator[np.ndarray]:
        """The digests of one band, uint64, chunk by chunk."""
        file = self.spools["digests"].file
        for first in range(0, self.rows, CHUNK_ROWS):
            rows = min(CHUNK_ROWS, self.rows - first)
            file.seek(8 * (first * self.bands + band * rows))
            yield np.fromfile(file, np.uint64, rows)


def blank_segment(ids: pa.Array, bands: int, with_shingles: bool) -> Segment:
    """Rows with ids, like documents without words that are equal to no other."""
    writer, rows = SegmentWriter(bands, with_shingles), len(ids)
    exact = np.stack((np.arange(rows, dtype=np.uint64), np.full(rows, UNIQUE)), axis=1)
    none, digests = np.zeros(rows, np.uint32), np.zeros((rows, bands), np.uint64)
    writer.add(Sketches(digests, exact, none, none, none[:0], none), np.full(rows, -np.inf), ids)
    return writer.close()


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The contents of `segment.json`; None if it is missing or of another version."""
    try:
        manifest = read_json(directory / _MANIFEST)
    except (OSError, ValueError):
        return None
    return manifest if manifest.get("version") == VERSION else None


class Corpus:
    """Concatenated segments with rows 0 … count - 1; starts[i]: the first row of source i."""

    def __init__(self, segments: Sequence[Segment], starts: np.ndarray) -> None:
        self.segments, self.starts = list(segments), starts
        self.firsts = np.concatenate(([0], np.cumsum([s.rows for s in segments]))).astype(int)
        self.count = int(self.firsts[-1])
        self.bands = segments[0].bands if segments else 0
        none = np.empty((0, 2), np.uint64)
        self.exact = np.concatenate([none, *(s.column("exact", np.uint64, 2) for s in segments)])
        self.priority = self._all_rows("worth", np.float64)
        self.counts = self._all_rows("counts", np.uint32)
        self.ends = np.cumsum(self.counts, dtype=np.int64)  # of shingles, over all segments
        self.bases = np.concatenate(([0], self.ends))[self.firsts]

    def _all_rows(self, name: str, dtype: Any) -> np.ndarray:
        return np.concatenate([np.empty(0, dtype), *(s.column(name, dtype) for s in self.segments)])

    def band(self, number: int) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, digests uint64) of one band, chunk by chunk."""
        for first, segment in zip(self.firsts, self.segments, strict=False):
            row = int(first)
            for chunk in segment.chunks(number):
                yield row, chunk
                row += len(chunk)

    def shingles(self, rows: np.ndarray, engine: str) -> tuple[np.ndarray, np.ndarray]:
        """(shingles uint32, starts int64[r + 1]) of ascending rows."""
        counts = self.counts[rows].astype(np.int64)
        starts = np.concatenate(([0], np.cumsum(counts)))
        values = np.empty(int(starts[-1]), np.uint32)
        bounds = np.searchsorted(rows, self.firsts)
        for index in np.flatnonzero(np.diff(bounds)).tolist():
            low, high = bounds[index : index + 2]
            offsets = self.ends[rows[low:high]] - counts[low:high] - self.bases[index]
            file = self.segments[index].spools["shingles"].file.fileno()
            target = values[starts[low] : starts[high]]
            gather(file, offsets, counts[low:high], target, engine)
        return values, starts

    def take(self, rows: np.ndarray) -> pa.Array:
        """Ids of ascending rows."""
        bounds = np.searchsorted(rows, self.firsts)
        parts = [
            IdSpool.read(segment.spools["ids"], rows[low:high] - first)
            for segment, first, low, high in zip(
                self.segments, self.firsts, bounds, bounds[1:], strict=False
            )
        ]
        return pa.concat_arrays(parts) if parts else pa.array([], pa.string())
