"""What `--dry-run` shows: what would be read and written, with estimates of CPU, memory and bytes.

The estimates of a data stage are measured, not tabulated: the stage's own transform runs over the
first rows (twice, so that compiling does not count), its rows are written to memory as they would
be to disk, and both are scaled by the rows or bytes that there are.
"""

import io
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import pyarrow as pa

from sabia.core import units
from sabia.core.shards.job import Job
from sabia.core.shards.rejects import Rejects
from sabia.core.shards.schemas import Reject
from sabia.core.shards.sources import BATCH_ROWS, Source, ignore_reject

Made = TypeVar("Made")
SAMPLE_ROWS = 1_000
SAMPLE_BYTES = 4 << 20


@dataclass
class DryRun:
    """The plan of a call. Estimates are None if nothing could be measured."""

    command: str
    reads: list[dict[str, Any]] = field(default_factory=list)  # name, bytes
    writes: list[dict[str, Any]] = field(default_factory=list)  # path, action (write, keep), from
    cpu_seconds: float | None = None
    memory_bytes: int | None = None
    bytes_written: int | None = None
    figures: dict[str, Any] = field(default_factory=dict)  # other figures of the stage
    basis: str = ""  # of the estimates

    def show(self, job: Job) -> None:
        """Print it to stdout as text, or with `--json` as one object."""
        if job.json:
            print(json.dumps(asdict(self), default=str))
            return
        for one in self.reads:
            size = "" if one["bytes"] is None else f" ({units.format_bytes(one['bytes'])})"
            print(f"read {one['name']}{size}")
        for one in self.writes:
            print(f"{one['action']} {one['path']} from {one['from']}")
        for name, value in self.figures.items():
            print(f"{name}: {value}")
        if self.cpu_seconds is not None:
            print(f"CPU time: about {units.format_duration(self.cpu_seconds)}")
        if self.memory_bytes is not None:
            print(f"memory: about {units.format_bytes(self.memory_bytes)}")
        if self.bytes_written is not None:
            print(f"bytes written: about {units.format_bytes(self.bytes_written)}")
        if self.basis:
            print(f"estimated from {self.basis}")
        sys.stdout.flush()


class NoRejects(Rejects):
    """Counts the rejected rows of a sample and writes none."""

    def _flush(self) -> None:
        self._rows = []


def planned(
    job: Job, read: Sequence[Source | str] = (), *, keep: bool = False, **more: object
) -> DryRun:
    """The plan of a call that reads the named inputs and writes `-o` as a whole.

    read: by default the inputs. keep: the output is already complete. more: fields of DryRun.
    """
    read = read or job.inputs or ("stdin",)
    names = {s if isinstance(s, str) else s.name: file_bytes(s) for s in read}
    path, action = "stdout" if job.to_stdout else str(job.out), "keep" if keep else "write"
    shown: dict[str, Any] = {
        "reads": [{"name": name, "bytes": size} for name, size in names.items()],
        "writes": [{"path": path, "action": action, "from": f"{len(names)} inputs"}],
    }
    return DryRun(job.command, **(shown | more))


def unmeasured(_sample: "Sample") -> Iterator[pa.RecordBatch]:
    """Replaces a transform that a dry run must not run, because it costs calls or needs a model."""
    return iter(())


@dataclass(frozen=True)
class Sample:
    """The first rows of a source, as a source."""

    source: Source
    count: int

    @property
    def name(self) -> str:
        """That of the source."""
        return self.source.name

    def fingerprint(self) -> str:
        """That of the source, marked."""
        return f"{self.source.fingerprint()} {self.count}"

    def rows(self) -> int:
        """How many."""
        return self.count

    def batches(
        self,
        columns: Sequence[str] | None = None,
        rows: int = BATCH_ROWS,
        reject: Reject = ignore_reject,
    ) -> Iterator[pa.RecordBatch]:
        """See Source.batches."""
        left = self.count
        for batch in self.source.batches(columns, rows, reject):
            yield batch.slice(0, left)
            left -= batch.num_rows
            if left <= 0:
                return


def first_rows(source: Source) -> tuple[int, int]:
    """(rows, bytes in memory) of a sample: at most SAMPLE_ROWS, and SAMPLE_BYTES and a batch."""
    rows = size = 0
    for batch in source.batches(rows=SAMPLE_ROWS // 4):
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= SAMPLE_ROWS or size >= SAMPLE_BYTES:
            break
    return rows, size


def file_bytes(source: Source | str) -> int | None:
    """Bytes of the shard or file, None if it is unknown."""
    try:
        if isinstance(source, str):
            return os.path.getsize(source) if os.path.isfile(source) else None
        return source.size()
    except OSError:
        return None


def measured(work: Callable[[], Made]) -> tuple[Made, float]:
    """The result and the CPU seconds of the second call: compilation is not counted."""
    for _ in range(2):
        started = _cpu_seconds()
        result = work()
    return result, _cpu_seconds() - started


def _cpu_seconds() -> float:
    """Of this process, to the microsecond, and of those that it started and that have ended."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


def parquet_bytes(batches: Sequence[pa.RecordBatch]) -> int:
    """Bytes of a shard of these rows."""
    from sabia.core.shards.outputs import ParquetRows

    sink = io.BytesIO()
    if batches:
        writer = ParquetRows(sink, batches[0].schema)
        for batch in batches:
            writer.write(batch)
        writer.close()
    return sink.tell()


def peak_memory() -> int:
    """Bytes that this process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def estimate(
    plan: DryRun,
    sources: Sequence[Source],
    transformed: Callable[[Sample], Iterator[Any]],
    jobs: int,
    size: Callable[[Sequence[Any]], int] = parquet_bytes,
) -> float:
    """Fill in a plan's estimates by running a transform over the first rows of the first source.

    `transformed(sample)` gives the rows that would be written, `size` their bytes on disk. CPU
    seconds are those of all workers together, memory that of all at once. Returns how many times
    the sample all rows are, 0 where there is none.
    """
    if not sources:
        plan.cpu_seconds, plan.bytes_written, plan.basis = 0.0, 0, "nothing to do"
        return 0.0
    rows, arrow_bytes = first_rows(sources[0])
    if not rows:
        return 0.0
    sample = Sample(sources[0], rows)
    written, seconds = measured(lambda: size(list(transformed(sample))))
    counts = [source.rows() for source in sources]
    if None not in counts:
        scale = sum(filter(None, counts)) / rows
    else:  # by bytes, because a format does not state its rows
        sizes = [file_bytes(source) or 0 for source in sources]
        whole = rows < SAMPLE_ROWS and arrow_bytes < SAMPLE_BYTES
        scale = sum(sizes) / max(1, sizes[0] if whole else arrow_bytes)
    plan.cpu_seconds = seconds * scale
    plan.bytes_written = round(written * scale)
    plan.memory_bytes = peak_memory() * max(1, min(jobs, len(sources)))
    plan.basis = f"the first {rows:,} rows of {sources[0].name}"
    return scale
