"""Score documents and filter them: quality heuristics, language, trained classifiers.

A map stage: each batch is scored on its own, so it runs the same way in one process, in workers and
in slices of a Slurm array. Rows that `--where` excludes are counted, and written to `--removed`.

The report of a run: histograms of the scores, share of rows kept, cost. Each score is counted in
bins, as counters `NAME[LOW]`, which add up over workers: twenty bins of 0.05 over [0, 1], one for
each power of two above, and one for values below 0. The cost is the CPU time, reading and writing
included, per document read, scaled to 10^9 documents.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core import notes
from sabia.core.options.classify import ClassifyOptions
from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.shards.dry_run import unmeasured
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import ShardContext, run_map
from sabia.core.shards.sources import Source
from sabia.core.shards.summary import Summary
from sabia.core.text.classify import content_checks, heuristics, language
from sabia.core.text.classify.score_calibration import (
    CalibrationFile,
    read_calibration_file,
    values_of,
)
from sabia.core.text.classify.scorers import Scorer, check_names, score_column
from sabia.core.text.plain_table import sparkline
from sabia.core.text.predicate import Predicate
from sabia.core.text.removed_rows import RemovedPart, map_and_gather, put_column
from sabia.core.text.score_column import with_scores

SHOWN = 8  # scores of models whose histogram is shown at the end; --stats has all
UNIT = 20  # bins over [0, 1]
EDGES = np.array([-np.inf, *(i / UNIT for i in range(UNIT)), *(2.0**i for i in range(41))])
CPU = "cpu seconds"
_BILLION = 1e9


def count_scores(context: ShardContext, scores: Mapping[str, np.ndarray]) -> None:
    """Add a batch's scores, float[n] by name, to the counters of its shard, without NaN."""
    for name, values in scores.items():
        present = values[~np.isnan(values)]
        present = np.where(present == 1, 1 - 1e-9, present)  # 1 belongs to the last bin of [0, 1]
        bins = np.bincount(np.searchsorted(EDGES, present, "right") - 1, minlength=len(EDGES))
        for index in np.flatnonzero(bins).tolist():
            context.count(f"{name}[{EDGES[index]:g}]", int(bins[index]))


def histogram(summary: Summary, name: str) -> np.ndarray:
    """int[len(EDGES)] of one score."""
    counts = (summary.counters.get(f"{name}[{low:g}]", 0) for low in EDGES)
    return np.fromiter(counts, float, len(EDGES))


def report_scores(summary: Summary, shown: Sequence[str], price: float = 0.0) -> None:
    """Note the histograms of the shown scores; add the share kept and the cost to the summary.

    price: US dollars per core-hour; 0: no cost in dollars.
    """
    for name in shown:
        bins = histogram(summary, name)
        if bins.sum():
            notes.note(f"{name} {_spread(bins)}")
    seconds = summary.counters.get(CPU, 0)
    if not summary.rows_in or not seconds:
        return
    hours = seconds / summary.rows_in * _BILLION / 3600
    summary.counters["cpu hours per 1e9"] = hours
    summary.counters["docs per second"] = summary.rows_in / max(summary.seconds, 1e-9)
    summary.counters["share kept"] = summary.rows_out / summary.rows_in
    if price:
        summary.counters["usd per 1e9"] = hours * price


def _spread(bins: np.ndarray) -> str:
    """A sparkline over [0, 1] if it holds all values, else over the bins in use."""
    inside = bins[1 : UNIT + 1]
    if inside.sum() == bins.sum():
        return f"0 {sparkline(inside.tolist())} 1"
    used = np.flatnonzero(bins)
    low, high = int(used[0]), int(used[-1])
    top = EDGES[high + 1] if high + 1 < len(EDGES) else np.inf
    return f"{EDGES[low]:g} {sparkline(bins[low : high + 1].tolist())} {top:g}"


def run(job: Job, options: ClassifyOptions, scorers: Sequence[Scorer] = ()) -> None:
    """Score the job's inputs with the heuristics, then the scorers, then the calibrations.

    Raises UsageError for an invalid expression or two scores of the same name.
    """
    if options.where:
        Predicate(options.where)
    calibrations = tuple(read_calibration_file(path) for path in options.calibration)
    check_names(scorers)
    digests = [one.digest for one in scorers] + [one.digest for one in calibrations]
    salt = " ".join([" ".join(digests), content_checks.digest(options)]).strip()
    shown = [name for scorer in scorers for name in scorer.names]
    shown = ["quality"] * options.quality + shown[:SHOWN]
    shown += [f"{one.score}_probability" for one in calibrations]

    def work(job: Job, removed: str, sources: Sequence[Source] | None) -> None:
        transform = partial(
            score_shard, options=options.replace(removed=removed), scorers=tuple(scorers),
            calibrations=calibrations,
        )  # fmt: skip
        run_map(
            job, transform, sources=sources, salt=salt, next_step="sabia dedup",
            conclude=partial(report_scores, shown=shown, price=options.price_per_hour),
            sampled=unmeasured if options.ask else None,  # a sample would cost calls
        )  # fmt: skip

    map_and_gather(job, options.removed, work, salt)


def score_shard(
    batches: Iterator[pa.RecordBatch],
    context: ShardContext,
    options: ClassifyOptions,
    scorers: Sequence[Scorer],
    calibrations: Sequence[CalibrationFile],
) -> Iterator[pa.RecordBatch]:
    """Score and filter the rows of a shard: a transform for `run_map`."""
    predicate = Predicate(options.where) if options.where else None
    start = time.process_time()
    with RemovedPart(options.removed, context) as removed:
        for number, batch in enumerate(batches):
            scored, new = score_batch(batch, options, scorers, calibrations, number == 0)
            count_scores(context, new)
            if predicate is None:
                yield scored
                continue
            if number == 0:
                predicate.check_names(scored, context.name)
            keep = predicate.evaluate(scored)
            if not keep.all():
                context.count("not kept", int((~keep).sum()))
                excluded = scored.filter(pa.array(~keep))
                removed.write(excluded, _reasons(excluded, predicate, options))
            yield scored.filter(pa.array(keep))
    context.count(CPU, time.process_time() - start)


def _reasons(batch: pa.RecordBatch, predicate: Predicate, options: ClassifyOptions) -> pa.Array:
    """Why rows are excluded: the expression, the first failing rule of each filter in it, and the
    list that blocks the URL."""
    filters = [name for name in heuristics.FILTERS if name in predicate.names]
    failures = heuristics.failures(batch.column("scores"), filters)
    blocked = content_checks.reasons(batch, options, predicate.names)
    parts = (
        [f"not {predicate.text}", *failed, url]
        for failed, url in zip(failures, blocked, strict=True)
    )
    return pa.array(["; ".join(filter(None, row)) for row in parts], pa.string())


def score_batch(
    batch: pa.RecordBatch,
    options: ClassifyOptions,
    scorers: Sequence[Scorer],
    calibrations: Sequence[CalibrationFile],
    first: bool,
) -> tuple[pa.RecordBatch, dict[str, np.ndarray]]:
    """(the batch with new entries in `scores` and its `language` set, those entries by name).

    Raises UsageError where the `first` batch of a shard lacks a score that a calibration needs.
    """
    new: dict[str, np.ndarray] = {}
    batch = content_checks.edit_texts(batch, options)
    if options.quality:
        data, offsets = text_buffers(batch.column("text"))
        identified = language.identify(data, offsets)
        new = heuristics.measure(data, offsets, identified)
        new["language_confidence"] = identified.confidence
        unknown = identified.language == language.UNDETERMINED
        names = pa.array(identified.language, pa.string(), mask=unknown)
        names = pc.coalesce(names, batch.column("language"))
        batch = put_column(batch, "language", pc.fill_null(names, language.UNDETERMINED))
    batch, checks = content_checks.check_texts(batch, options)
    new |= checks
    for scorer in scorers:
        new |= score_column(scorer, batch.column("text"))
    for one in calibrations:
        values = new.get(one.score)
        if values is None:
            values = values_of(batch, one.score, "--calibration", first)
        new |= one.apply(np.asarray(values, float), batch.column("language"))
    if not new:
        return batch, new
    return put_column(batch, "scores", with_scores(batch.column("scores"), new)), new
