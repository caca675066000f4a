"""Score documents and filter them: quality figures, language, a trained classifier.

A map stage: each batch is scored by itself, so it runs alike in one process, in workers and in
slices of a Slurm array. Rows that `--where` refuses are counted, and written down when asked.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sabia.core.errors import UsageError
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.manifest import holds, is_current, provenance
from sabia.core.shards.mapping import ShardContext, run_map
from sabia.core.shards.outputs import open_file
from sabia.core.shards.sources import Source
from sabia.core.text import characters, heuristics, language
from sabia.core.text.predicate import Predicate
from sabia.core.text.removed import check_path, put_column, with_reason, write_removed
from sabia.core.text.scorers import Scorer, check_names, digest, score_column
from sabia.core.text.scores import with_scores
from sabia.core.text.sketching import text_buffers


@dataclass(frozen=True)
class ClassifyConfig:
    """where: an expression; quality: count heuristics and name languages; removed: where refused
    rows go (a directory of parts)."""

    where: str = ""
    quality: bool = True
    removed: str = ""


def run(job: Job, config: ClassifyConfig, scorers: Sequence[Scorer] = ()) -> None:
    """Score the job's inputs with the heuristics and the scorers, in this order.

    Raises UsageError for an expression that will not do or scores of one name."""
    if config.where:
        Predicate(config.where)
    if config.removed and not config.where:
        raise UsageError("--removed needs --where: without it no row is removed")
    check_names(scorers)
    if not config.removed or job.dry_run:
        _map(job, config, scorers)
    elif job.to_directory:
        if config.removed.endswith(".parquet"):
            raise UsageError("--removed: give a directory, as -o is one (one part a shard)")
        _map(job, config, scorers)
    else:
        _run_to_files(job, config, scorers)


def _map(
    job: Job,
    config: ClassifyConfig,
    scorers: Sequence[Scorer],
    sources: Sequence[Source] | None = None,
) -> None:
    transform = partial(score_shard, config=config, scorers=tuple(scorers))
    run_map(job, transform, sources=sources, salt=digest(scorers), next_step="sabia dedup")


def _run_to_files(job: Job, config: ClassifyConfig, scorers: Sequence[Scorer]) -> None:
    """One output, and one file of removed rows gathered from the shards' parts."""
    final = config.removed
    check_path(final)
    salt = digest(scorers)
    sources = open_inputs(job, "document")
    made = provenance(job, "removed", [source.fingerprint() for source in sources], salt)
    written = holds(final, made)
    done = written and is_current(job, sources, salt)
    job = job if written else replace(job, force=True)
    parent = os.path.dirname(os.path.abspath(final))
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".sabia-", dir=parent) as scratch:
        _map(job, replace(config, removed=scratch), scorers, sources)
        if not done:
            parts = [_Part(str(path)) for path in sorted(Path(scratch).glob("part-*.parquet"))]
            write_removed(final, parts, made)


@dataclass(frozen=True)
class _Part:
    """The removed rows of one shard, readable more than once."""

    path: str

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(self.path) as file:
            yield from file.iter_batches()


def score_shard(
    batches: Iterator[pa.RecordBatch],
    context: ShardContext,
    config: ClassifyConfig,
    scorers: Sequence[Scorer] = (),
) -> Iterator[pa.RecordBatch]:
    """The transform: rows with their scores, without those that `where` refuses."""
    predicate = Predicate(config.where) if config.where else None
    with _RemovedPart(config.removed, context.index) as removed:
        for number, batch in enumerate(batches):
            scored = score_batch(batch, config, scorers)
            if predicate is None:
                yield scored
                continue
            if number == 0:
                predicate.check_names(scored, context.name)
            stays = predicate.evaluate(scored)
            if not stays.all():
                context.count("not kept", int((~stays).sum()))
                removed.write(scored.filter(pa.array(~stays)), f"not {config.where}")
            yield scored.filter(pa.array(stays))


class _RemovedPart:
    """A shard's removed rows as `part-NNNNN.parquet`, which appears only if there are any."""

    def __init__(self, directory: str, index: int) -> None:
        self.path = f"{directory.rstrip('/')}/part-{index:05d}.parquet" if directory else ""
        self.stack, self.writer = ExitStack(), None

    def write(self, batch: pa.RecordBatch, reason: str) -> None:
        """Add rows with the reason why they went."""
        if not self.path:
            return
        rows = with_reason(batch, reason)
        if self.writer is None:
            self.writer = self.stack.enter_context(open_file(self.path, rows.schema))
        self.writer.write(rows)

    def __enter__(self) -> "_RemovedPart":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.stack.__exit__(kind, error, trace)
        if self.path and self.writer is None and error is None and os.path.exists(self.path):
            os.unlink(self.path)  # of an earlier run with other thresholds


def score_batch(
    batch: pa.RecordBatch, config: ClassifyConfig, scorers: Sequence[Scorer] = ()
) -> pa.RecordBatch:
    """Add entries to `scores` and set `language`."""
    new: dict[str, np.ndarray] = {}
    if config.quality:
        found, new = _measure(batch.column("text"))
        given = batch.column("language")
        told = pa.array(found, pa.string(), mask=found == language.UNDETERMINED)
        names = pc.fill_null(pc.coalesce(told, given), language.UNDETERMINED)
        batch = put_column(batch, "language", names)
    for scorer in scorers:
        new |= score_column(scorer, batch.column("text"))
    if not new:
        return batch
    return put_column(batch, "scores", with_scores(batch.column("scores"), new))


def _measure(column: pa.Array) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(languages object[n], scores float64[n] by name) of a text column."""
    data, offsets = text_buffers(column)
    names: list[np.ndarray] = []
    parts: list[dict[str, np.ndarray]] = []
    for low, high in characters.chunks(offsets):
        texts = characters.texts_of(data, offsets, low, high)
        verdict = language.identify(texts)
        names.append(verdict.language)
        sure = {"language_confidence": verdict.confidence}
        parts.append(heuristics.measure(texts, verdict) | sure)
    keys = parts[0] if parts else {}
    scores = {key: np.concatenate([part[key] for part in parts]) for key in keys}
    return np.concatenate([np.empty(0, object), *names]), scores
