"""Distillation: a language model labels a sample, a small student learns its labels.

The sample consists of the documents with the smallest hashes of their ids, so it does not depend on
shards or their order, and a larger sample contains a smaller one. It is written with the labels of
the model (documents with an unknown label are left out and counted) and is then the input of an
ordinary training; the agreement of student and model is measured on what that holds out. Where
the documents have human labels, both are also compared with these on the same documents.
"""

import hashlib
import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core import notes, stop
from sabia.core.errors import BadData, UsageError
from sabia.core.options.classify_train import ClassifyTrainOptions
from sabia.core.parallel.world import detect
from sabia.core.recipes.classifier.lm_scorer import LmScorer
from sabia.core.recipes.classifier.trainer import open_trained, train
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.dry_run import planned
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.outputs import open_file
from sabia.core.shards.sources import Source
from sabia.core.text.classify import held_out_metrics
from sabia.core.text.classify.fasttext_model import is_held_out
from sabia.core.text.classify.scorers import Scorer
from sabia.core.text.score_column import label_column

LABEL, SCORE, HUMAN = "lm_label", "lm_score", "human_label"
SCHEMA = pa.schema(
    [("id", pa.string()), ("text", pa.string()), ("language", pa.string()), (LABEL, pa.string()),
     (SCORE, pa.float64()), (HUMAN, pa.string())]
)  # fmt: skip
ASK_BATCH = 512


def run(job: Job, options: ClassifyTrainOptions, teacher: LmScorer) -> None:
    """Label a sample of the job's inputs, train on it, compare.

    A model of the core learns the numbers of a scale, fastText the likeliest answers. The labelled
    sample is written to `-o`.labels.parquet, the comparison to `-o`.distilled.json.
    """
    if job.to_stdout or "://" in str(job.out):
        raise UsageError(f"--out: {job.out} (expected a local path for the student)")
    if detect().size > 1:
        raise UsageError("--ask in several processes (expected one: then train on its labels)")
    out = str(job.out).rstrip("/")
    labels, report = f"{out}.labels.parquet", f"{out}.distilled.json"
    if job.dry_run:
        figures = {"documents to ask about": options.sample, "labels": labels}
        planned(job, basis="the answers of the model asked: unknown", figures=figures).show(job)
        return
    rows = labelled(_sample(open_inputs(job, "document"), options), teacher)
    notes.note(teacher.summary())
    if not rows:
        raise BadData(f"--ask: no answer to any of {teacher.asked:,} documents could be read")
    with open_file(labels, SCHEMA) as file:
        file.write(pa.RecordBatch.from_pylist(rows, SCHEMA))
    number = bool(options.model) and teacher.prompt.numeric
    targets = {"label": SCORE if number else LABEL, "regression": options.regression or number}
    train(replace(job, inputs=(labels,)), options.replace(**targets))
    comparison = compare(rows, open_trained(job, options), teacher, job.seed)
    comparison |= {"asked": teacher.asked, "unknown": teacher.unknown, "labelled": len(rows)}
    write_atomic(report, json.dumps(comparison, indent=1) + "\n")
    for name, figures in comparison.items():
        if isinstance(figures, dict):
            shown = ", ".join(
                f"{k.replace('_', ' ')} {v:.4g}" for k, v in figures.items() if k != "documents"
            )
            notes.note(f"{name.replace('_', ' ')}: {shown} of {figures['documents']:,} documents")
    notes.note(f"→ {report}")


def _sample(sources: Sequence[Source], options: ClassifyTrainOptions) -> list[dict[str, Any]]:
    """The documents with the smallest hashes, in the order of their hashes."""
    # a heap with the largest hash (negated) at its root, which the next smaller one replaces
    best: list[tuple[int, str, dict[str, Any]]] = []
    for row in _rows(sources, options.label):
        name = f"sample {options.seed} {row['id']}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        entry = (-int.from_bytes(digest, "big"), row["id"], row)
        if len(best) < options.sample:
            heapq.heappush(best, entry)
        elif entry[:2] > best[0][:2]:
            heapq.heapreplace(best, entry)
    return [row for _, _, row in sorted(best, key=lambda entry: (-entry[0], entry[1]))]


def _rows(sources: Sequence[Source], human: str) -> Iterator[dict[str, Any]]:
    """All documents, with the label of the column `human` ('': none) as HUMAN."""
    for source in sources:
        for batch in source.batches():
            stop.check()
            if human:
                label_column(batch, human, source.name)
            names = ["id", "text", "language", *filter(None, [human])]
            for row in batch.select(names).to_pylist():
                label = row.pop(human) if human else None
                yield row | {HUMAN: None if label is None or label == "" else str(label)}


def labelled(rows: Sequence[dict[str, Any]], teacher: LmScorer) -> list[dict[str, Any]]:
    """The rows whose label the teacher knows, with LABEL and SCORE (a scale's; else null)."""
    known = []
    for start in range(0, len(rows), ASK_BATCH):
        stop.check()
        batch = rows[start : start + ASK_BATCH]
        answers = teacher.answers([row["text"] for row in batch])
        for row, (label, score) in zip(batch, answers, strict=True):
            if label is not None:
                known.append(row | {LABEL: label, SCORE: score})
    return known


def compare(
    rows: Sequence[dict[str, Any]], student: Scorer, teacher: LmScorer, seed: int
) -> dict[str, Any]:
    """Agreement of student and teacher on held-out documents, and of both with human labels."""
    held = [row for row in rows if is_held_out(seed, row["id"])]
    figures: dict[str, Any] = {"held_out": len(held)}
    if not held:
        return figures
    scores = student.score([row["text"] for row in held])
    numeric = teacher.prompt.numeric
    predicted = _numbers(scores) if numeric else np.stack(list(scores.values()), -1)
    names, column = tuple(scores), SCORE if numeric else LABEL
    figures["student_and_lm"] = _agreement(names, [row[column] for row in held], predicted)
    people = [number for number, row in enumerate(held) if row[HUMAN] is not None]
    if people:
        human = [held[number][HUMAN] for number in people]
        figures["student_and_people"] = _agreement(names, human, predicted[people])
        by_lm = [held[number][column] for number in people]
        answers = teacher.prompt.answers
        # a label as scores: one-hot [n, answers]
        one_hot = np.array([[name == label for name in answers] for label in by_lm], float)
        lm_scores = np.array(by_lm, float) if numeric else one_hot
        figures["lm_and_people"] = _agreement(answers, human, lm_scores)
    return figures


def _numbers(scores: dict[str, np.ndarray]) -> np.ndarray:
    """A number float64[n] of each text: the score, or the mean of labels that are numbers."""
    if len(scores) == 1:
        return next(iter(scores.values())).astype(np.float64)
    probabilities = np.stack(list(scores.values()), -1).astype(np.float64)  # [n, labels]
    return probabilities @ np.array([float(name) for name in scores]) / probabilities.sum(-1)


def _agreement(
    names: Sequence[str], true: Sequence[Any], predicted: np.ndarray
) -> dict[str, object]:
    if predicted.ndim == 1:
        figures = held_out_metrics.regression_metrics(np.array(true, float), predicted)
    else:
        figures = held_out_metrics.single_label_metrics(tuple(names), list(true), predicted)[0]
    # without the figures that are NaN, which is not equal to itself
    return {k: v for k, v in asdict(figures).items() if v == v}
