"""First pass of dedup: every document's exact hash, band digests, size and id, in input order.

Rows are numbered over all sources in order; `starts[i]` is the first row of source i. Digests and
ids go to unnamed temporary files (they vanish with the process, whatever ends it) and are read
back through memory maps; what stays in memory is 16 bytes of exact hash, 8 of size and 8 of score
a document. Threads share the work: kernels hold no lock, and results are kept in order.
"""

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

import numpy as np
import pyarrow as pa

from sabia.core import notes, stop
from sabia.core.errors import MissingBackend, UsageError
from sabia.core.progress import progress
from sabia.core.shards.sources import Source
from sabia.core.text.scores import score_values
from sabia.kernels import minhash
from sabia.kernels.minhash import SketchConfig, Sketches

A = TypeVar("A")
R = TypeVar("R")


def choose_engine(name: str) -> str:
    """numba or numpy for auto, numba or numpy; warns where `auto` has to take the slow one."""
    if name not in ("auto", *minhash.ENGINES):
        raise UsageError(f"--engine: {name!r} (expected auto, {' or '.join(minhash.ENGINES)})")
    there = minhash.numba_available()
    if name == "numba" and not there:
        raise MissingBackend("--engine numba: package 'numba' is missing; pip install it")
    if name != "auto":
        return name
    if not there:
        notes.warn("package 'numba' is missing: engine numpy, about 10x slower")
    return "numba" if there else "numpy"


def text_buffers(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """(bytes uint8, offsets int64[n + 1]) of a string array without nulls; no copy of the text."""
    _, offsets, data = column.buffers()
    bounds = np.frombuffer(offsets or b"\0\0\0\0", np.int32)
    bounds = bounds[column.offset : column.offset + len(column) + 1].astype(np.int64)
    return np.frombuffer(data or b"", np.uint8), bounds


def in_order(function: Callable[[A], R], items: Iterable[A], jobs: int) -> Iterator[R]:
    """function(item) for each item, in order, on `jobs` threads, a few items ahead."""
    if jobs <= 1:
        for item in items:
            stop.check()
            yield function(item)
        return
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(jobs) as pool:
        for item in items:
            stop.check()
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * jobs:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class Spool:
    """An unnamed temporary file that is written once and then mapped."""

    def __init__(self) -> None:
        self.file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this

    @property
    def path(self) -> str:
        """A path that other processes can open while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.file.fileno()}"

    def append(self, values: np.ndarray) -> None:
        """Write an array's bytes at the end."""
        self.file.write(np.ascontiguousarray(values).data)

    def array(self, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """What was written, as a read-only array."""
        self.file.flush()
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.memmap(self.file, dtype, mode="r", shape=shape)


@dataclass(frozen=True)
class Corpus:
    """What the first pass learnt of n documents; `ids` reads ids of ascending rows."""

    starts: np.ndarray  # int64[sources + 1]
    exact: np.ndarray  # uint64[n, 2]
    digests: np.ndarray  # uint64[n, bands]
    words: np.ndarray  # int64[n]
    size: np.ndarray  # int64[n], bytes of text
    score: np.ndarray | None  # float64[n], NaN where missing
    rows_per_band: int
    ids: "IdSpool"

    @property
    def count(self) -> int:
        """Number of documents."""
        return len(self.size)


class IdSpool:
    """The id column on disk, as an Arrow file."""

    def __init__(self) -> None:
        self.spool = Spool()
        schema = pa.schema([("id", pa.string())])
        self.writer = pa.ipc.new_stream(self.spool.file, schema)

    def append(self, ids: pa.Array) -> None:
        """Add the ids of one batch."""
        self.writer.write_batch(pa.RecordBatch.from_arrays([ids], names=["id"]))

    def take(self, rows: np.ndarray) -> pa.Array:
        """Ids of ascending row numbers; closes the spool to writing."""
        self.writer.close()
        self.spool.file.flush()
        parts, first = [], 0
        with pa.memory_map(self.spool.path) as mapped:
            for batch in pa.ipc.open_stream(mapped):
                low, high = np.searchsorted(rows, (first, first + batch.num_rows))
                parts.append(batch.column(0).take(pa.array(rows[low:high] - first)))
                first += batch.num_rows
        return pa.concat_arrays(parts) if parts else pa.array([], pa.string())


def read_corpus(
    sources: Sequence[Source], config: SketchConfig, engine: str, jobs: int, score: str = ""
) -> Corpus:
    """Read all sources once. `score` names an entry of the scores column to keep beside."""
    digests, ids = Spool(), IdSpool()
    exact: list[np.ndarray] = []
    words, size, scores = [], [], []
    rows = np.zeros(len(sources) + 1, np.int64)

    def work(item: tuple[int, pa.RecordBatch]) -> tuple[int, pa.RecordBatch, Sketches]:
        data, offsets = text_buffers(item[1].column("text"))
        return *item, minhash.sketch(data, offsets, config, engine)

    columns = ["id", "text"] + (["scores"] if score else [])
    with progress(_total(sources), "dedup: reading") as bar:
        for index, batch, sketches in in_order(work, batches_of(sources, columns), jobs):
            digests.append(sketches.digests)
            ids.append(batch.column("id"))
            exact.append(sketches.exact)
            words.append(sketches.words)
            size.append(np.diff(text_buffers(batch.column("text"))[1]))
            if score:
                scores.append(score_values(batch.column("scores"), score))
            rows[index + 1] += batch.num_rows
            bar.advance(batch.num_rows)
    starts = np.cumsum(rows)
    return Corpus(
        starts=starts,
        exact=np.concatenate([np.empty((0, 2), np.uint64), *exact]),
        digests=digests.array(np.uint64, (int(starts[-1]), config.bands)),
        words=np.concatenate([np.empty(0, np.int64), *words]),
        size=np.concatenate([np.empty(0, np.int64), *size]),
        score=np.concatenate([np.empty(0), *scores]) if score else None,
        rows_per_band=config.rows,
        ids=ids,
    )


def batches_of(
    sources: Sequence[Source], columns: Sequence[str]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """(source number, batch) of all sources in order."""
    for index, source in enumerate(sources):
        for batch in source.batches(columns):
            yield index, batch


def _total(sources: Sequence[Source]) -> int | None:
    counts = [source.rows() for source in sources]
    return None if None in counts else sum(filter(None, counts))


def shingle_sets_of(
    sources: Sequence[Source],
    starts: np.ndarray,
    rows: np.ndarray,
    ngram: int,
    engine: str,
    jobs: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Shingles of some ascending rows: (values uint32, starts int64[r + 1])."""
    spool, counts = Spool(), [np.zeros(1, np.int64)]

    def work(texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        made = minhash.sketch(*text_buffers(texts), SketchConfig(ngram, bands=0), engine)
        return made.shingles, np.concatenate(([0], np.cumsum(made.counts)))

    with progress(len(rows), "dedup: comparing") as bar:
        for values, bounds in in_order(work, _texts_of(sources, starts, rows), jobs):
            spool.append(values)
            counts.append(np.diff(bounds))
            bar.advance(len(bounds) - 1)
    bounds = np.cumsum(np.concatenate(counts))
    return spool.array(np.uint32, (int(bounds[-1]),)), bounds


def _texts_of(
    sources: Sequence[Source], starts: np.ndarray, rows: np.ndarray
) -> Iterator[pa.Array]:
    """The texts of ascending rows, batch by batch; sources without any are not opened."""
    for index, source in enumerate(sources):
        first = int(starts[index])
        if not np.diff(np.searchsorted(rows, starts[index : index + 2]))[0]:
            continue
        for batch in source.batches(["id", "text"]):  # without id, conforming would make ids
            low, high = np.searchsorted(rows, (first, first + batch.num_rows))
            if high > low:
                yield batch.column("text").take(pa.array(rows[low:high] - first))
            first += batch.num_rows
