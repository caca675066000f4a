"""`sft` with a loss of preferences: the task of a training run from rows of pairs.

The log-probabilities of the starting model are computed once, in Parquet in the run directory.
`reference/KEY-NNNNN.parquet` has those of the documents of a part of the rows; KEY is a hash of
what decides them (the model, the rows, the precision), so that a later start computes only missing
parts. The model is the one that the run begins with, before any checkpoint is loaded; with adapters
these are included as they are at the start.
"""

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core import notes, stop
from sabia.core.digests import parquet_at
from sabia.core.errors import BadData, Interrupted, UsageError
from sabia.core.options.sft import SftOptions
from sabia.core.parallel.health import watchdog
from sabia.core.parallel.process_group import agree
from sabia.core.recipes.classifier.fine_tuning import start_params
from sabia.core.recipes.run_call import RunCall
from sabia.core.recipes.training_config import lora_config
from sabia.core.recipes.training_run import Task
from sabia.core.shards.outputs import open_file
from sabia.core.shards.token_rows.row_file import RowFile
from sabia.core.spec import ModelSpec
from sabia.core.spec.families import with_classifier
from sabia.core.spec.model import check_predicts, classifier_config
from sabia.core.train.losses.preference import WITH_REFERENCE, PreferenceLoss, preference_loss
from sabia.core.train.preference_objective import PreferenceObjective
from sabia.core.train.preference_rows import PreferenceBatches, PreferenceRows
from sabia.core.train.token_rows import RowSource, TokenRows

REWARD = "reward"  # the loss, and the name of the score


def loss_settings(options: SftOptions) -> PreferenceLoss:
    """The settings of the loss."""
    assert options.beta is not None, "every loss has a default"
    return PreferenceLoss(
        options.loss,
        options.beta,
        options.label_smoothing,
        options.length_norm,
        options.nll,
        options.margin,
        options.undesirable_weight,
    )


def rows_of(file: RowFile, options: SftOptions) -> PreferenceRows:
    """The rows of a row file of pairs."""
    return PreferenceRows((file,), int(file.index.about["most"]), options.loss == REWARD)


def reward_spec(spec: ModelSpec, pad_id: int | None) -> ModelSpec:
    """The model with a head of one score in place of its own; raises UsageError for an encoder."""
    check_predicts(spec)
    if spec.classifier is not None:
        return spec
    config = classifier_config(spec.config, (REWARD,), "regression", pad_id)
    return with_classifier(spec, config)


def preference_task(call: RunCall, task: Task, options: SftOptions, pad_id: int | None) -> Task:
    """The task with the loss of the options; its rows and validation rows are PreferenceRows."""
    settings, seed = loss_settings(options), call.job.seed
    changes: dict[str, Any] = {
        "loss": partial(preference_loss, options=settings),
        "prepare": partial(_prepare, call, settings, options.precision),
    }
    if options.loss == REWARD:
        if options.tokenizer:
            raise UsageError("--tokenizer: with --loss reward (expected the model's own)")
        spec = reward_spec(task.spec, pad_id)
        load = partial(start_params, options.model, spec, seed, lora_config(options))
        changes |= {"spec": spec, "load_params": load}
    else:
        check_predicts(task.spec)
    return replace(task, **changes)


def _prepare(
    call: RunCall, settings: PreferenceLoss, precision: str, source: RowSource,
    validation: TokenRows | None,
) -> PreferenceObjective:  # fmt: skip
    """Add to the source what the loss needs; the figures of the run."""
    if source.stepper.no_sharing:
        notes.note(f"a prompt is computed with each of its answers: {source.stepper.no_sharing}")
    batches = PreferenceBatches(settings, source.stepper, call.world)
    if settings.kind in WITH_REFERENCE:
        held = [rows for rows in (source.rows, validation) if rows is not None]
        made = [_referenced(rows, call, precision, source, batches) for rows in held]
        source.rows = made[0]
        validation = made[1] if len(made) > 1 else None
    source.complete = batches.complete
    return PreferenceObjective(source, validation)


def _referenced(
    rows: TokenRows, call: RunCall, precision: str, source: RowSource, batches: PreferenceBatches
) -> PreferenceRows:
    assert isinstance(rows, PreferenceRows), "rows_of has made them"
    identity = {
        "model": call.identity["model"],
        "adapters": call.identity.get("adapters", ""),
        "rows": Path(rows.files[0].name).name,
        "precision": precision,
    }
    if base := call.identity.get("lora_base"):
        identity["lora_base"] = base
    folder = call.directory.path / FOLDER
    return with_reference(rows, source, batches, folder, identity, call.job.backend)


FOLDER = "reference"
PART = 4096  # rows of a file
SCHEMA = pa.schema([("row", pa.int64()), ("document", pa.int32()), ("logprob", pa.float32())])


def with_reference(
    rows: PreferenceRows, source: RowSource, batches: PreferenceBatches, folder: Path,
    identity: Mapping[str, Any], backend: str,
) -> PreferenceRows:  # fmt: skip
    """The rows with the log-probabilities of their documents; `source.stepper` holds the model.

    identity: what decides them. Raises Interrupted after a stop signal; finished parts are kept.
    """
    key = hashlib.blake2b(repr(sorted(identity.items())).encode(), digest_size=16).hexdigest()
    world, parts = batches.world, -(-len(rows) // PART)
    logprobs = np.zeros((len(rows), rows.most), np.float32)
    missing = []
    for part in range(parts):
        path = folder / f"{key}-{part:05d}.parquet"
        stored = _read(path, part, logprobs)
        if not agree(world, backend, stored):
            missing.append((part, path))
    if missing:
        count = sum(min(len(rows), (part + 1) * PART) - part * PART for part, _ in missing)
        notes.note(f"log-probabilities of the starting model: {count:,} rows → {folder}")
    for part, path in missing:
        numbers = np.arange(part * PART, min(len(rows), (part + 1) * PART))
        for start in range(0, len(numbers), source.batch_rows):
            watchdog.enter_phase(0, "computing the reference")
            if not agree(world, backend, not stop.requested()):
                raise Interrupted("stopped while the reference was computed: run again to resume")
            some = numbers[start : start + source.batch_rows]
            logprobs[some] = _computed(some, rows, source, batches)
        if world.leads:
            _write(path, numbers, logprobs[numbers], identity)
    return replace(rows, reference=logprobs)


def _computed(
    numbers: np.ndarray, rows: PreferenceRows, source: RowSource, batches: PreferenceBatches
) -> np.ndarray:
    """Log-probabilities [n, D] of some rows, with all processes."""
    size = source.batch_rows
    padded = np.resize(numbers, size)  # a batch is always of one size
    batch = source.read(rows, padded)
    batch = batches.with_slots(batch, size, source.stepper.row_part)
    made = np.asarray(source.stepper.evaluate(batch).extras["documents"], np.float32)
    return made[: len(numbers)]


def _read(path: Path, part: int, logprobs: np.ndarray) -> bool:
    """Whether the part is there; its log-probabilities are put into `logprobs`."""
    if not path.exists():
        return False
    with contextlib.suppress(BadData), parquet_at(path) as file:
        table = file.read()
        row, document = (table[name].to_numpy() for name in ("row", "document"))
        if len(row) == len(logprobs[part * PART : (part + 1) * PART]) * logprobs.shape[1]:
            logprobs[row, document] = table["logprob"].to_numpy()
            return True
    notes.warn(f"{path}: damaged; it is computed again")
    return False


def _write(path: Path, numbers: np.ndarray, made: np.ndarray, identity: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    documents = made.shape[1]
    columns = [
        pa.array(np.repeat(numbers, documents)),
        pa.array(np.tile(np.arange(documents, dtype=np.int32), len(numbers))),
        pa.array(made.ravel()),
    ]
    made_by = {"command": "sft", "kind": "any", **identity}
    with open_file(str(path), SCHEMA, made_by) as file:
        file.write(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
