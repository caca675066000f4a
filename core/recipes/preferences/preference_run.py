"""`sft` with a loss of preferences: the task of a training run from rows of pairs."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sabia.core import notes
from sabia.core.errors import UsageError
from sabia.core.options.sft import SftOptions
from sabia.core.recipes.classifier.fine_tuning import start_params
from sabia.core.recipes.preferences.reference import FOLDER, with_reference
from sabia.core.recipes.run_call import RunCall
from sabia.core.recipes.training_config import lora_config
from sabia.core.recipes.training_run import Task
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
