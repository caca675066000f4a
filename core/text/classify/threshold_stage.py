"""`classify threshold`: from rows with a score and a label to thresholds and a calibration.

Rows need a score (an entry of `scores`, or a column of numbers) and the truth: an expression, a
column of true and false, or a column of labels of which one is the score's name. Rows without one
of them are left out and counted. A language with enough rows gets a threshold of its own.
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
from sabia.core.text.classify.calibration_file import OTHER, values_of
from sabia.core.text.classify.operating_point import Cut, choose
from sabia.core.text.plain_table import plain, table
from sabia.core.text.predicate import Predicate
from sabia.core.text.score_column import label_column

LEAST = 10  # rows in all, without which nothing can be said
LEAST_OF_A_KIND = 10  # positives, and negatives, that a threshold of a language's own needs


@dataclass(frozen=True)
class _Rows:
    """scores float64[n], truth bool[n], languages object[n], and how many were left out."""

    scores: np.ndarray
    truth: np.ndarray
    languages: np.ndarray
    left_out: int


def run(job: Job, options: ThresholdOptions) -> None:
    """Print a report, and write the decision to -o. Raises UsageError, BadData, Infeasible."""
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


def decide(rows: _Rows, options: ThresholdOptions, seed: int) -> dict[str, Any]:
    """The report, which is the content of the file. Raises BadData, Infeasible."""
    count, positives = len(rows.scores), int(rows.truth.sum())
    if count < LEAST or positives in (0, count):
        raise BadData(
            f"{count} rows with score and label, {positives} of them positive"
            f" (expected {LEAST} or more, of both kinds)"
        )
    overall = choose(rows.scores, rows.truth, options)
    if overall.threshold is None:
        raise Infeasible(f"no threshold of {options.score} reaches {_said(options)}")
    cuts = _by_language(rows, options)
    fitted, crossed = score_calibration.fit(rows.scores, rows.truth, seed)
    bins = score_calibration.reliability(crossed, rows.truth)
    thresholds = {OTHER: overall.threshold} | {name: cut.threshold for name, cut in cuts.items()}
    target = {name: getattr(options, name) for name in Target.table}
    return {
        "score": options.score, "target": target, "thresholds": thresholds,
        "calibration": asdict(fitted), "rows": count, "left_out": rows.left_out,
        "overall": asdict(overall), "languages": {k: asdict(cut) for k, cut in cuts.items()},
        "expected_calibration_error": score_calibration.expected_error(bins),
        "expected_calibration_error_before": _raw_error(rows),
        "brier": score_calibration.brier(crossed, rows.truth),
        "reliability": [asdict(row) for row in bins],
    }  # fmt: skip


def _raw_error(rows: _Rows) -> float | None:
    """Of the score itself, where it can be taken for a probability."""
    if rows.scores.min() < 0 or rows.scores.max() > 1:
        return None
    return score_calibration.expected_error(score_calibration.reliability(rows.scores, rows.truth))


def _by_language(rows: _Rows, options: ThresholdOptions) -> dict[str, Cut]:
    cuts = {}
    names, counts = np.unique(rows.languages.astype(str), return_counts=True)
    for name, count in zip(names.tolist(), counts.tolist(), strict=True):
        here = rows.languages == name
        truth = rows.truth[here]
        kinds = min(int(truth.sum()), int((~truth).sum()))
        if not options.least or count < options.least or kinds < LEAST_OF_A_KIND:
            continue
        cuts[name] = choose(rows.scores[here], truth, options)
        if cuts[name].threshold is None:
            notes.warn(f"{name}: no threshold reaches {_said(options)}; nothing will pass")
    return cuts


def _said(target: Target) -> str:
    kind, value = ("precision", target.precision) if target.precision else ("recall", target.recall)
    return f"{kind} {value:g}{' surely' if target.sure else ''}"


def _read(sources: Sequence[Source], options: ThresholdOptions) -> _Rows:
    parts, total = list(_parts(sources, options)), 0
    scores = np.concatenate([part[0] for part in parts] or [np.empty(0)])
    truth = np.concatenate([part[1] for part in parts] or [np.empty(0, bool)])
    languages = np.concatenate([part[2] for part in parts] or [np.empty(0, object)])
    total = sum(part[3] for part in parts)
    return _Rows(scores, truth.astype(bool), languages, total - len(scores))


def _parts(
    sources: Sequence[Source | Sample], options: ThresholdOptions
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, int]]:
    """(scores, truth, languages, rows read) of each batch, without rows that lack one of them."""
    for source in sources:
        for number, batch in enumerate(source.batches()):
            stop.check()
            values = values_of(batch, options.score, "--score", number == 0)
            truth = np.array(truth_of(batch, options, source.name).to_pylist(), object)
            there = ~np.isnan(values) & (truth != None)  # noqa: E711 - elementwise
            language = pc.fill_null(batch.column("language"), "und")
            names = np.array(language.to_pylist(), object)
            yield values[there], truth[there].astype(bool), names[there], batch.num_rows


def truth_of(batch: pa.RecordBatch, options: ThresholdOptions, where: str) -> pa.Array:
    """bool[n], null where unknown."""
    given = label_column(batch, options.label, where) if options.label else None
    if options.positive:
        rule = Predicate(options.positive, "--positive")
        rule.check_names(batch, where)
        holds = pa.array(rule.evaluate(batch))
        return holds if given is None else pc.if_else(pc.is_valid(given), holds, None)
    assert given is not None
    if pa.types.is_boolean(given.type):
        return given
    if pa.types.is_string(given.type):
        return pc.equal(pc.replace_substring_regex(given, r"\s+", "_"), options.score)
    raise UsageError(
        f"--label: column {options.label!r} is {given.type} (expected labels, or true and false);"
        " give --positive EXPRESSION"
    )


def _readable(report: dict[str, Any]) -> str:
    cuts = {"all": report["overall"]} | report["languages"]
    found = table(
        ("language", "rows", "positive", "threshold", "passing", "precision [95 %]",
         "recall [95 %]", "F1"),
        [(name, cut["documents"], cut["positives"], cut["threshold"], cut["passing"],
          _share(cut, "precision"), _share(cut, "recall"), cut["f1"])
         for name, cut in cuts.items()],
    )  # fmt: skip
    bins = table(
        ("probability", "rows", "mean", "positive"),
        [(f"{row['low']:.1f}–{row['high']:.1f}", row["documents"], row["mean"], row["positives"])
         for row in report["reliability"]],
    )  # fmt: skip
    before = report["expected_calibration_error_before"]
    error = f"expected calibration error {report['expected_calibration_error']:.4f}"
    error += "" if before is None else f" (of the score itself {before:.4f})"
    return f"{found}\ncalibration: {report['calibration']['method']}, {error}\n{bins}"


def _share(cut: dict[str, Any], name: str) -> str:
    low, high = cut[f"{name}_interval"]
    return f"{cut[name]:.3f} [{low:.3f}, {high:.3f}]"
