"""Pretraining: token rows → a model, from scratch or continued from a model directory.

Documents in a row do not attend to each other, and no token is predicted across their boundary. The
order of rows, the mix of sources and the schedule are functions of the options alone, so that the
same call ends with the same weights however often it was interrupted. For the same reason the list
of the samples that a run has read needs no log: the options, the rows and the step of the last
checkpoint determine it. Rows that a guard skipped are marked in it.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core.errors import UsageError
from sabia.core.options.pretrain import PretrainOptions
from sabia.core.recipes import training_config, training_run
from sabia.core.recipes.model_source import find_tokenizer, fresh_model
from sabia.core.recipes.row_outputs import opened_rejects, warn_of_rejects
from sabia.core.recipes.run_call import RunCall, open_run
from sabia.core.recipes.training_run import Task
from sabia.core.shards.inputs import from_path, open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.outputs import open_stdout
from sabia.core.shards.sources import Source
from sabia.core.shards.token_rows.row_file import COLUMNS
from sabia.core.shards.token_rows.row_store import RejectRow, fingerprint, open_row_files
from sabia.core.spec import from_config, load_spec
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.train.checkpoint.reader import latest
from sabia.core.train.run_directory import RunDirectory
from sabia.core.train.token_rows import NameRows, TokenRows, skipped_rows
from sabia.kernels.runtime.cache_folder import writable_cache_folder


def run(job: Job, options: PretrainOptions) -> None:
    """Train by the job and the options; raises what its parts raise."""
    directory, world = open_run(job, options)
    sources = open_inputs(job, "tokens")
    tokenizer = find_tokenizer(options.tokenizer, options.model, sources)
    identity = run_identity(job, options, sources, tokenizer, directory)
    call = RunCall(job, identity, directory, world)
    if not options.search_mix and call.already_done():
        return
    with opened_rejects(job, world, "token rows") as rejects:
        rows = read_rows(job, options, sources, rejects.add)
    task = make_task(job, options, sources, rows, tokenizer)
    if options.search_mix:
        from sabia.core.recipes.mixture import mix_search

        mix_search.run(job, task, options, identity)
        return
    training_run.run(call, task, options)


def run_identity(
    job: Job,
    options: PretrainOptions,
    sources: Sequence[Source],
    tokenizer: str,
    directory: RunDirectory,
) -> dict[str, object]:
    """Everything that decides the weights of a run in a directory. Raises UsageError."""
    path = options.config_json
    if path and not Path(path).exists():
        raise UsageError(
            f"--config-json: {path}: no such file (expected a JSON file; check the path)"
        )
    recorded = directory.recorded_identity()
    if not recorded and options.checkpoint_url and not job.force:
        from sabia.core.train.checkpoint.remote import stored_identity

        recorded = stored_identity(options.checkpoint_url)
    model = ""
    if options.model:
        from sabia.core.generate.model_directory import weights_fingerprint

        model = weights_fingerprint(options.model)
    return {
        "command": job.command,
        "inputs": _fingerprints(sources, recorded.get("inputs")),
        "model": model,
        "config": dict(load_spec(path).config) if path else {},
        "shape": options.shape,
        "tokenizer": load_tokenizer(tokenizer).fingerprint if tokenizer else "",
        "mix": options.mix,
        "stages": options.then,
        **({"max_repeat": options.max_repeat} if options.max_repeat else {}),
        "context": options.context,
        "rope_theta": options.rope_theta,
        "seed": job.seed,
        **training_config.identity(options),
        **training_config.teacher_identity(options),
    }


def make_task(
    job: Job, options: PretrainOptions, sources: Sequence[Source], rows: TokenRows, tokenizer: str
) -> Task:
    """The model and the rows of a run; validation rows are read here."""
    validation = None
    if options.validation:
        held_out = from_path(options.validation, "tokens", "--validation")
        validation = read_rows(job, options, held_out, warn_of_rejects("validation row"))
    length = max(rows.row_length, validation.row_length if validation else 0)
    if options.model:
        from sabia.core.recipes.embedding_extension import model_for

        spec, load = model_for(tokenizer, options.model, training_config.lora_config(options))
        if options.context:
            from sabia.core.spec.extend import extend_context

            # by a larger rotary base if --rope-theta is given, else by YaRN, relative to the length
            # before any earlier extension
            original = max((rope.original_length for rope in spec.ropes), default=0.0)
            theta = options.rope_theta or None
            factor = None if theta else options.context / (original or spec.max_positions)
            spec = from_config(extend_context(spec.config, options.context, theta, factor))
    else:
        spec, load = fresh_model(options, tokenizer, length, job.seed)
    repeats = options.max_repeat if not options.search_mix else 0.0
    return Task(
        spec,
        load,
        rows,
        validation,
        tokenizer,
        options.mix,
        options.then,
        options.model,
        row_names(sources, rows),
        # no source is read more often than `repeats`
        arrange=(lambda order, batch, steps: order.within(repeats, batch * steps))
        if repeats
        else None,
    )


def list_read(job: Job, options: PretrainOptions) -> None:
    """Write the rows that the run in -o has read, one per sample, in order, without training."""
    directory, _ = open_run(job, options)
    sources = open_inputs(job, "tokens")
    tokenizer = find_tokenizer(options.tokenizer, options.model, sources)
    identity = run_identity(job, options, sources, tokenizer, directory)
    directory.finished(identity)  # raises UsageError for another run's
    rows = read_rows(job, options, sources, warn_of_rejects("token row"))
    task = make_task(job, options, sources, rows, tokenizer)
    plan = training_run.make_plan(task, options, job.seed)
    write_read_rows(job, directory, rows, plan, row_names(sources, rows))


def read_rows(
    job: Job, options: PretrainOptions, sources: Sequence[Source], reject: RejectRow
) -> TokenRows:
    """All usable rows of token shards."""
    folder = Path(options.row_cache) if options.row_cache else writable_cache_folder("rows")
    return TokenRows(tuple(open_row_files(sources, folder, job.jobs, reject)))


def _fingerprints(sources: Sequence[Source], recorded: list[str] | None) -> list[str]:
    """The fingerprints of the shards, in the form in which an earlier start recorded them."""
    inputs = [fingerprint(source) for source in sources]
    if recorded is None or recorded == inputs:
        return inputs
    # earlier versions hashed all bytes of a shard, also where it has digests, and read the records
    # beside Arrow shards as shards
    earlier = [source.fingerprint() for source in sources]
    same = recorded[: len(earlier)] == earlier and len(recorded) in (len(earlier), 2 * len(earlier))
    return recorded if same else inputs


READ_ROWS = pa.schema(
    [("step", pa.int64()), ("sample", pa.int64()), ("row", pa.int64()), ("name", pa.string()),
     ("source", pa.string()), ("left_out", pa.bool_())]
)  # fmt: skip
STEPS_AT_A_TIME = 64


def row_names(sources: Sequence[Source], rows: TokenRows) -> NameRows:
    """A function that names rows by shard and id; it reads a shard's ids when it needs them."""

    @cache
    def ids_of(shard: int) -> pa.ChunkedArray:
        batches = sources[shard].batches(columns=["id", *COLUMNS])
        return pa.chunked_array([batch.column("id") for batch in batches], pa.string())

    def name(numbers: Sequence[int]) -> list[str]:
        names = []
        for shard, row in zip(*rows.located(np.array(numbers, np.int64)), strict=True):
            stored = ids_of(int(shard))[int(row)].as_py()
            # a row without an id is named by its number
            names.append(f"{sources[shard].name}:{row if stored is None else stored}")
        return names

    return name


def write_read_rows(
    job: Job, run: RunDirectory, rows: TokenRows, plan: Any, name_rows: NameRows
) -> None:
    """Write one row per sample, for all steps up to the run's last checkpoint, to stdout."""
    newest = latest(run.checkpoints)
    if newest is None:
        raise UsageError(f"{run.path}: no checkpoint (expected a run that has saved one)")
    left_out = {int(entry["row"]) for entry in skipped_rows(run.path)}
    with open_stdout(job, READ_ROWS, {"command": job.command, "run": str(run.path)}) as writer:
        for first in range(0, newest.step, STEPS_AT_A_TIME):
            count = min(STEPS_AT_A_TIME, newest.step - first) * plan.batch_rows
            sample = np.arange(first * plan.batch_rows, first * plan.batch_rows + count)
            numbers = plan.order.rows(int(sample[0]), count)
            columns = {
                "step": sample // plan.batch_rows + 1,
                "sample": sample,
                "row": numbers,
                "name": name_rows(numbers.tolist()),
                "source": [rows.source_names[i] for i in rows.source_of(numbers)],
                "left_out": [int(n) in left_out for n in numbers],
            }
            writer.write(pa.RecordBatch.from_pydict(columns, READ_ROWS))
