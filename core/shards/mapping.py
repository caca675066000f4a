"""The shard runner: one transform over every input shard, its rows written to a sink.

Into a directory each input shard gives one output shard, which is skipped if it is already there
and was made from the same input; into a file or stdout all shards go in order. A transform sees
one shard at a time, so rows do not depend on workers, slices or the form of the output. The
rejects of a part are complete before the part appears.

A sink is where the rows of an output are written, part by part. A part appears whole or not at all
and records what it was made from, so that a run that is repeated writes only the parts that are
missing or were made from something else.
"""

import json
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol, Self

import pyarrow as pa

from sabia.core import notes, stop
from sabia.core.digests import parquet_at
from sabia.core.errors import Failed, UsageError
from sabia.core.notes import ProgressBar, progress, working_s
from sabia.core.shards import layout, manifest, outputs, schemas
from sabia.core.shards.atomic import scratch_directory
from sabia.core.shards.columns import unified, with_columns
from sabia.core.shards.dry_run import (
    DryRun,
    NoRejects,
    Sample,
    estimate,
    file_bytes,
    parquet_bytes,
    unmeasured,
)
from sabia.core.shards.executors.processes import run_tasks
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.lineage.run_record import RUN, inputs_of
from sabia.core.shards.rejects import Rejects, reject_path
from sabia.core.shards.sources import Source, bytes_of, rows_of
from sabia.core.shards.stores.objects import is_there, is_url
from sabia.core.shards.summary import Summary
from sabia.kernels.runtime import first_runs
from sabia.kernels.runtime.cache_folder import has_compiled


class Sink(Protocol):
    """The output of a job. `per_shard`: every input shard gives one part; else all give one."""

    @property
    def per_shard(self) -> bool: ...

    @property
    def ending(self) -> str:
        """The ending of `path`."""

    def path(self, part: int) -> str:
        """The file whose presence shows that a part is complete."""

    def rows_made(self, part: int, provenance: dict[str, Any]) -> int | None:
        """Rows of a part that is complete and has this provenance; None where there is none."""

    def write(
        self, part: int, schema: pa.Schema, provenance: outputs.Provenance,
        batches: Iterator[pa.RecordBatch],
    ) -> int:  # fmt: skip
        """Write all batches as one part, atomically; returns its rows. If `batches` raises, the
        part must not appear. The provenance of a part that is made from a stream is a function:
        of False at the start, of True when there are no more batches.
        """

    def for_run(self, job: Job, existing: frozenset[str]) -> Self:
        """The sink of a job that names its parts, where these paths existed before the run."""

    def finish(self, parts: int) -> None:
        """Called once this process has written its share of so many parts."""

    def estimated_bytes(self, batches: Sequence[pa.RecordBatch]) -> int:
        """Bytes that these rows take on disk, for `--dry-run`."""


@dataclass(frozen=True)
class ParquetSink:
    """The output that `outputs` opens: a Parquet file, a directory of shards, or stdout."""

    job: Job
    existing: frozenset[str] = field(default=frozenset(), kw_only=True)
    ending = ".parquet"

    @property
    def per_shard(self) -> bool:
        return self.job.to_directory

    def path(self, part: int) -> str:
        return outputs.output_path(self.job, part)

    def rows_made(self, part: int, provenance: dict[str, Any]) -> int | None:
        return None if self.job.to_stdout else manifest.rows_made(self.path(part), provenance)

    def write(
        self, part: int, schema: pa.Schema, provenance: outputs.Provenance,
        batches: Iterator[pa.RecordBatch],
    ) -> int:  # fmt: skip
        rows = 0
        to_path = not self.job.to_stdout and not self.job.force
        new = to_path and self.path(part) not in self.existing
        try:
            with outputs.open_output(self.job, schema, provenance, part, new) as writer:
                for batch in batches:
                    writer.write(batch)
                    rows += batch.num_rows
        except FileExistsError:
            wanted = provenance(True) if callable(provenance) else provenance
            if (made := self.rows_made(part, wanted)) is not None:
                return made
            raise UsageError(
                f"--out: {self.path(part)} was written by another call at the same time; run this "
                "one again, which names the ways to keep both"
            ) from None
        return rows

    def for_run(self, job: Job, existing: frozenset[str]) -> Self:
        return replace(self, job=job, existing=existing)

    def finish(self, parts: int) -> None:
        manifest.write_manifest(self.job)

    def estimated_bytes(self, batches: Sequence[pa.RecordBatch]) -> int:
        return parquet_bytes(batches)


@dataclass
class ShardContext:
    """The index and name of a transform's shard; takes its rejects and counts.

    part: name of the files that belong to the shard, such as those of its removed rows, and
    made_from: their provenance.
    """

    index: int
    name: str
    rejects: Rejects
    counters: dict[str, float] = field(default_factory=dict)
    part: str = ""
    made_from: outputs.Metadata = None

    def reject(self, rows: pa.RecordBatch | dict[str, Any], reason: str) -> None:
        """Keep rows that cannot be used, with the reason."""
        self.rejects.add(rows, reason, self.name)

    def count(self, name: str, n: float = 1) -> None:
        """Add to a counter of the summary."""
        self.counters[name] = self.counters.get(name, 0) + n


Transform = Callable[[Iterator[pa.RecordBatch], ShardContext], Iterator[pa.RecordBatch]]
SampledTransform = Callable[[Sample], Iterator[pa.RecordBatch]]


def run_map(
    job: Job,
    transform: Transform,
    kind_in: str = "document",
    kind_out: str = "document",
    sources: Sequence[Source] | None = None,
    salt: str = "",
    next_step: str = "",
    conclude: Callable[[Summary], None] | None = None,
    schema: pa.Schema | None = None,
    sampled: SampledTransform | None = None,
    sink: Sink | None = None,
    live: Callable[[], str] | None = None,
) -> Summary:
    """Run the transform over the job's inputs and write its output; returns the summary.

    `salt` enters the fingerprints (a stage that first reads all shards passes the digest of what it
    computed from them); `conclude` may add to the summary before it is reported. All shards of an
    output have the same columns: the transform adds the same columns to each shard, and the shards
    themselves have the columns of all documents of the input; `schema` is the schema of the output
    where the input has other records. `sink` takes the rows (default: the job's Parquet output);
    `live` gives a text that is shown beside the progress of a transform that runs in this process.
    With `--dry-run` nothing runs except a sample, on which the transform, or `sampled`, is measured
    (nothing with `dry_run.unmeasured`). Raises BadData, UsageError, Interrupted.
    """
    started = working_s()
    sources = list(sources if sources is not None else open_inputs(job, kind_in, once=True))
    owned = _owned_shards(job, len(sources))
    sink = sink or ParquetSink(job)
    per_shard = sink.per_shard
    existing = manifest.check_output(job, sources, owned if per_shard else None, sink.ending)
    columns = None
    if job.append:
        columns = manifest.columns_there(job)
        job = replace(job, part_names=manifest.append_names(job, sources, owned))
    sink = sink.for_run(job, existing.parts)
    if sink.ending == ".parquet":
        rows = manifest.rows_finished(job, kind_out, sources, salt)
        if rows is not None:
            summary = Summary(shards_skipped=len(sources), rows_out=rows)
            return _reported(summary, started, job, conclude, next_step)
    if kind_out == "document" and schema is None:
        sources = unified(sources, whole=len(owned) == len(sources))
        schema = manifest.schema_of_all(sources)
    output = manifest.named_output(job)
    size = 0
    if not all(map(has_compiled, first_runs.SWITCHING)):
        size = (bytes_of([sources[i] for i in owned]) or 0) // max(1, min(job.jobs, len(owned)))
    work = _Work(job, transform, kind_out, salt, schema, sink, columns, output, size, live)
    if job.dry_run:
        _dry_run(work, sources, owned, sampled)
        return Summary()
    layout.adopt(job)
    if work.sink.per_shard:
        summary = Summary()
        tasks = [(work, [sources[i]], i) for i in owned]
        with progress(len(tasks), job.command, "shards", live) as bar:
            names = [sources[i].name for i in owned]
            lost = partial(_lost_shard, names)
            for part in run_tasks(_write_part, tasks, job.jobs, lost):
                summary.add(part)
                bar.advance(1, rows=f"{summary.rows_out:,}")
    else:
        summary = _write_part(work, sources, 0)
    first_runs.expect(0)
    for path in existing.replaced:
        manifest.remove_part(path)
    work.sink.finish(len(sources))
    _reported(summary, started, job, conclude, next_step)
    if lost_shards := summary.shards_lost:
        raise Failed(
            f"{len(lost_shards)} of {len(owned)} shards have no output, because the worker process "
            f"died twice (out of memory?): {', '.join(lost_shards)}; run again to retry them, with "
            "more memory or a smaller -j"
        )
    return summary


def _reported(
    summary: Summary, started: float, job: Job, conclude: Callable[[Summary], None] | None,
    next_step: str,
) -> Summary:  # fmt: skip
    """The summary, completed and reported; raises BadData where all rows are rejected."""
    summary.seconds = working_s() - started
    if conclude is not None:
        counted = set(summary.counters)
        conclude(summary)
        summary.derived = sorted(summary.counters.keys() - counted)
    summary.report(job, next_step)
    summary.check_rejects()
    return summary


def _lost_shard(names: Sequence[str], number: int) -> Summary:
    notes.warn(f"{names[number]}: the worker process died twice (out of memory?)")
    return Summary(shards_lost=[names[number]])


@dataclass(frozen=True)
class _Work:
    job: Job
    transform: Transform
    kind_out: str
    salt: str
    schema: pa.Schema | None  # the columns of all inputs, or of the output
    sink: Sink
    columns: pa.Schema | None = None  # of the parts to which `--append` adds
    output: str = ""  # see manifest.named_output
    size: int = 0  # bytes that a process is expected to read; 0: not known
    live: Callable[[], str] | None = None

    def provenance(
        self, sources: Sequence[Source], ended: bool = True, summary: Summary | None = None
    ) -> dict[str, object]:
        """Without inputs and fingerprint before the end of a stream."""
        prints = [source.fingerprint() for source in sources] if ended else []
        origins = [source.origin for source in sources] if ended else []
        made = manifest.provenance(
            self.job, self.kind_out, prints, self.salt, self.schema, origins, inputs_of(sources)
        )
        made[RUN].summary = summary
        return made if ended else made | {"fingerprint": None}

    def beside(self, sources: Sequence[Source], ended: bool = True) -> dict[str, object]:
        """The provenance of rows that are written beside the output."""
        return self.provenance(sources, ended) | {"out": self.output}


def _owned_shards(job: Job, count: int) -> list[int]:
    """Indices of the input shards that this process must transform."""
    part = job.shard
    if part is None:
        return list(range(count))
    if not job.to_directory:
        raise UsageError("a slice of the shards needs a directory to write to; give -o DIR")
    owned = list(range(part[0], count, part[1]))
    notes.note(f"slice {part[0]} of {part[1]}: {len(owned)} of {count} shards")
    return owned


def _write_part(work: _Work, sources: Sequence[Source], part: int) -> Summary:
    """Write one part from its sources, unless it is already there."""
    first_runs.expect(work.size)
    summary = Summary()
    provenance: outputs.Provenance = partial(work.provenance, sources, summary=summary)
    if all(getattr(source, "stream", None) is None for source in sources):
        provenance = made = work.provenance(sources, summary=summary)
        rows = None if work.job.force else work.sink.rows_made(part, made)
        if rows == 0 and is_there(reject_path(work.job, part)):
            rows = None  # each run that finds no usable row says so
        if rows is not None:
            return Summary(shards_skipped=len(sources), rows_out=rows)
    summary.shards_done = len(sources)
    bar: AbstractContextManager[ProgressBar] = nullcontext(ProgressBar())
    if not work.sink.per_shard:
        bar = progress(rows_of(sources), work.job.command, live=work.live)
    with bar as shown, closing(_transformed(work, sources, part, summary, shown)) as batches:
        first = next(batches, None)
        schema = _schema_without_rows(work, sources[0], part) if first is None else first.schema
        rest = batches if first is None else chain([first], batches)
        if work.columns is not None:
            rest = (with_columns(batch, work.columns, str(work.job.out)) for batch in rest)
            schema = work.columns
        summary.rows_out = work.sink.write(part, schema.remove_metadata(), provenance, rest)
    return summary


def _transformed(
    work: _Work, sources: Sequence[Source], part: int, summary: Summary, bar: ProgressBar
) -> Generator[pa.RecordBatch]:
    """The transform's batches of all sources of a part; fills in the summary and the rejects."""
    with Rejects(reject_path(work.job, part), partial(work.beside, sources)) as rejects:
        if not work.sink.per_shard and work.job.jobs > 1 and len(sources) > 1:
            yield from _in_workers(work, sources, rejects, summary, bar)
        else:
            for index, source in enumerate(sources, part):
                name = work.job.part_name(index)
                made_from = partial(work.beside, [source])
                context = ShardContext(
                    index, source.name, rejects, summary.counters, name, made_from
                )
                for batch in work.transform(_counted(source, context, summary, bar), context):
                    stop.check()
                    yield batch
    if rejects.count:
        summary.rejected, summary.reject_path = rejects.count, rejects.path


def _in_workers(
    work: _Work, sources: Sequence[Source], rejects: Rejects, summary: Summary, bar: ProgressBar
) -> Iterator[pa.RecordBatch]:
    """Workers write temporary Parquet shards, which are read back in order."""
    name, parent = "sabia-rows", None
    if work.job.to_file and not is_url(str(work.job.out)):
        parent, name = os.path.split(os.path.abspath(str(work.job.out)))
    with scratch_directory(name, parent) as scratch:
        job = replace(work.job, out=f"{scratch}/rows", rejects=f"{scratch}/rejects", force=True)
        scratch_work = replace(work, job=job, sink=ParquetSink(job))
        tasks = [(scratch_work, [source], i) for i, source in enumerate(sources)]
        for index, done in enumerate(run_tasks(_write_part, tasks, job.jobs)):
            done.shards_done = done.rows_out = 0
            if done.reject_path:
                with parquet_at(done.reject_path) as file:
                    rows = file.read().to_pylist()
                for row in rows:
                    rejects.add(json.loads(row["record"]), row["reason"], row["shard"])
            summary.add(done)
            bar.advance(done.rows_in)
            with parquet_at(outputs.output_path(job, index)) as file:
                yield from file.iter_batches(outputs.GROUP_ROWS)


def _counted(
    source: Source, context: ShardContext, summary: Summary, bar: ProgressBar
) -> Iterator[pa.RecordBatch]:
    """The batches of a shard; counts its rows and rejects those that cannot be read."""

    def reject(row: dict[str, Any], reason: str) -> None:
        summary.rows_in += 1
        context.reject(row, reason)

    for batch in source.batches(reject=reject):
        stop.check()
        summary.rows_in += batch.num_rows
        bar.advance(batch.num_rows)
        yield batch


def _schema_without_rows(work: _Work, source: Source, part: int) -> pa.Schema:
    """The columns of a part that has no row: those that the transform gives for an empty batch."""
    if work.schema is None:
        return schemas.KINDS[work.kind_out]
    schema = getattr(source, "schema", None)
    if schema is None:
        return work.schema
    empty = pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in schema], schema=schema)
    with Rejects("") as rejects:
        transformed = work.transform(iter([empty]), ShardContext(part, source.name, rejects))
        return next(iter(transformed), empty).schema


def _dry_run(
    work: _Work,
    sources: Sequence[Source],
    owned: Sequence[int],
    sampled: SampledTransform | None,
) -> None:
    """Show what would be read and written, with estimates from a sample."""
    job, plan, to_write = work.job, DryRun(work.job.command), list[Source]()
    for index in owned:
        source = sources[index]
        plan.reads.append({"name": source.name, "bytes": file_bytes(source)})
        rows = None
        if work.sink.per_shard and not job.force:
            rows = work.sink.rows_made(index, work.provenance([source]))
        if work.sink.per_shard:
            path, action = work.sink.path(index), "write" if rows is None else "keep"
            plan.writes.append({"path": path, "action": action, "from": source.name})
        if rows is None:
            to_write.append(source)
    if not work.sink.per_shard:
        path = "stdout" if job.to_stdout else str(job.out)
        plan.writes.append({"path": path, "action": "write", "from": f"{len(owned)} shards"})

    def transformed(sample: Sample) -> Iterator[pa.RecordBatch]:
        return work.transform(sample.batches(), ShardContext(0, sample.name, NoRejects("")))

    if sampled is not unmeasured:
        estimate(plan, to_write, sampled or transformed, job.jobs, work.sink.estimated_bytes)
    plan.show(job)
