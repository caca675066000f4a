"""`classify train`: from labelled documents to a fastText model and what it is worth.

Documents whose id hashes so are held out; training sees the others only. Beside the model goes
`MODEL.json`: what made it, with which settings, and its figures on the documents held out, over
all and by language. A model that was made from the same by the same is left as it is.
"""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core import notes, stop
from sabia.core.errors import BadData, UsageError
from sabia.core.options.classify_train import ClassifyTrainOptions, FastText, LabelOptions
from sabia.core.shards.arrow_arrays import cast
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.dry_run import Sample, estimate, measured, peak_memory, planned
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.manifest import provenance
from sabia.core.shards.sources import Source
from sabia.core.text.classify import fasttext_model, fasttext_training, held_out_metrics
from sabia.core.text.classify.fasttext_training import PREFIX, Settings
from sabia.core.text.predicate import Predicate
from sabia.core.text.score_column import label_column

SHOWN = 12  # lines of a table on stderr; the JSON has all
AUC_LABELS = 1_000  # with more labels, figures come from the best one only
_HELD = pa.schema([("label", pa.string()), ("language", pa.string()), ("text", pa.string())])
_BLANKS = r"[\n\r\x00]"
_MARKED = r"(^|[ \t\v\f])__label__[^ \t\v\f]*"


def run(job: Job, options: ClassifyTrainOptions) -> None:
    """Train on the job's inputs; -o names the model. Raises UsageError, BadData, Failed."""
    if job.to_stdout or job.to_file:
        raise UsageError(f"--out: {job.out} (expected the name of a model, such as spam.bin)")
    sources, out = open_inputs(job, "document"), str(job.out)
    told = {name: getattr(options, name) for name in (*LabelOptions.table, *FastText.table)}
    prints = [source.fingerprint() for source in sources]
    made = provenance(replace(job, options=told), "fasttext", prints)
    report = None if job.force else _finished(out, made)
    if job.dry_run:
        _dry_run(job, options, sources, out, keep=report is not None)
        return
    if report is not None:
        notes.note(f"{out} is already made from the same")
    else:
        report = _train(sources, options, out, job) | {"made": made}
        report["model_digest"] = fasttext_model.digest(out)
        write_atomic(_card(out), json.dumps(report, indent=1, default=str) + "\n")
    _tell(report)
    if job.json:
        print(json.dumps(report, default=str))


def _dry_run(
    job: Job, options: ClassifyTrainOptions, sources: Sequence[Source], out: str, keep: bool
) -> None:
    """Show what would be done, by reading a sample and training one epoch and eleven on it."""
    plan, found = planned(job, sources, keep=keep), [(Counter[str](), 0)]
    with tempfile.TemporaryDirectory(prefix="sabia-train-") as scratch:
        lines = f"{scratch}/train.txt"

        def read(sample: Sample) -> Iterator[tuple[Counter[str], int]]:
            found[:] = [_write_rows([sample], options, out, job.seed, lines, f"{scratch}/held")]
            return iter(found)

        scale = estimate(plan, [] if keep else sources, read, 1, lambda _: 0)
        counts, size = found[0]
        if len(counts) < 2 and not keep:
            plan.cpu_seconds = plan.bytes_written = None
            plan.basis = f"{plan.basis}, which have {len(counts)} labels (expected 2 or more)"
        elif plan.cpu_seconds is not None and not keep:
            settings = fasttext_training.settings_for(
                round(counts.total() * scale), round(size * scale) // 4, len(counts), options,
                job.seed, job.jobs,
            )  # fmt: skip
            fit = partial(fasttext_training.fit_once, lines)
            model, once = measured(lambda: fit(replace(settings, epoch=1)))
            more = measured(lambda: fit(replace(settings, epoch=11)))[1]
            plan.cpu_seconds += once + settings.epoch * scale * max(0.0, more - once) / 10
            words = 0 if model is None else len(model.words)
            plan.bytes_written = 4 * settings.dim * (settings.bucket + words)
            plan.memory_bytes = peak_memory() + plan.bytes_written
            plan.figures["settings"] = asdict(settings)
    plan.show(job)


def _card(out: str) -> str:
    return f"{out}.json"


def _finished(out: str, made: dict[str, Any]) -> dict[str, Any] | None:
    """The report of an earlier run that made this model from the same."""
    try:
        with open(_card(out), encoding="utf-8") as file:
            report = json.load(file)
        same = report["made"]["fingerprint"] == made["fingerprint"]
        return report if same and report["model_digest"] == fasttext_model.digest(out) else None
    except (OSError, ValueError, KeyError, TypeError, UsageError):
        return None


def _train(
    sources: Sequence[Source], options: ClassifyTrainOptions, out: str, job: Job
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="sabia-train-") as scratch:
        lines, held = f"{scratch}/train.txt", f"{scratch}/held.arrow"
        counts, size = _write_rows(sources, options, out, job.seed, lines, held)
        if len(counts) < 2:
            name = "positive" if options.positive else "label"
            where = f"--{name} {getattr(options, name)}"
            raise BadData(f"{where}: {len(counts)} different labels (expected 2 or more)")
        documents = counts.total()
        settings = fasttext_training.settings_for(
            documents, size // 4, len(counts), options, job.seed, job.jobs
        )
        settings = fasttext_training.fit(lines, settings, out, options.quantize_model)
        report = _report(out, documents, settings, counts)
        return report | _measure(out, held)


def _report(out: str, documents: int, settings: Settings, counts: Counter[str]) -> dict[str, Any]:
    return {
        "command": "classify train", "model": out, "documents": documents,
        "label_counts": dict(counts.most_common()), "settings": asdict(settings),
        "size_bytes": os.path.getsize(out),
    }  # fmt: skip


def _write_rows(
    sources: Sequence[Source | Sample],
    options: LabelOptions,
    out: str,
    seed: int,
    lines: str,
    held: str,
) -> tuple[Counter[str], int]:
    """Write training lines and held-out rows; (documents by label, bytes of text) of training."""
    counts: Counter[str] = Counter()
    size = 0
    with open(lines, "wb") as file, pa.ipc.new_stream(held, _HELD) as writer:
        for batch in _labelled(sources, options, out):
            ids = batch.column("id").to_pylist()
            mask = pa.array([fasttext_model.is_held_out(seed, name) for name in ids], pa.bool_())
            rest = batch.filter(mask).select(_HELD.names)
            writer.write_batch(rest.cast(_HELD))
            used = batch.filter(pc.invert(mask))
            counts.update(used.column("label").to_pylist())
            size += _write_lines(file, used.column("label"), used.column("text"))
    return counts, size


def _labelled(
    sources: Sequence[Source | Sample], options: LabelOptions, out: str
) -> Iterator[pa.RecordBatch]:
    """Rows (id, label, language, text) of the documents that have a label."""
    for source in sources:
        for batch in source.batches():
            stop.check()
            labels = _labels(batch, options, out, source.name)
            columns = {"id": batch.column("id"), "label": labels,
                       "language": pc.fill_null(batch.column("language"), "und"),
                       "text": batch.column("text")}  # fmt: skip
            yield pa.RecordBatch.from_pydict(columns).filter(pc.is_valid(labels))


def _labels(batch: pa.RecordBatch, options: LabelOptions, out: str, where: str) -> pa.Array:
    """string[n], null without a label."""
    given = _column(batch, options.label, where) if options.label else None
    if not options.positive:
        return _clean(given)
    rule = Predicate(options.positive, "--positive")
    rule.check_names(batch, where)
    name = positive_name(out)
    labels = pc.if_else(pa.array(rule.evaluate(batch)), name, f"not_{name}")
    return labels if given is None else pc.if_else(pc.is_valid(given), labels, None)


def positive_name(out: str) -> str:
    """The label of what --positive holds for: the model's name without its ending."""
    return _one_word(os.path.basename(out).split(".")[0]) or "positive"


def _column(batch: pa.RecordBatch, name: str, where: str) -> pa.Array:
    column = label_column(batch, name, where)
    return cast(column, pa.string(), f"--label: column {name!r}", "text or numbers", UsageError)


def _clean(labels: pa.Array) -> pa.Array:
    """Labels as single words: blanks become `_`; empty ones become null."""
    coded = labels.dictionary_encode()
    names = pa.array(
        [_one_word(name) or None for name in coded.dictionary.to_pylist()], pa.string()
    )
    return names.take(coded.indices)


def _one_word(label: str) -> str:
    return "_".join(label.replace("\0", " ").split())


def _write_lines(file: BinaryIO, labels: pa.Array, texts: pa.Array) -> int:
    """Append `__label__x text` lines; returns the bytes of text. What would read as a label inside
    a text is left out, as it is when scoring."""
    texts = pc.replace_substring_regex(texts, _BLANKS, " ")
    if pc.any(pc.match_substring(texts, PREFIX)).as_py():
        texts = pc.replace_substring_regex(texts, _MARKED, r"\1")
    lines = pc.binary_join_element_wise(pc.binary_join_element_wise(PREFIX, labels, ""), texts, " ")
    for line in lines.to_pylist():
        file.write(line.encode() + b"\n")
    return pc.sum(pc.binary_length(texts)).as_py() or 0


def _measure(out: str, held: str) -> dict[str, Any]:
    """Figures on the rows held out, scored by the model as it was written."""
    model = fasttext_model.load(out)
    true, languages, scores = [], [], []
    with pa.ipc.open_stream(held) as reader:
        for batch in reader:
            stop.check()
            true += batch.column("label").to_pylist()
            languages += batch.column("language").to_pylist()
            found = fasttext_model.score_array(model, batch.column("text"))
            scores.append(_compact(np.nan_to_num(found), len(model.labels)))
    if not true:
        return {"held_out": 0, "labels": [], "languages": []}
    table = np.concatenate(scores)
    by_language = _by_language(model.labels, np.array(true, object), np.array(languages), table)
    whole = {"held_out": len(true)} | _figures(model.labels, true, table)
    return whole | {"languages": by_language}


def _figures(names: Sequence[str], true: Sequence[str], scores: np.ndarray) -> dict[str, Any]:
    """Agreement in all, and figures by label."""
    agreement, figures = held_out_metrics.one_of(names, true, scores)
    said = {"accuracy": agreement.accuracy, "macro_f1": agreement.macro_f1}
    return said | {"labels": [asdict(one) for one in figures]}


def _compact(scores: np.ndarray, labels: int) -> np.ndarray:
    """With very many labels only the best one of each row is kept, as one bit."""
    if labels <= AUC_LABELS:
        return scores
    return scores.argmax(1)[:, None] == np.arange(labels)


def _by_language(
    names: Sequence[str], true: np.ndarray, languages: np.ndarray, scores: np.ndarray
) -> list[dict[str, Any]]:
    rows = []
    for language, count in Counter(languages.tolist()).most_common():
        here = languages == language
        found = _figures(names, list(true[here]), scores[here])
        found["labels"] = [one for one in found["labels"] if one["documents"]]
        rows.append({"language": language, "documents": count} | found)
    return rows


def _tell(report: dict[str, Any]) -> None:
    """The report as lines on stderr."""
    settings = report["settings"]
    notes.note(
        f"{report['documents']:,} documents, {len(report['label_counts']):,} labels,"
        f" {settings['epoch']} epochs, dim {settings['dim']} → {report['model']}"
        f" ({report['size_bytes'] / 1e6:,.1f} MB)"
    )
    if not report["held_out"]:
        notes.warn("too few documents to hold any out; nothing measured")
        return
    for one in report["labels"][:SHOWN]:
        notes.note(
            f"held out: {one['label']}: precision {one['precision']:.3f}, recall"
            f" {one['recall']:.3f}, F1 {one['f1']:.3f}, AUC {one['auc']:.3f}"
            f" of {one['documents']:,} documents"
        )
    if len(report["labels"]) > SHOWN:
        notes.note(
            f"… {len(report['labels']) - SHOWN} labels more; macro-F1 {report['macro_f1']:.3f}"
        )
    if len(report["languages"]) > 1:
        for row in report["languages"][:SHOWN]:
            notes.note(
                f"held out: language {row['language']}: accuracy {row['accuracy']:.3f}, macro-F1"
                f" {row['macro_f1']:.3f} of {row['documents']:,} documents"
            )
