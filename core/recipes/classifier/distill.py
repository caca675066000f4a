"""Distillation: a language model labels a sample, a small student learns its labels.

The sample is the documents with the least hashes of their ids, so it does not depend on shards or
their order and a larger one holds a smaller one. It is written with the labels that the model gave
(a document whose label is unknown is left out and counted) and is then the input of an ordinary
training: what that holds out is what the student is measured on against the model. Where the
documents have labels of people, both are also measured against these on the same documents.
"""

import hashlib
import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sabia.core import notes, stop
from sabia.core.errors import BadData, UsageError
from sabia.core.options.classify_train import ClassifyTrainOptions
from sabia.core.parallel.world import detect
from sabia.core.recipes.classifier.lm_scorer import LmScorer
from sabia.core.recipes.classifier.trainer import open_trained, train
from sabia.core.shards.atomic import atomic_path, write_atomic
from sabia.core.shards.dry_run import planned
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.text.classify import held_out_metrics
from sabia.core.text.classify.fasttext_model import is_held_out
from sabia.core.text.classify.scorers import Scorer
from sabia.core.text.score_column import label_column

LABEL, SCORE, HUMAN = "lm_label", "lm_score", "human_label"
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("text", pa.string()),
        ("language", pa.string()),
        (LABEL, pa.string()),
        (SCORE, pa.float64()),
        (HUMAN, pa.string()),
    ]
)
ASKED_AT_ONCE = 512


def run(job: Job, options: ClassifyTrainOptions, teacher: LmScorer) -> None:
    """Label a sample of the job's inputs, train on it, compare.

    A model of the core learns the numbers of a scale, one of fastText the likeliest answers. The
    sample with its labels is `-o`.labels.parquet, what is said of it `-o`.distilled.json.
    """
    if job.to_stdout or "://" in str(job.out):
        raise UsageError(f"--out: {job.out} (expected a local path for the student)")
    if detect().size > 1:
        raise UsageError("--ask in several processes (expected one: then train on its labels)")
    place = str(job.out).rstrip("/")
    labels, report = f"{place}.labels.parquet", f"{place}.distilled.json"
    if job.dry_run:
        figures = {"documents to ask about": options.sample, "labels": labels}
        planned(job, basis="the answers of the model asked: unknown", figures=figures).show(job)
        return
    rows = labelled(_sample(open_inputs(job, "document"), options), teacher)
    notes.note(teacher.said())
    if not rows:
        raise BadData(f"--ask: no answer to any of {teacher.asked:,} documents could be read")
    with atomic_path(labels) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), temporary, compression="zstd")
    number = bool(options.model) and teacher.prompt.numeric
    taught = {"label": SCORE if number else LABEL, "regression": options.regression or number}
    train(replace(job, inputs=(labels,)), options.replace(**taught))
    said = compare(rows, open_trained(job, options), teacher, job.seed)
    said |= {"asked": teacher.asked, "unknown": teacher.unknown, "labelled": len(rows)}
    write_atomic(report, json.dumps(said, indent=1) + "\n")
    _tell(said, report)


def _sample(sources: Sequence[Source], options: ClassifyTrainOptions) -> list[dict[str, Any]]:
    """The documents with the least hashes, in the order of their hashes."""
    best: list[tuple[int, str, dict[str, Any]]] = []
    for place, row in _rows(sources, options.label, options.seed):
        entry = (-place, row["id"], row)
        if len(best) < options.sample:
            heapq.heappush(best, entry)
        elif entry[:2] > best[0][:2]:
            heapq.heapreplace(best, entry)
    return [row for _, _, row in sorted(best, key=lambda one: (-one[0], one[1]))]


def _rows(sources: Sequence[Source], human: str, seed: int) -> Iterator[tuple[int, dict[str, Any]]]:
    for source in sources:
        for batch in source.batches():
            stop.check()
            if human:
                label_column(batch, human, source.name)
            names = ["id", "text", "language", *filter(None, [human])]
            for row in batch.select(names).to_pylist():
                told = row.pop(human) if human else None
                told = None if told is None or told == "" else str(told)
                yield _place(seed, row["id"]), row | {HUMAN: told}


def _place(seed: int, name: str) -> int:
    mark = hashlib.blake2b(f"sample {seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(mark, "big")


def labelled(rows: Sequence[dict[str, Any]], teacher: LmScorer) -> list[dict[str, Any]]:
    """The rows whose label the teacher knows, with LABEL and SCORE (a scale's; else null)."""
    found = []
    for start in range(0, len(rows), ASKED_AT_ONCE):
        stop.check()
        some = rows[start : start + ASKED_AT_ONCE]
        answers = teacher.answers([row["text"] for row in some])
        for row, (label, score) in zip(some, answers, strict=True):
            if label is not None:
                found.append(row | {LABEL: label, SCORE: score})
    return found


def compare(
    rows: Sequence[dict[str, Any]], student: Scorer, teacher: LmScorer, seed: int
) -> dict[str, Any]:
    """Agreement of student and teacher on what was held out, and of both with people there."""
    held = [row for row in rows if is_held_out(seed, row["id"])]
    found: dict[str, Any] = {"held_out": len(held)}
    if not held:
        return found
    scores = student.score([row["text"] for row in held])
    numeric = teacher.prompt.numeric
    told = _numbers(scores) if numeric else np.stack(list(scores.values()), -1)
    names, column = tuple(scores), SCORE if numeric else LABEL
    found["student_and_lm"] = _agreement(names, [row[column] for row in held], told)
    people = [number for number, row in enumerate(held) if row[HUMAN] is not None]
    if people:
        human = [held[number][HUMAN] for number in people]
        found["student_and_people"] = _agreement(names, human, told[people])
        given = [held[number][column] for number in people]
        answers = teacher.prompt.answers
        said = np.array(given, float) if numeric else _hot(answers, given)
        found["lm_and_people"] = _agreement(answers, human, said)
    return found


def _numbers(scores: dict[str, np.ndarray]) -> np.ndarray:
    """A number float64[n] of each text: the score, or the mean of labels that are numbers."""
    if len(scores) == 1:
        return next(iter(scores.values())).astype(np.float64)
    chances = np.stack(list(scores.values()), -1).astype(np.float64)
    return chances @ np.array([float(name) for name in scores]) / chances.sum(-1)


def _hot(names: Sequence[str], given: Sequence[str]) -> np.ndarray:
    return np.array([[name == one for name in names] for one in given], float)


def _agreement(names: Sequence[str], true: Sequence[Any], told: np.ndarray) -> dict[str, Any]:
    if told.ndim == 1:
        figures = held_out_metrics.numbers(np.array(true, float), told)
    else:
        figures = held_out_metrics.one_of(tuple(names), list(true), told)[0]
    return {k: v for k, v in asdict(figures).items() if v == v}


def _tell(said: dict[str, Any], report: str) -> None:
    for name, figures in said.items():
        if isinstance(figures, dict):
            shown = ", ".join(
                f"{k.replace('_', ' ')} {v:.4g}" for k, v in figures.items() if k != "documents"
            )
            pair, count = name.replace("_", " "), figures["documents"]
            notes.note(f"{pair}: {shown} of {count:,} documents")
    notes.note(f"→ {report}")
