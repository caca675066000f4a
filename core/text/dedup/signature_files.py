"""Sketch segments: the hashes of documents from the first pass of dedup, on disk in columns.

A segment holds rows in input order. Its files: `digests` (uint64, in chunks of CHUNK_ROWS rows, a
band's values of a chunk together, so that one band can be read alone), `exact` (uint64, 2 a row),
`worth` (float64), `counts` (uint32, shingles of the row), `shingles` (uint32) and `ids` (an Arrow
stream). `worth` is the priority of the rule of `--keep`. In a scratch or index directory the files
have names, and `segment.json` is written last, so that a segment is complete or absent; otherwise
they are unnamed and disappear with the process. They are read in pieces or at single rows: none of
them is held in memory or mapped.
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
_COLUMNS: dict[str, tuple[Any, int]] = {"exact": (np.dtype("u8"), 2), "worth": (np.dtype("f8"), 1),
            "counts": (np.dtype("u4"), 1)}  # fmt: skip
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

    def column(self, name: str) -> Iterator[np.ndarray]:
        """`exact`, `worth` or `counts`, chunk by chunk."""
        file, (dtype, width) = self.spools[name].file, _COLUMNS[name]
        for first in range(0, self.rows, CHUNK_ROWS):
            file.seek(first * width * dtype.itemsize)
            values = np.fromfile(file, dtype, min(CHUNK_ROWS, self.rows - first) * width)
            yield values.reshape(-1, width) if width > 1 else values

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
    """Concatenated segments with rows 0 … count - 1; starts[i]: the first row of source i.

    dead int64, ascending: rows that are read like texts without words which no other row equals.
    """

    def __init__(
        self, segments: Sequence[Segment], starts: np.ndarray, dead: np.ndarray | None = None
    ) -> None:
        self.segments, self.starts = list(segments), starts
        self.dead = np.empty(0, np.int64) if dead is None else dead
        self.firsts = np.concatenate(([0], np.cumsum([s.rows for s in segments]))).astype(int)
        self.count = int(self.firsts[-1])
        self.bands = segments[0].bands if segments else 0
        self._extents = Spool()  # of each row's shingles in its segment's file: start, end (int64)
        for segment in segments:
            end = 0
            for counts in segment.column("counts"):
                ends = end + np.cumsum(counts, dtype=np.int64)
                self._extents.append(np.stack((ends - counts, ends), axis=1))
                end = int(ends[-1])
        self._extents.file.flush()

    def column(self, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, values) of `exact` uint64[r, 2], `worth` float64 or `counts` uint32."""
        for first, segment in zip(self.firsts.tolist(), self.segments, strict=False):
            row = first
            for values in segment.column(name):
                low, high = np.searchsorted(self.dead, (row, row + len(values)))
                dead = self.dead[low:high]
                if name == "counts":
                    values[dead - row] = 0
                elif name == "exact":
                    unique = np.full(len(dead), UNIQUE)
                    values[dead - row] = np.stack((dead.astype(np.uint64), unique), axis=1)
                yield row, values
                row += len(values)

    def values(self, name: str, rows: np.ndarray) -> np.ndarray:
        """The values of a column at ascending rows."""
        dtype, width = _COLUMNS[name]
        none = np.empty((0, width), dtype)
        return np.concatenate([none if width > 1 else none[:, 0], *chosen(self.column(name), rows)])

    def band(self, number: int) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, digests uint64) of one band, chunk by chunk."""
        for first, segment in zip(self.firsts, self.segments, strict=False):
            row = int(first)
            for chunk in segment.chunks(number):
                yield row, chunk
                row += len(chunk)

    def digests(self, number: int, rows: np.ndarray) -> np.ndarray:
        """The digests of one band at ascending rows, uint64."""
        return np.concatenate([np.empty(0, np.uint64), *chosen(self.band(number), rows)])

    def extents(self, rows: np.ndarray, engine: str) -> np.ndarray:
        """int64[r, 2]: where the shingles of rows start and end in the files of their segments."""
        words = np.empty((len(rows), 4), np.uint32)
        four = np.full(len(rows), 4)
        gather(self._extents.file.fileno(), 4 * rows, four, words.reshape(-1), engine)
        return words.view(np.int64)

    def shingles(
        self, rows: np.ndarray, extents: np.ndarray, engine: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """(shingles uint32, starts int64[r + 1]) of ascending rows with these extents."""
        offsets, counts = np.ascontiguousarray(extents[:, 0]), extents[:, 1] - extents[:, 0]
        starts = np.concatenate(([0], np.cumsum(counts)))
        values = np.empty(int(starts[-1]), np.uint32)
        bounds = np.searchsorted(rows, self.firsts)
        for index in np.flatnonzero(np.diff(bounds)).tolist():
            low, high = bounds[index : index + 2]
            file = self.segments[index].spools["shingles"].file.fileno()
            target = values[starts[low] : starts[high]]
            gather(file, offsets[low:high], counts[low:high], target, engine)
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


def chosen(chunks: Iterator[tuple[int, np.ndarray]], rows: np.ndarray) -> Iterator[np.ndarray]:
    """The values at ascending rows, of each chunk."""
    for first, values in chunks:
        low, high = np.searchsorted(rows, (first, first + len(values)))
        yield values[rows[low:high] - first]
