"""What the passes of dedup share: engines, text as buffers, work in order, files that vanish."""

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from sabia.core import notes, stop
from sabia.core.errors import MissingBackend, UsageError
from sabia.core.progress import progress
from sabia.core.shards.sources import Source, batches_of
from sabia.kernels import minhash

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
    """A temporary file that is written once and then read or mapped.

    Without a `path` it is unnamed, in `directory` (None: the directory for temporary files).
    """

    def __init__(self, path: str = "", mode: str = "w+b", directory: str | None = None) -> None:
        self.file: Any = (
            open(path, mode) if path else tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        )

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


class IdSpool:
    """The id column on disk, as an Arrow file, and how many rows each source has."""

    def __init__(self, spool: Spool | None = None, sources: int = 1) -> None:
        self.spool, self.rows = spool or Spool(), np.zeros(sources + 1, np.int64)
        schema = pa.schema([("id", pa.string())])
        self.writer = pa.ipc.new_stream(self.spool.file, schema)

    @property
    def starts(self) -> np.ndarray:
        """int64[sources + 1]: the first row of each source, and the end."""
        return np.cumsum(self.rows)

    def append(self, ids: pa.Array, source: int = 0) -> None:
        """Add the ids of one batch."""
        self.writer.write_batch(pa.RecordBatch.from_arrays([ids], names=["id"]))
        self.rows[source + 1] += len(ids)

    def close(self) -> None:
        """End the writing."""
        self.writer.close()
        self.spool.file.flush()

    def take(self, rows: np.ndarray) -> pa.Array:
        """Ids of ascending row numbers; closes the spool to writing."""
        self.close()
        return self.read(self.spool, rows)

    @staticmethod
    def read(spool: Spool, rows: np.ndarray) -> pa.Array:
        """Ids of ascending row numbers from a spool that was written before."""
        parts, first = [pa.array([], pa.string())], 0
        with pa.OSFile(spool.path) as file:
            for batch in pa.ipc.open_stream(file):
                low, high = np.searchsorted(rows, (first, first + batch.num_rows))
                parts.append(batch.column(0).take(pa.array(rows[low:high] - first)))
                first += batch.num_rows
        return pa.concat_arrays(parts)


def first_pass(
    sources: Sequence[Source], columns: Sequence[str], work: Callable[[pa.RecordBatch], R],
    jobs: int, total: int | None = None,
) -> Iterator[tuple[int, pa.RecordBatch, R]]:  # fmt: skip
    """(source number, batch, work(batch)) of all sources in order; a bar counts up to `total`."""

    def worked(item: tuple[int, pa.RecordBatch]) -> tuple[int, pa.RecordBatch, R]:
        return *item, work(item[1])

    with progress(total, "dedup: reading") as bar:
        for found in in_order(worked, batches_of(sources, columns), jobs):
            yield found
            bar.advance(found[1].num_rows)
