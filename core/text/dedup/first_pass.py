"""First pass of dedup over its input: the MinHash implementation, and the batches in order."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa

from sabia.core import notes
from sabia.core.errors import MissingBackend, UsageError
from sabia.core.notes import progress
from sabia.core.shards.executors.processes import map_threads
from sabia.core.shards.sources import Source, batches_of
from sabia.kernels.minhash.definitions import ENGINES
from sabia.kernels.runtime.dispatch import AUTO, numba_available

R = TypeVar("R")


def choose_engine(name: str) -> str:
    """The engine of kernels (dispatch.engine_module) for auto, numba or numpy; warns if `auto` is
    the slow one."""
    if name not in (AUTO, *ENGINES):
        raise UsageError(f"--engine: {name!r} (expected auto, {' or '.join(ENGINES)})")
    if numba_available():
        return name
    if name == "numba":
        raise MissingBackend("--engine numba: package is missing; pip install numba")
    if name == AUTO:
        notes.warn("package 'numba' is missing: engine numpy, about 10x slower")
    return "numpy"


def first_pass(
    sources: Sequence[Source], columns: Sequence[str], work: Callable[[pa.RecordBatch, str], R],
    jobs: int, total: int | None = None,
) -> Iterator[tuple[int, pa.RecordBatch, R]]:  # fmt: skip
    """(source number, batch, work(batch, source name)) of all sources in order, with a progress
    bar."""

    def worked(item: tuple[int, pa.RecordBatch]) -> tuple[int, pa.RecordBatch, R]:
        return *item, work(item[1], sources[item[0]].name)

    with progress(total, "dedup: reading") as bar:
        for item in map_threads(worked, batches_of(sources, columns), jobs):
            yield item
            bar.advance(item[1].num_rows)
