"""Score documents and filter them: quality figures, language, a trained classifier.

A map stage: each batch is scored by itself, so it runs alike in one process, in workers and in
slices of a Slurm array. Rows that `--where` refuses are counted, and written down when asked.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core.options.classify import ClassifyOptions
from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.shards.dry_run import unmeasured
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import ShardContext, run_map
from sabia.core.shards.sources import Source
from sabia.core.text.classify import content_checks, heuristics, language
from sabia.core.text.classify.calibration_file import Decision, read_decision, values_of
from sabia.core.text.classify.score_summary import CPU, conclude, count_scores
from sabia.core.text.classify.scorers import Scorer, check_names, digest, score_column
from sabia.core.text.predicate import Predicate
from sabia.core.text.removed_rows import RemovedPart, map_and_gather, put_column
from sabia.core.text.score_column import with_scores

SHOWN = 8  # scores of models whose spread is told at the end; the statistics have all


def run(job: Job, options: ClassifyOptions, scorers: Sequence[Scorer] = ()) -> None:
    """Score the job's inputs with the heuristics and the scorers, in this order; the calibrations
    come last.

    Raises UsageError for an expression that will not do or scores of one name."""
    if options.where:
        Predicate(options.where)
    decisions = tuple(read_decision(path) for path in options.calibration)
    check_names(scorers)
    marks = [digest(scorers), *(one.digest for one in decisions), content_checks.digest(options)]
    salt = " ".join(marks).strip()
    shown = [name for scorer in scorers for name in scorer.names]
    shown = ["quality"] * options.quality + shown[:SHOWN]
    shown += [f"{one.score}_probability" for one in decisions]

    def work(job: Job, removed: str, sources: Sequence[Source] | None) -> None:
        given = options.replace(removed=removed)
        transform = partial(score_shard, options=given, scorers=tuple(scorers), decisions=decisions)
        said = partial(conclude, shown=shown, price=options.price_per_hour)
        sampled = unmeasured if options.ask else None  # a sample would cost calls
        run_map(
            job, transform, sources=sources, salt=salt, next_step="sabia dedup", conclude=said,
            sampled=sampled,
        )  # fmt: skip

    map_and_gather(job, options.removed, work, salt)


def score_shard(
    batches: Iterator[pa.RecordBatch],
    context: ShardContext,
    options: ClassifyOptions,
    scorers: Sequence[Scorer],
    decisions: Sequence[Decision],
) -> Iterator[pa.RecordBatch]:
    """The transform: rows with their scores, without those that `where` refuses."""
    predicate = Predicate(options.where) if options.where else None
    began = time.process_time()
    with RemovedPart(options.removed, context.index) as removed:
        for number, batch in enumerate(batches):
            scored, new = score_batch(batch, options, scorers, decisions, number == 0)
            count_scores(context, new)
            if predicate is None:
                yield scored
                continue
            if number == 0:
                predicate.check_names(scored, context.name)
            stays = predicate.evaluate(scored)
            if not stays.all():
                context.count("not kept", int((~stays).sum()))
                gone = scored.filter(pa.array(~stays))
                removed.write(gone, _reasons(gone, predicate, options))
            yield scored.filter(pa.array(stays))
    context.count(CPU, time.process_time() - began)


def _reasons(batch: pa.RecordBatch, predicate: Predicate, options: ClassifyOptions) -> pa.Array:
    """Why rows go: the expression, the first failing rule of each filter that it names, and the
    list that blocks a URL."""
    filters = [name for name in heuristics.FILTERS if name in predicate.names]
    found = heuristics.failures(batch.column("scores"), filters)
    blocked = content_checks.reasons(batch, options, predicate.names)
    whys = ([f"not {predicate.text}", *row, url] for row, url in zip(found, blocked, strict=True))
    return pa.array(["; ".join(filter(None, why)) for why in whys], pa.string())


def score_batch(
    batch: pa.RecordBatch,
    options: ClassifyOptions,
    scorers: Sequence[Scorer],
    decisions: Sequence[Decision],
    first: bool,
) -> tuple[pa.RecordBatch, dict[str, np.ndarray]]:
    """(the batch with new entries in `scores` and its `language` set, those entries by name).

    In the `first` batch of a shard a score that a decision needs must be there: UsageError.
    """
    new: dict[str, np.ndarray] = {}
    batch = content_checks.before(batch, options)
    if options.quality:
        found, new = _measure(batch.column("text"))
        given = batch.column("language")
        told = pa.array(found, pa.string(), mask=found == language.UNDETERMINED)
        names = pc.fill_null(pc.coalesce(told, given), language.UNDETERMINED)
        batch = put_column(batch, "language", names)
    batch, seen = content_checks.after(batch, options)
    new |= seen
    for scorer in scorers:
        new |= score_column(scorer, batch.column("text"))
    for one in decisions:
        values = new.get(one.score)
        if values is None:
            values = values_of(batch, one.score, "--calibration", first)
        new |= one.apply(np.asarray(values, float), batch.column("language"))
    if not new:
        return batch, new
    return put_column(batch, "scores", with_scores(batch.column("scores"), new)), new


def _measure(column: pa.Array) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(languages object[n], scores float64[n] by name) of a text column."""
    data, offsets = text_buffers(column)
    verdict = language.identify(data, offsets)
    scores = {"language_confidence": verdict.confidence}
    return verdict.language, heuristics.measure(data, offsets, verdict) | scores
