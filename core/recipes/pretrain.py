"""Pretraining: token rows → a model, from scratch or going on from a checkpoint.

Documents in a row do not see each other, and no token is predicted across their edge. The order
of rows, the mix of sources and the schedule are functions of the options alone, so that the same
call ends with the same weights however often it was stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from sabia.core import stop
from sabia.core.errors import UsageError
from sabia.core.generate.local import weights_fingerprint
from sabia.core.recipes import mixture_search, training
from sabia.core.recipes.grown_model import model_for
from sabia.core.recipes.mixture_search import SearchConfig
from sabia.core.recipes.model_source import find_tokenizer, fresh_model
from sabia.core.recipes.rejected import RejectRow, opened_rejects, warn_of_rejects
from sabia.core.recipes.rows_read import row_names, write_read_rows
from sabia.core.recipes.training import Task
from sabia.core.recipes.training_options import TrainOptions
from sabia.core.shards.inputs import from_path, open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.order import DataOrder
from sabia.core.shards.sources import Source
from sabia.core.spec import ModelSpec, extend_context, from_config, load_spec
from sabia.core.text.tokenizer import load_tokenizer
from sabia.core.train.token_rows import COLUMNS, TokenRows, read_token_rows


@dataclass(frozen=True)
class PretrainConfig:
    """The command's own options: a model (one of three ways), tokenizer, mix, validation rows."""

    model: str = ""
    config_json: str = ""
    shape: str = ""
    tokenizer: str = ""
    mix: str = ""
    stages: str = ""
    max_repeat: float = 0.0
    search: SearchConfig | None = None
    context: int = 0
    rope_theta: float = 0.0
    validation: str = ""
    options: TrainOptions = field(default_factory=TrainOptions)

    def __post_init__(self) -> None:
        if self.search and (self.mix or self.stages or self.validation):
            raise UsageError(
                "--search-mix finds a mix: it goes without --mix, --then, --validation"
            )
        if (self.context or self.rope_theta) and not self.model:
            raise UsageError("--context, --rope-theta: without --model (a new model has its own)")
        if sum(bool(x) for x in (self.model, self.config_json, self.shape)) != 1:
            raise UsageError(
                "which model? give one of --model DIR, --config-json FILE and --shape d=…,layers=…"
            )


def run(job: Job, config: PretrainConfig) -> None:
    """Train as the job and the config say; raises what its parts raise."""
    directory, world = training.open_run(job)
    sources = open_inputs(job, "tokens")
    tokenizer = find_tokenizer(config.tokenizer, config.model, sources)
    identity = _identity(job, config, sources, tokenizer)
    if not config.search and training.already_done(job, directory, identity, world):
        return
    with opened_rejects(job, world, "token rows") as rejects:
        rows = read_rows(sources, rejects.add)
    task = _task(job, config, sources, rows, tokenizer)
    if config.search:
        mixture_search.run(job, task, config.options, config.search, identity)
        return
    training.run(job, task, config.options, identity, directory, world)


def _identity(
    job: Job, config: PretrainConfig, sources: Sequence[Source], tokenizer: str
) -> dict[str, Any]:
    return {
        "command": job.command,
        "inputs": [source.fingerprint() for source in sources],
        "model": weights_fingerprint(config.model) if config.model else "",
        "config": dict(load_spec(config.config_json).config) if config.config_json else {},
        "shape": config.shape,
        "tokenizer": load_tokenizer(tokenizer).fingerprint if tokenizer else "",
        "mix": config.mix,
        "stages": config.stages,
        **({"max_repeat": config.max_repeat} if config.max_repeat else {}),
        "context": config.context,
        "rope_theta": config.rope_theta,
        "seed": job.seed,
        **config.options.identity(),
    }


def _task(
    job: Job,
    config: PretrainConfig,
    sources: Sequence[Source],
    rows: TokenRows,
    tokenizer: str,
) -> Task:
    validation = None
    if config.validation:
        held_out = from_path(config.validation, "tokens")
        validation = read_rows(held_out, warn_of_rejects("validation row"))
    length = max(rows.row_length, validation.row_length if validation else 0)
    spec, load = _model(job, config, tokenizer, length)
    names = row_names(sources, rows)
    repeats = config.max_repeat if not config.search else 0.0
    return Task(
        spec,
        load,
        rows,
        validation,
        tokenizer,
        config.mix,
        config.stages,
        config.model,
        names,
        arrange=partial(_limited, repeats) if repeats else None,
    )


def _limited(repeats: float, order: DataOrder, batch: int, steps: int) -> DataOrder:
    """The order with no source read more often than `repeats`."""
    return order.within(repeats, batch * steps)


def _model(
    job: Job, config: PretrainConfig, tokenizer: str, length: int
) -> tuple[ModelSpec, Callable[[], Any]]:
    """(spec, a function that gives its parameters)."""
    if not config.model:
        stds = config.options.initial_stds
        return fresh_model(config.shape, config.config_json, tokenizer, length, job.seed, stds)
    spec, load = model_for(tokenizer, config.model, bool(config.options.lora_rank))
    if config.context:
        spec = _longer(spec, config.context, config.rope_theta)
    return spec, load


def _longer(spec: ModelSpec, context: int, theta: float) -> ModelSpec:
    """The model with a longer context: by the rotary base `theta`, by YaRN where that is 0."""
    stretched = max((rope.original_length for rope in spec.ropes), default=0.0)
    factor = None if theta else context / (stretched or spec.max_positions)
    return from_config(extend_context(spec.config, context, theta or None, factor))


def list_read(job: Job, config: PretrainConfig) -> None:
    """Write which rows the run in -o has read, one a sample, in order; trains nothing."""
    directory, _ = training.open_run(job)
    sources = open_inputs(job, "tokens")
    tokenizer = find_tokenizer(config.tokenizer, config.model, sources)
    directory.finished(_identity(job, config, sources, tokenizer))  # refuses another run's
    rows = read_rows(sources, warn_of_rejects("token row"))
    task = _task(job, config, sources, rows, tokenizer)
    plan = training.make_plan(task, config.options, job.seed)
    write_read_rows(job, directory, rows, plan, row_names(sources, rows))


def read_rows(sources: Sequence[Source], reject: RejectRow) -> TokenRows:
    """All usable rows of token shards."""
    return read_token_rows(_batches(sources, reject))


def _batches(sources: Sequence[Source], reject: RejectRow) -> Iterator[pa.RecordBatch]:
    for source in sources:

        def refuse(row: dict[str, Any], reason: str, name: str = source.name) -> None:
            reject(row, reason, name)

        for batch in source.batches(columns=list(COLUMNS), reject=refuse):
            stop.check()
            yield batch
