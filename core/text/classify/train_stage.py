"""`classify train`: train a fastText model on labelled documents and evaluate it.

A hash of the id chooses the documents that are held out; training uses the others, in a random
order, as the steps of SGD need it: files are often sorted by label. `MODEL.json`,
beside the model, holds the provenance, the settings and the metrics on the held-out documents, in
all and by language. A model with the same provenance is not trained again.

The fastText library trains, without NaN and tracebacks. With one thread the library initializes
only one tenth of its input matrix (each thread draws one tenth, see densematrix.cc); the rest is
uninitialized memory. This is the cause of NaN on small vocabularies and of runs that differ (12
runs with one seed gave 11 different models). During training glibc therefore returns zeroed memory
(mallopt M_PERTURB), so that training with one thread is deterministic. A learning rate that is too
high for the data can still end in NaN; then training is repeated with the next of SAFER_SETTINGS.
The number of buckets follows the size of the data (about one per pair of words), so that a small
data set gives a small file.
"""

import ctypes
import json
import mmap
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core import notes, stop
from sabia.core.errors import BadData, Failed, MissingBackend, UsageError
from sabia.core.options.classify_train import ClassifyTrainOptions, FastText, LabelOptions
from sabia.core.shards.arrow_arrays import cast
from sabia.core.shards.atomic import atomic_path, scratch_directory, write_atomic
from sabia.core.shards.dry_run import Sample, estimate, measured, peak_memory, planned
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.lineage import run_record
from sabia.core.shards.manifest import provenance
from sabia.core.shards.sources import Source
from sabia.core.text.classify import fasttext_model, held_out_metrics
from sabia.core.text.predicate import Predicate
from sabia.core.text.score_column import label_column

SHOWN = 12  # lines of each table on stderr; the JSON has all
AUC_LABELS = 1_000  # with more labels, only the best label of each document is kept
_HELD = pa.schema([("label", pa.string()), ("language", pa.string()), ("text", pa.string())])
_BLANKS = r"[\n\r\x00]"
_MARKED = r"(^|[ \t\v\f])__label__[^ \t\v\f]*"
PREFIX = "__label__"
EXAMPLES_SEEN = 200_000  # documents times epochs; sets the epochs, within EPOCHS
EPOCHS = (5, 50)
BUCKETS = (1 << 12, 1 << 20)
MANY_LABELS = 1_000  # from here on hierarchical softmax, whose cost is logarithmic
MIN_COUNTS = ((10_000_000, 5), (1_000_000, 2), (0, 1))  # (words of the data, least count)
QUANTIZED_ROWS = 256  # the minimum of the library
SAFER_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"lr": 0.1},
    {"lr": 0.02, "minn": 2, "maxn": 4},
    {"lr": 0.005, "minn": 2, "maxn": 4, "dim": 16, "thread": 1},
)
_M_PERTURB = -6


@dataclass(frozen=True)
class Settings:
    """The settings of the library, with its names."""

    epoch: int
    bucket: int
    minCount: int = 1
    lr: float = 0.5
    dim: int = 32
    wordNgrams: int = 2
    minn: int = 0
    maxn: int = 0
    loss: str = "softmax"
    seed: int = 0
    thread: int = 1


def settings_for(
    documents: int, words: int, labels: int, options: FastText, seed: int, threads: int
) -> Settings:
    """Settings for the size of the data: documents, words in all, and labels."""
    epochs = options.epochs or int(np.clip(EXAMPLES_SEEN // max(documents, 1), *EPOCHS))
    letters = options.letters()
    parts = max(options.ngrams - 1, 0) + 4 * (letters[1] > 0)
    bucket = 1 << int(np.clip(words * max(parts, 1), *BUCKETS) - 1).bit_length()
    min_count = next(least for size, least in MIN_COUNTS if words >= size)
    loss = "hs" if labels >= MANY_LABELS else "softmax"
    dim = options.dim or (32 if labels <= 64 else 64)
    return Settings(
        int(epochs), bucket, min_count, 0.5, dim, options.ngrams, *letters, loss, seed, threads
    )  # fmt: skip


@contextmanager
def zeroed_memory() -> Iterator[None]:
    """Let malloc return zeroed memory, with glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    before = int(os.environ.get("MALLOC_PERTURB_") or 0)
    if mallopt:
        mallopt(_M_PERTURB, 255)  # memory is filled with the complement: zeros
    try:
        yield
    finally:
        if mallopt:
            mallopt(_M_PERTURB, before)


def library() -> Any:
    """The package fasttext, without the warning that it prints on every load."""
    try:
        import fasttext
    except ModuleNotFoundError as error:
        raise MissingBackend("a package is missing; pip install fasttext-numpy2") from error
    fasttext.FastText.eprint = lambda *_args: None
    return fasttext


def fit(lines: str, settings: Settings, out: str, quantize: bool = False) -> Settings:
    """Train on a file of lines `__label__x text` and write the model to `out`.

    While the model is not finite, train again with safer settings. Returns the settings used.
    Raises Failed, UsageError (too few rows to quantize).
    """
    tried: list[Settings] = []
    for safer in SAFER_SETTINGS:
        changes = {  # never a higher rate, more dimensions or more threads than requested
            name: (min if name in ("lr", "dim", "thread") else max)(value, getattr(settings, name))
            for name, value in safer.items()
        }
        attempt = replace(settings, **changes)
        if attempt in tried:
            continue
        if tried:
            changed = asdict(attempt).items() - asdict(tried[-1]).items()
            words = ", ".join(f"{name} {value}" for name, value in sorted(changed))
            notes.warn(f"training ended in NaN; trying again with {words}")
        tried.append(attempt)
        model = fit_once(lines, attempt)
        if model is not None:
            stop.check()
            _save(model, lines, out, quantize)
            return attempt
    raise Failed("fastText training ended in NaN with every setting tried; give it more text")


def fit_once(lines: str, settings: Settings) -> Any:
    """The trained model, or None where it is not finite."""
    try:
        with zeroed_memory():
            model = library().train_supervised(input=lines, verbose=0, **asdict(settings))
    except RuntimeError as error:
        if "NaN" not in str(error):
            raise Failed(f"fastText: {error}") from error
        return None
    except ValueError as error:  # it raises this for a file without words
        raise Failed(f"fastText: {error}") from error
    # the sums are finite exactly where the input matrix is, and need no memory
    matrices = model.get_output_matrix(), model.get_input_matrix().sum(axis=0, dtype=np.float64)
    return model if all(np.isfinite(one).all() for one in matrices) else None


def _save(model: Any, lines: str, out: str, quantize: bool) -> None:
    if quantize:
        rows = model.get_input_matrix().shape[0]
        if rows < QUANTIZED_ROWS:
            raise UsageError(
                f"--quantize-model: the model has {rows} rows (expected {QUANTIZED_ROWS} or more)"
            )
        with zeroed_memory():
            model.quantize(input=lines, qnorm=True)
    with atomic_path(Path(out)) as temporary:
        model.save_model(str(temporary))


def run(job: Job, options: ClassifyTrainOptions) -> None:
    """Train on the job's inputs and write the model to -o. Raises UsageError, BadData, Failed."""
    if job.to_stdout or job.to_file:
        raise UsageError(f"--out: {job.out} (expected the name of a model, such as spam.bin)")
    sources, out = open_inputs(job, "document"), str(job.out)
    recorded = {name: getattr(options, name) for name in (*LabelOptions.table, *FastText.table)}
    fingerprints = [source.fingerprint() for source in sources]
    made, run = run_record.split(
        provenance(
            replace(job, options=recorded), "fasttext", fingerprints,
            names=run_record.inputs_of(sources),
        )
    )  # fmt: skip
    report = None if job.force else _finished(out, made)
    if job.dry_run:
        _dry_run(job, options, sources, out, keep=report is not None)
        return
    if report is not None:
        notes.note(f"{out}: already trained on this input with these options")
    else:
        report = _train(sources, options, out, job) | {"made": made}
        if run is not None:
            report[run_record.RUN] = run.ended(None)
            run_record.keep_beside(out, report[run_record.RUN])
        report["model_digest"] = fasttext_model.digest(out)
        write_atomic(f"{out}.json", json.dumps(report, indent=1, default=str) + "\n")
    _show(report)
    if job.json:
        print(json.dumps(report, default=str))


def _dry_run(
    job: Job, options: ClassifyTrainOptions, sources: Sequence[Source], out: str, keep: bool
) -> None:
    """Show the plan, with estimates from reading a sample and training 1 and 11 epochs on it."""
    plan, sampled = planned(job, sources, keep=keep), [(Counter[str](), 0)]
    with scratch_directory("sabia-train") as scratch:
        lines = f"{scratch}/train.txt"

        def read(sample: Sample) -> Iterator[tuple[Counter[str], int]]:
            sampled[:] = [_write_rows([sample], options, out, job.seed, lines, f"{scratch}/held")]
            return iter(sampled)

        scale = estimate(plan, [] if keep else sources, read, 1, lambda _: 0)
        counts, size = sampled[0]
        if len(counts) < 2 and not keep:
            plan.cpu_seconds = plan.bytes_written = None
            plan.basis = f"{plan.basis}, which have {len(counts)} labels (expected 2 or more)"
        elif plan.cpu_seconds is not None and not keep:
            settings = settings_for(
                round(counts.total() * scale), round(size * scale) // 4, len(counts), options,
                job.seed, job.jobs,
            )  # fmt: skip
            trained = partial(fit_once, lines)
            model, once = measured(lambda: trained(replace(settings, epoch=1)))
            more = measured(lambda: trained(replace(settings, epoch=11)))[1]
            plan.cpu_seconds += once + settings.epoch * scale * max(0.0, more - once) / 10
            words = 0 if model is None else len(model.words)
            plan.bytes_written = 4 * settings.dim * (settings.bucket + words)
            plan.memory_bytes = peak_memory() + plan.bytes_written
            plan.figures["settings"] = asdict(settings)
    plan.show(job)


def _finished(out: str, made: dict[str, Any]) -> dict[str, Any] | None:
    """The report of an earlier run of the same provenance, if its model is unchanged."""
    try:
        with open(f"{out}.json", encoding="utf-8") as file:
            report = json.load(file)
        same = report["made"]["fingerprint"] == made["fingerprint"]
        return report if same and report["model_digest"] == fasttext_model.digest(out) else None
    except (OSError, ValueError, KeyError, TypeError, UsageError):
        return None


def _train(
    sources: Sequence[Source], options: ClassifyTrainOptions, out: str, job: Job
) -> dict[str, Any]:
    with scratch_directory("sabia-train") as scratch:
        lines, held = f"{scratch}/train.txt", f"{scratch}/held.arrow"
        counts, size = _write_rows(sources, options, out, job.seed, lines, held)
        if len(counts) < 2:
            name = "positive" if options.positive else "label"
            where = f"--{name} {getattr(options, name)}"
            raise BadData(f"{where}: {len(counts)} different labels (expected 2 or more)")
        documents = counts.total()
        settings = settings_for(documents, size // 4, len(counts), options, job.seed, job.jobs)
        settings = fit(lines, settings, out, options.quantize_model)
        return {
            "command": "classify train", "model": out, "documents": documents,
            "label_counts": dict(counts.most_common()), "settings": asdict(settings),
            "size_bytes": os.path.getsize(out),
        } | _evaluate(out, held)  # fmt: skip


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
    size, lengths = 0, array("q")
    with open(lines, "wb") as file, pa.ipc.new_stream(held, _HELD) as writer:
        for source in sources:
            for batch in source.batches():
                stop.check()
                labels = _labels(batch, options, out, source.name)
                ids = batch.column("id").to_pylist()
                held_out = pa.array(
                    [fasttext_model.is_held_out(seed, key) for key in ids], pa.bool_()
                )
                languages = pc.fill_null(batch.column("language"), "und")
                columns = [labels, languages, batch.column("text")]
                rows = pa.RecordBatch.from_arrays(columns, _HELD.names)
                labelled = pc.is_valid(labels)
                writer.write_batch(rows.filter(pc.and_(labelled, held_out)).cast(_HELD))
                rows = rows.filter(pc.and_not(labelled, held_out))
                counts.update(rows.column("label").to_pylist())
                text_bytes, written = _write_lines(file, rows.column("label"), rows.column("text"))
                size += text_bytes
                lengths.extend(written)
    _shuffle(lines, np.asarray(lengths), seed)
    return counts, size


def _shuffle(path: str, lengths: np.ndarray, seed: int) -> None:
    """Put the lines of a file, of so many bytes each, into a random order."""
    if not len(lengths):
        return
    ends = np.cumsum(lengths)
    order = np.random.default_rng(seed).permutation(len(ends))
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        open(f"{path}.shuffled", "wb") as shuffled,
    ):
        for part in np.array_split(order, -(-len(order) // 10_000)):
            stop.check()
            at = zip((ends - lengths)[part].tolist(), ends[part].tolist(), strict=True)
            shuffled.writelines(data[begin:end] for begin, end in at)
    os.replace(f"{path}.shuffled", path)


def _labels(batch: pa.RecordBatch, options: LabelOptions, out: str, where: str) -> pa.Array:
    """string[n]: labels as single words, null without one."""
    column = None
    if options.label:
        column = label_column(batch, options.label, where)
        what = f"--label: column {options.label!r}"
        column = cast(column, pa.string(), what, "text or numbers", UsageError)
    if not options.positive:
        assert column is not None
        coded = column.dictionary_encode()
        names = [_one_word(name) or None for name in coded.dictionary.to_pylist()]
        return pa.array(names, pa.string()).take(coded.indices)
    predicate = Predicate(options.positive, "--positive")
    predicate.check_names(batch, where)
    name = positive_name(out)
    labels = pc.if_else(pa.array(predicate.evaluate(batch)), name, f"not_{name}")
    return labels if column is None else pc.if_else(pc.is_valid(column), labels, None)


def positive_name(out: str) -> str:
    """The label of rows where --positive is true: the model's file name without its suffix."""
    return _one_word(os.path.basename(out).split(".")[0]) or "positive"


def _one_word(label: str) -> str:
    return "_".join(label.replace("\0", " ").split())


def _write_lines(file: BinaryIO, labels: pa.Array, texts: pa.Array) -> tuple[int, list[int]]:
    """Append `__label__x text` lines; returns the bytes of text, and of each line.

    Words of a text that look like a label are removed, as in scoring.
    """
    texts = pc.replace_substring_regex(texts, _BLANKS, " ")
    if pc.any(pc.match_substring(texts, PREFIX)).as_py():
        texts = pc.replace_substring_regex(texts, _MARKED, r"\1")
    lines = pc.binary_join_element_wise(pc.binary_join_element_wise(PREFIX, labels, ""), texts, " ")
    encoded = [line.encode() + b"\n" for line in lines.to_pylist()]
    file.writelines(encoded)
    return pc.sum(pc.binary_length(texts)).as_py() or 0, [len(line) for line in encoded]


def _evaluate(out: str, held: str) -> dict[str, object]:
    """Metrics of the written model on the held-out rows."""
    model = fasttext_model.load(out)
    true, languages, scores = [], [], []
    with pa.ipc.open_stream(held) as reader:
        for batch in reader:
            stop.check()
            true += batch.column("label").to_pylist()
            languages += batch.column("language").to_pylist()
            batch_scores = np.nan_to_num(fasttext_model.score_array(model, batch.column("text")))
            if len(model.labels) > AUC_LABELS:  # one bit each: only the best label of a row
                best = batch_scores.argmax(1)[:, None]
                batch_scores = best == np.arange(len(model.labels))
            scores.append(batch_scores)
    if not true:
        return {"held_out": 0, "labels": [], "languages": []}
    table, labels, codes = np.concatenate(scores), np.array(true, object), np.array(languages)
    by_language = []
    for language, count in Counter(languages).most_common():
        mask = codes == language
        metrics = _metrics(model.labels, list(labels[mask]), table[mask])
        metrics["labels"] = [one for one in metrics["labels"] if one["documents"]]
        by_language.append({"language": language, "documents": count} | metrics)
    overall = {"held_out": len(true)} | _metrics(model.labels, true, table)
    return overall | {"languages": by_language}


def _metrics(names: Sequence[str], true: Sequence[str], scores: np.ndarray) -> dict[str, Any]:
    """Metrics over all labels, and of each label."""
    overall, figures = held_out_metrics.single_label_metrics(names, true, scores)
    by_label = [asdict(one) for one in figures]
    return {"accuracy": overall.accuracy, "macro_f1": overall.macro_f1, "labels": by_label}


def _show(report: dict[str, Any]) -> None:
    """Note the report on stderr."""
    settings = report["settings"]
    notes.note(
        f"{report['documents']:,} documents, {len(report['label_counts']):,} labels,"
        f" {settings['epoch']} epochs, dim {settings['dim']} → {report['model']}"
        f" ({report['size_bytes'] / 1e6:,.1f} MB)"
    )
    if not report["held_out"]:
        notes.warn("too few documents to hold any out, so there are no metrics")
        return
    for one in report["labels"][:SHOWN]:
        notes.note(
            f"held out: {one['label']}: precision {one['precision']:.3f}, recall"
            f" {one['recall']:.3f}, F1 {one['f1']:.3f}, AUC {one['auc']:.3f}"
            f" of {one['documents']:,} documents"
        )
    if len(report["labels"]) > SHOWN:
        notes.note(
            f"… {len(report['labels']) - SHOWN} more labels; macro-F1 {report['macro_f1']:.3f}"
        )
    if len(report["languages"]) > 1:
        for row in report["languages"][:SHOWN]:
            notes.note(
                f"held out: language {row['language']}: accuracy {row['accuracy']:.3f}, macro-F1"
                f" {row['macro_f1']:.3f} of {row['documents']:,} documents"
            )
