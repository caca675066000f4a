"""The map stage: one transform over every input shard, wherever the rows go.

Into a directory each input shard gives one output shard, skipped when it is already there and
made from the same; into a file or stdout all shards go in order. A transform sees one shard at
a time, so rows do not depend on workers, slices or the form of the output.
"""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sabia.core import notes, stop
from sabia.core.errors import UsageError
from sabia.core.progress import ProgressBar, progress, working_s
from sabia.core.shards import layout, manifest, outputs, schemas
from sabia.core.shards.columns import unified
from sabia.core.shards.dry_run import DryRun, Sample, estimate, file_bytes, no_rejects, unmeasured
from sabia.core.shards.executor import run_tasks
from sabia.core.shards.inputs import is_url, open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.rejects import Rejects, reject_path
from sabia.core.shards.slices import slurm_slice
from sabia.core.shards.sources import Source, rows_of
from sabia.core.shards.summary import Summary


@dataclass
class ShardContext:
    """What a transform is told about its shard, and where it counts and rejects."""

    index: int
    name: str
    rejects: Rejects
    counters: dict[str, float] = field(default_factory=dict)

    def reject(self, rows: pa.RecordBatch | dict[str, Any], reason: str) -> None:
        """Keep rows that cannot be used, with the reason."""
        self.rejects.add(rows, reason, self.name)

    def count(self, name: str, n: float = 1) -> None:
        """Add to a counter of the summary."""
        self.counters[name] = self.counters.get(name, 0) + n


Sampled = Callable[[Sample], Iterator[pa.RecordBatch]]
Transform = Callable[[Iterator[pa.RecordBatch], ShardContext], Iterator[pa.RecordBatch]]


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
    sampled: Sampled | None = None,
) -> Summary:
    """Run the transform over the job's inputs and write its output; returns the summary.

    `salt` enters the fingerprints (a barrier stage passes the digest of what it learnt from all
    shards); `conclude` may add to the summary before it is reported. All shards of an output have
    the same columns: the transform adds the same to each, whose own are those of all documents of
    the input; `schema` says what it gives where the input is something else. With `--dry-run`
    nothing is done but for a sample, by which the transform, or `sampled`, is measured
    (`dry_run.unmeasured`: nothing is). Raises BadData, UsageError, Interrupted.
    """
    started = working_s()
    sources = list(sources if sources is not None else open_inputs(job, kind_in))
    ours = our_shards(job, len(sources))
    if kind_out == "document" and schema is None:
        sources = unified(sources, whole=len(ours) == len(sources))
        schema = manifest.schema_of_all(sources)
    work = _Work(job, transform, kind_out, salt, schema)
    if job.dry_run:
        _dry_run(work, sources, ours, sampled)
        return Summary()
    summary = _directory(work, sources, ours) if job.to_directory else _stream(work, sources, ours)
    summary.seconds = working_s() - started
    if conclude is not None:
        conclude(summary)
    summary.report(job, next_step)
    return summary


@dataclass(frozen=True)
class _Work:
    job: Job
    transform: Transform
    kind_out: str
    salt: str
    schema: pa.Schema | None  # the columns of all inputs, or of what comes of them

    def provenance(self, sources: Sequence[Source]) -> dict[str, Any]:
        prints = [source.fingerprint() for source in sources]
        return manifest.provenance(self.job, self.kind_out, prints, self.salt, self.schema)


def our_shards(job: Job, count: int) -> list[int]:
    """Indices of the input shards that this process owns."""
    mine = job.shard or slurm_slice()
    if mine is None:
        return list(range(count))
    if not job.to_directory:
        raise UsageError("a slice of the shards needs a directory to write to; give -o DIR")
    owned = list(range(mine[0], count, mine[1]))
    notes.note(f"slice {mine[0]} of {mine[1]}: {len(owned)} of {count} shards")
    return owned


def _directory(work: _Work, sources: Sequence[Source], ours: Sequence[int]) -> Summary:
    layout.adopt(work.job)
    tasks = [(work, sources[i], i) for i in ours]
    total = Summary()
    with progress(len(tasks), work.job.command, "shards") as bar:
        for done in run_tasks(_one_part, tasks, work.job.jobs):
            total.add(done)
            bar.advance(1, rows=f"{total.rows_out:,}")
    manifest.finish_directory(work.job, len(sources))
    return total


def _one_part(work: _Work, source: Source, part: int) -> Summary:
    path = outputs.output_path(work.job, part)
    made = work.provenance([source])
    if not work.job.force and manifest.holds(path, made):
        rows = pq.read_metadata(path).num_rows if not is_url(path) else 0
        return Summary(shards_skipped=1, rows_out=rows)
    summary = Summary(shards_done=1)
    with Rejects(reject_path(work.job, part)) as rejects:
        batches = _transformed(work, source, part, rejects, summary, ProgressBar())
        _write(work, batches, made, part, summary, source)
    return summary


def _stream(work: _Work, sources: Sequence[Source], ours: Sequence[int]) -> Summary:
    job = work.job
    made = work.provenance(sources)
    if job.to_file and not job.force and manifest.holds(str(job.out), made):
        return Summary(shards_skipped=len(ours), rows_out=pq.read_metadata(str(job.out)).num_rows)
    summary = Summary(shards_done=len(ours))
    with progress(rows_of(sources), job.command) as bar, Rejects(reject_path(job)) as rejects:
        if job.jobs > 1 and len(sources) > 1:
            batches = _in_parallel(work, sources, rejects, summary, bar)
        else:
            batches = chain.from_iterable(
                _transformed(work, source, index, rejects, summary, bar)
                for index, source in enumerate(sources)
            )
        _write(work, batches, made, 0, summary, sources[0])
    return summary


def _in_parallel(
    work: _Work, sources: Sequence[Source], rejects: Rejects, summary: Summary, bar: ProgressBar
) -> Iterator[pa.RecordBatch]:
    """Workers write scratch shards, which are read back in order."""
    beside = os.path.dirname(os.path.abspath(str(work.job.out))) if work.job.to_file else None
    with tempfile.TemporaryDirectory(prefix=".sabia-", dir=beside) as scratch:
        tasks = [(work, source, i, scratch) for i, source in enumerate(sources)]
        for index, part in enumerate(run_tasks(_scratch_part, tasks, work.job.jobs)):
            part.shards_done = part.rows_out = 0
            rejected = part.reject_path if part.rejected else None
            part.rejected, part.reject_path = 0, None
            summary.add(part)
            bar.advance(part.rows_in)
            if rejected:
                _take_over_rejects(rejected, rejects, summary)
            with pq.ParquetFile(f"{scratch}/rows/part-{index:05d}.parquet") as file:
                yield from file.iter_batches(outputs.GROUP_ROWS)


def _scratch_part(work: _Work, source: Source, index: int, scratch: str) -> Summary:
    job = replace(work.job, out=f"{scratch}/rows", rejects=f"{scratch}/rejects", force=True)
    return _one_part(replace(work, job=job), source, index)


def _take_over_rejects(path: str, rejects: Rejects, summary: Summary) -> None:
    import json

    for row in pq.read_table(path).to_pylist():
        rejects.add(json.loads(row["record"]), row["reason"], row["shard"])
    summary.rejected, summary.reject_path = rejects.count, rejects.path


def _transformed(
    work: _Work, source: Source, index: int, rejects: Rejects, summary: Summary, bar: ProgressBar
) -> Iterator[pa.RecordBatch]:
    """The transform's batches of one shard; fills in the summary."""
    context = ShardContext(index, source.name, rejects, summary.counters)
    before = rejects.count
    for batch in work.transform(counted(source, context, summary, bar), context):
        stop.check()
        yield batch
    if rejects.count > before:
        summary.rejected += rejects.count - before
        summary.reject_path = rejects.path


def counted(
    source: Source, context: ShardContext, summary: Summary, bar: ProgressBar
) -> Iterator[pa.RecordBatch]:
    """The batches of a shard; counts its rows and rejects those that cannot be read."""

    def refused(row: dict[str, Any], reason: str) -> None:
        summary.rows_in += 1
        context.reject(row, reason)

    for batch in source.batches(reject=refused):
        stop.check()
        summary.rows_in += batch.num_rows
        bar.advance(batch.num_rows)
        yield batch


def _write(
    work: _Work,
    batches: Iterator[pa.RecordBatch],
    made: dict[str, Any],
    part: int,
    summary: Summary,
    source: Source,
) -> None:
    first = next(batches, None)
    schema = _of_no_rows(work, source, part) if first is None else first.schema
    with outputs.open_output(work.job, schema.remove_metadata(), made, part) as writer:
        for batch in chain([] if first is None else [first], batches):
            writer.write(batch)
            summary.rows_out += batch.num_rows


def _of_no_rows(work: _Work, source: Source, part: int) -> pa.Schema:
    """The columns of a shard that has no row: those that the transform makes of none."""
    if work.schema is None:
        return schemas.KINDS[work.kind_out]
    given = getattr(source, "schema", None)
    if given is None:
        return work.schema
    nothing = pa.RecordBatch.from_arrays([pa.nulls(0, f.type) for f in given], schema=given)
    with Rejects("") as rejects:
        made = work.transform(iter([nothing]), ShardContext(part, source.name, rejects))
        return next(iter(made), nothing).schema


def _dry_run(
    work: _Work, sources: Sequence[Source], ours: Sequence[int], sampled: Sampled | None
) -> None:
    """Show what would be read and written, and what it would take by a sample."""
    job, plan, todo = work.job, DryRun(work.job.command), list[Source]()
    for index in ours:
        source = sources[index]
        plan.reads.append({"name": source.name, "bytes": file_bytes(source)})
        if not job.to_directory:
            todo.append(source)
            continue
        path = outputs.output_path(job, index)
        done = not job.force and manifest.holds(path, work.provenance([source]))
        action = "keep" if done else "write"
        plan.writes.append({"path": path, "action": action, "from": source.name})
        todo += [] if done else [source]
    if not job.to_directory:
        path = "stdout" if job.to_stdout else str(job.out)
        plan.writes.append({"path": path, "action": "write", "from": f"{len(ours)} shards"})

    def transformed(sample: Sample) -> Iterator[pa.RecordBatch]:
        return work.transform(sample.batches(), ShardContext(0, sample.name, no_rejects()))

    if sampled is not unmeasured:
        estimate(plan, todo, sampled or transformed, job.jobs)
    plan.show(job)
