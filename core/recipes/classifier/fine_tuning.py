"""Training a sequence classifier: labelled documents and a model → a model that scores texts.

An encoder or decoder of the model core gets a head over the labels (core.spec.model) and is trained
by core.recipes.training_run: one document per row, rows of similar length together. A tenth of the
documents, by a hash of their id, is held out; the metrics of the finished model on these are in
`held_out.json`.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from sabia.core import notes, stop
from sabia.core.errors import BadData, UsageError
from sabia.core.generate.model_directory import weights_fingerprint
from sabia.core.model.init import init_tensor
from sabia.core.model.lora import LoraConfig
from sabia.core.options.classify_train import ClassifyTrainOptions
from sabia.core.parallel.mesh import parse_mesh
from sabia.core.parallel.world import World
from sabia.core.recipes import training_config, training_run
from sabia.core.recipes.classifier.labels import Labels, labels_of, usable
from sabia.core.recipes.classifier.sequence_classifier import ClassifierModel
from sabia.core.recipes.classifier.token_windows import TextReader
from sabia.core.recipes.model_source import load_arrays
from sabia.core.recipes.row_outputs import opened_rejects
from sabia.core.recipes.run_call import RunCall, open_run
from sabia.core.recipes.training_run import Task
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.order import by_length
from sabia.core.shards.sources import Source
from sabia.core.spec import ModelSpec, load_spec
from sabia.core.spec.families import with_classifier
from sabia.core.spec.model import classifier_config, label_names
from sabia.core.text.classify.fasttext_model import is_held_out
from sabia.core.text.score_column import label_column
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.train.labelled_rows import LabelledRows, labelled_rows
from sabia.core.train.losses.classification import classification_loss
from sabia.core.train.run_directory import RunDirectory

REPORT = "held_out.json"
EPOCHS = 3  # where neither steps nor epochs are given


@dataclass
class Documents:
    """Token ids and values of the label column of some documents."""

    ids: list[np.ndarray] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)


def run(job: Job, options: ClassifyTrainOptions) -> None:
    """Train and measure by the options; raises what its parts raise."""
    epochs = 0 if options.steps else options.epochs or EPOCHS
    trained_by = options.replace(epochs=float(epochs))
    directory, world = open_run(job, trained_by)
    if parse_mesh(job.mesh).get("context", 1) > 1:
        raise UsageError("--mesh: context with a classifier (expected another axis, such as data)")
    sources = open_inputs(job, "document")
    reader = TextReader(load_tokenizer(options.model), options.length)
    identity = {
        "command": job.command,
        "inputs": [source.fingerprint() for source in sources],
        "model": weights_fingerprint(options.model),
        "tokenizer": reader.tokenizer.fingerprint,
        "label": options.label,
        "regression": options.regression,
        "class_weights": options.class_weights,
        "length": options.length,
        "seed": job.seed,
        **training_config.identity(trained_by),
    }
    report = directory.path / REPORT
    done = not job.force and directory.finished(identity)
    if done and report.exists():
        notes.note(f"{directory.path}: already finished; --force trains it again")
        _show(job, json.loads(report.read_text("utf-8")), world)
        return
    training, held = _read(job, options, sources, reader, world)
    task, labels = make_task(job, options, reader.tokenizer.pad_id, training, held)
    if not done:
        report.unlink(missing_ok=True)
        training_run.train(RunCall(job, identity, directory, world), task, trained_by)
    if world.leads and not job.dry_run:
        _measure(job, directory, labels, held, world)


def _read(
    job: Job,
    options: ClassifyTrainOptions,
    sources: Sequence[Source],
    reader: TextReader,
    world: World,
) -> tuple[Documents, Documents]:
    """(documents to train on, documents held out)."""
    training, held = Documents(), Documents()
    with opened_rejects(job, world, "documents") as rejects:
        for source in sources:
            for batch in source.batches():
                stop.check()
                label_column(batch, options.label, source.name)
                kept: list[tuple[dict[str, Any], Any]] = []
                for row in batch.select(["id", "text", options.label]).to_pylist():
                    try:
                        value = usable(row[options.label], options.regression)
                    except BadData as error:
                        rejects.add(row, str(error), source.name)
                        continue
                    if value is not None:
                        kept.append((row, value))
                rows, owner = reader.read([row["text"] for row, _ in kept])
                for ids, number in zip(rows, owner, strict=True):
                    row, value = kept[number]
                    part = held if is_held_out(job.seed, row["id"]) else training
                    part.ids.append(ids)
                    part.values.append(value)
    return training, held


def make_task(
    job: Job, options: ClassifyTrainOptions, pad_id: int, training: Documents, held: Documents
) -> tuple[Task, Labels]:
    """The training task and its labels; drops held-out documents with labels not in the training.

    Raises BadData where there is nothing to train on.
    """
    if not len(training):
        raise BadData(f"no document with a label (expected values in --label {options.label})")
    labels = labels_of(training.values, options.label, options.regression)
    # the model with a head over the labels in place of its own head
    base = load_spec(options.model)
    config = classifier_config(base.config, labels.names, labels.problem, pad_id)
    spec = with_classifier(base, config | {"classifier_length": options.length})
    if options.length > spec.max_positions:
        raise UsageError(
            f"--length: {options.length} tokens (expected at most the model's {spec.max_positions})"
        )
    known = [n for n, value in enumerate(held.values) if labels.include(value)]
    if len(known) < len(held):
        notes.warn(
            f"{len(held) - len(known):,} held-out documents ignored: labels not in the training"
        )
    held.ids, held.values = ([part[n] for n in known] for part in (held.ids, held.values))
    few_shapes = options.compile
    if job.backend == "torch":  # whose attention is compiled there, again for each shape
        import torch

        few_shapes = few_shapes or torch.cuda.is_available()
    rows = _rows(spec, labels, training, options.class_weights, few_shapes)
    task = Task(
        spec,
        partial(start_params, options.model, spec, job.seed),
        rows,
        _rows(spec, labels, held, "none", few_shapes) if len(held) else None,
        options.model,
        model=options.model,
        loss=partial(classification_loss, problem=labels.problem),
        arrange=lambda order, batch, steps: by_length(order, rows.lengths, batch, steps),
        about={"labels": ", ".join(labels.names), "held out": f"{len(held):,} documents"},
    )
    return task, labels


def _rows(
    spec: ModelSpec, labels: Labels, documents: Documents, weights: str, few_shapes: bool
) -> LabelledRows:
    assert spec.classifier is not None
    return labelled_rows(
        documents.ids,
        labels.encoded(documents.values),
        labels.weights(documents.values, weights),
        spec.classifier.pooling,
        spec.causal,
        few_shapes,
    )


def start_params(
    model: str, spec: ModelSpec, seed: int, lora: LoraConfig | None = None
) -> dict[str, np.ndarray]:
    """The model's own tensors, with new ones for the head unless it has the same labels; lora: see
    model_source.load_arrays."""
    base, params = load_spec(model), load_arrays(model, lora)
    same = base.classifier == spec.classifier
    same &= base.classifier is None or label_names(base.config) == label_names(spec.config)
    return {
        t.name: params[t.name]
        if same or not t.name.startswith("classifier")
        else init_tensor(t, seed)
        for t in spec.tensors()
    }


def _measure(
    job: Job, directory: RunDirectory, labels: Labels, held: Documents, world: World
) -> None:
    backend = job.backend if world.size == 1 else "torch"  # JAX's other processes have ended
    model = ClassifierModel(str(directory.final), backend)
    agreement, figures = labels.figures(held.values, model.scores(held.ids))
    report: dict[str, Any] = {"problem": labels.problem, "held_out": _plain(asdict(agreement))}
    report |= {"labels": [_plain(asdict(label)) for label in figures]}
    write_atomic(directory.path / REPORT, json.dumps(report, indent=1) + "\n")
    if not len(held):
        notes.warn("too few documents to hold any out; nothing is measured")
    _show(job, report, world)


def _plain(figures: dict[str, Any]) -> dict[str, object]:
    """Figures for JSON: null instead of NaN."""
    return {k: None if isinstance(v, float) and np.isnan(v) else v for k, v in figures.items()}


def _show(job: Job, report: Mapping[str, Any], world: World) -> None:
    if not world.leads:
        return
    figures = [(k.replace("_", " "), v) for k, v in report["held_out"].items() if v is not None]
    shown = (f"{k} {v:,}" if isinstance(v, int) else f"{k} {v:.4f}" for k, v in figures)
    notes.note(f"held out: {', '.join(shown)}")
    for label in report["labels"]:
        shown = (f"{k} {v:.3f}" for k, v in label.items() if isinstance(v, float))
        line = f"{label['label']}: {', '.join(shown)} of {label['documents']:,} documents"
        notes.note(f"held out: {line}")
    if job.json:
        print(json.dumps(report), file=sys.stdout)
