"""Score documents and filter them: quality figures, language, a trained classifier.

A map stage: each batch is scored by itself, so it runs alike in one process, in workers and in
slices of a Slurm array. Rows that `--where` refuses are counted, and written down when asked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core.errors import UsageError
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import ShardContext, run_map
from sabia.core.shards.sources import Source
from sabia.core.text import characters, heuristics, language
from sabia.core.text.predicate import Predicate
from sabia.core.text.removed import RemovedPart, map_and_gather, put_column
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

    def work(job: Job, removed: str, sources: Sequence[Source] | None) -> None:
        given = replace(config, removed=removed)
        transform = partial(score_shard, config=given, scorers=tuple(scorers))
        run_map(job, transform, sources=sources, salt=digest(scorers), next_step="sabia dedup")

    map_and_gather(job, config.removed, work, digest(scorers))


def score_shard(
    batches: Iterator[pa.RecordBatch],
    context: ShardContext,
    config: ClassifyConfig,
    scorers: Sequence[Scorer] = (),
) -> Iterator[pa.RecordBatch]:
    """The transform: rows with their scores, without those that `where` refuses."""
    predicate = Predicate(config.where) if config.where else None
    with RemovedPart(config.removed, context.index) as removed:
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
