"""`classify threshold`: choose thresholds and fit a calibration on labelled rows with a score.

Rows need a score (an entry of `scores`, or a column of numbers) and the truth: an expression, a
column of booleans, or a column of labels one of which is the score's name. Rows that lack one of
the two are skipped and counted. A language with enough rows has its own threshold.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core import notes, stop
from sabia.core.errors import BadData, Infeasible, UsageError
from sabia.core.options.classify_threshold import Target, ThresholdOptions
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.dry_run import Sample, estimate, planned
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.text.classify import score_calibration
from sabia.core.text.classify.score_calibration import OTHER, OperatingPoint, choose, values_of
from sabia.core.text.plain_table import plain, table
from sabia.core.text.predicate import Predicate
from sabia.core.text.score_column import label_column

MIN_ROWS = 10
MIN_ROWS_PER_CLASS = 10  # positives and negatives of a language with its own threshold


@dataclass(frozen=True)
class _Rows:
    """scores float64[n], truth bool[n], languages object[n], and the number of skipped rows."""

    scores: np.ndarray
    truth: np.ndarray
    languages: np.ndarray
    skipped: int


def run(job: Job, options: ThresholdOptions) -> None:
    """Print a report and write the file of -o. Raises UsageError, BadData, Infeasible."""
    if job.to_file:
        raise UsageError(f"--out: {job.out} (expected a name such as edu.json)")
    sources = open_inputs(job, "document")
    if job.dry_run:
        plan = planned(job, sources, figures={"score": options.score})
        estimate(plan, sources, lambda sample: _parts([sample], options), 1, lambda _: 0)
        plan.show(job)
        return
    report = decide(_read(sources, options), options, job.seed)
    text = json.dumps(plain(report), ensure_ascii=False) + "\n"
    if not job.to_stdout:
        write_atomic(str(job.out), text)
    print(text if job.json else _readable(report), end="")
    if not job.to_stdout:
        notes.note(f"apply it: sabia classify … --calibration {job.out} --where {options.score}_ok")


def decide(rows: _Rows, options: ThresholdOptions, seed: int) -> dict[str, object]:
    """The report, which is the content of the calibration file. Raises BadData, Infeasible."""
    count, positives = len(rows.scores), int(rows.truth.sum())
    if count < MIN_ROWS or positives in (0, count):
        raise BadData(
            f"{count} rows with score and label, {positives} of them positive"
            f" (expected {MIN_ROWS} or more rows, both positive and negative)"
        )
    overall = choose(rows.scores, rows.truth, options)
    if overall.threshold is None:
        raise Infeasible(f"no threshold of {options.score} reaches {_describe(options)}")
    by_language = _by_language(rows, options)
    calibration, probabilities = score_calibration.fit(rows.scores, rows.truth, seed)
    bins = score_calibration.reliability(probabilities, rows.truth)
    thresholds = {OTHER: overall.threshold} | {
        k: point.threshold for k, point in by_language.items()
    }
    target = {name: getattr(options, name) for name in Target.table}
    return {
        "score": options.score, "target": target, "thresholds": thresholds,
        "calibration": asdict(calibration), "rows": count, "left_out": rows.skipped,
        "overall": asdict(overall), "languages": {k: asdict(p) for k, p in by_language.items()},
        "expected_calibration_error": score_calibration.expected_error(bins),
        "expected_calibration_error_before": _raw_error(rows),
        "brier": score_calibration.brier(probabilities, rows.truth),
        "reliability": [asdict(row) for row in bins],
    }  # fmt: skip


def _raw_error(rows: _Rows) -> float | None:
    """The calibration error of the score itself, if it is a probability, else None."""
    if rows.scores.min() < 0 or rows.scores.max() > 1:
        return None
    return score_calibration.expected_error(score_calibration.reliability(rows.scores, rows.truth))


def _by_language(rows: _Rows, options: ThresholdOptions) -> dict[str, OperatingPoint]:
    points = {}
    names, counts = np.unique(rows.languages.astype(str), return_counts=True)
    for name, count in zip(names.tolist(), counts.tolist(), strict=True):
        mask = rows.languages == name
        truth = rows.truth[mask]
        smaller = min(int(truth.sum()), int((~truth).sum()))
        if not options.least or count < options.least or smaller < MIN_ROWS_PER_CLASS:
            continue
        points[name] = choose(rows.scores[mask], truth, options)
        if points[name].threshold is None:
            notes.warn(f"{name}: no threshold reaches {_describe(options)}; no document will pass")
    return points


def _describe(target: Target) -> str:
    kind, value = ("precision", target.precision) if target.precision else ("recall", target.recall)
    return f"{kind} {value:g}{' with 95 % confidence' if target.sure else ''}"


def _read(sources: Sequence[Source], options: ThresholdOptions) -> _Rows:
    parts = list(_parts(sources, options))
    scores = np.concatenate([np.empty(0), *(part[0] for part in parts)])
    truth = np.concatenate([np.empty(0, bool), *(part[1] for part in parts)])
    languages = np.concatenate([np.empty(0, object), *(part[2] for part in parts)])
    return _Rows(scores, truth, languages, sum(part[3] for part in parts) - len(scores))


def _parts(
    sources: Sequence[Source | Sample], options: ThresholdOptions
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, int]]:
    """(scores, truth, languages, rows read) of each batch, without rows that lack one of them."""
    for source in sources:
        for number, batch in enumerate(source.batches()):
            stop.check()
            values = values_of(batch, options.score, "--score", number == 0)
            truth = np.array(truth_of(batch, options, source.name).to_pylist(), object)
            present = ~np.isnan(values) & (truth != None)  # noqa: E711 - elementwise
            language = pc.fill_null(batch.column("language"), "und")
            names = np.array(language.to_pylist(), object)
            yield values[present], truth[present].astype(bool), names[present], batch.num_rows


def truth_of(batch: pa.RecordBatch, options: ThresholdOptions, where: str) -> pa.Array:
    """bool[n]: whether a row is positive; null where unknown."""
    labels = label_column(batch, options.label, where) if options.label else None
    if options.positive:
        rule = Predicate(options.positive, "--positive")
        rule.check_names(batch, where)
        holds = pa.array(rule.evaluate(batch))
        return holds if labels is None else pc.if_else(pc.is_valid(labels), holds, None)
    assert labels is not None
    if pa.types.is_boolean(labels.type):
        return labels
    if pa.types.is_string(labels.type):
        return pc.equal(pc.replace_substring_regex(labels, r"\s+", "_"), options.score)
    raise UsageError(
        f"--label: column {options.label!r} is {labels.type} (expected labels or booleans);"
        " give --positive EXPRESSION"
    )


def _readable(report: dict[str, Any]) -> str:
    points = {"all": report["overall"]} | report["languages"]
    thresholds = table(
        ("language", "rows", "positive", "threshold", "passing", "precision [95 %]",
         "recall [95 %]", "F1"),
        [(name, point["documents"], point["positives"], point["threshold"], point["passing"],
          _share(point, "precision"), _share(point, "recall"), point["f1"])
         for name, point in points.items()],
    )  # fmt: skip
    bins = table(
        ("probability", "rows", "mean", "positive"),
        [(f"{row['low']:.1f}–{row['high']:.1f}", row["documents"], row["mean"], row["positives"])
         for row in report["reliability"]],
    )  # fmt: skip
    before = report["expected_calibration_error_before"]
    error = f"expected calibration error {report['expected_calibration_error']:.4f}"
    error += "" if before is None else f" (of the score itself {before:.4f})"
    return f"{thresholds}\ncalibration: {report['calibration']['method']}, {error}\n{bins}"


def _share(point: dict[str, Any], name: str) -> str:
    low, high = point[f"{name}_interval"]
    return f"{point[name]:.3f} [{low:.3f}, {high:.3f}]"
