"""Fine-tuning: conversations → a model that answers as the assistant does in them, or preferences →
a model that prefers the chosen answers (`core.recipes.preferences`).

Each conversation is rendered by the tokenizer's chat template; the loss is computed on the
assistant's tokens only. Conversations are packed into rows (`chat_rows`), where positions restart
and none attends to another; those that cannot be used are rejected with a reason.
`core.recipes.training_run` trains.
"""

import contextlib
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sabia.core import notes
from sabia.core.errors import BadData
from sabia.core.generate.chat_variables import template_variables
from sabia.core.generate.model_directory import weights_fingerprint
from sabia.core.generate.template_engine import chat_template
from sabia.core.options.sft import CHATS, PAIRS, SftOptions
from sabia.core.options.training import DISTILL
from sabia.core.recipes import training_config, training_run
from sabia.core.recipes.chat_rows import CHAT, FOLDER, chat_rows
from sabia.core.recipes.distillation.scored_rows import scored_rows
from sabia.core.recipes.embedding_extension import model_for
from sabia.core.recipes.preferences.pair_rows import form_of
from sabia.core.recipes.preferences.preference_run import preference_task, rows_of
from sabia.core.recipes.row_outputs import opened_rejects, warn_of_rejects
from sabia.core.recipes.run_call import RunCall, open_run
from sabia.core.recipes.training_run import Task
from sabia.core.shards.inputs import from_path, open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.token_rows.row_file import RowFile
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.train.distilled_rows import DistilledRows
from sabia.core.train.token_rows import TokenRows


def run(job: Job, options: SftOptions) -> None:
    """Train by the job and the options; raises what its parts raise."""
    directory, world = open_run(job, options)
    options = training_config.with_adapter(options)
    prefers = options.loss in PAIRS
    kind, what = "chat", "conversations"
    if options.loss != CHATS[0]:
        kind, what = ("preference", "preferences") if prefers else ("distillation", "records")
    sources = open_inputs(job, kind)
    model, tokenizer_path = weights_fingerprint(options.model), options.tokenizer or options.model
    flag = "--tokenizer" if options.tokenizer else "--model"
    tokenizer = load_tokenizer(tokenizer_path, flag)
    chat_template(tokenizer, f"{flag}: {tokenizer_path}")
    identity = {
        "command": job.command,
        "inputs": [source.fingerprint() for source in sources],
        "model": model,
        "tokenizer": tokenizer.fingerprint,
        "length": options.length,
        "packed": options.pack,
        "seed": job.seed,
        **training_config.identity(options),
        **training_config.teacher_identity(options),
        **training_config.adapter_identity(options),
        **options.preference(),
    }
    recorded = {} if job.force else directory.recorded_identity()
    if variables := template_variables(options.chat, tokenizer, recorded.get("chat")):
        identity["chat"] = variables
    call = RunCall(job, identity, directory, world)
    if call.already_done():
        return
    spec, load = model_for(tokenizer_path, options.model, training_config.lora_config(options))
    with contextlib.ExitStack() as stack:
        folder = directory.path / FOLDER
        if job.dry_run:  # it writes nothing into the run directory
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        read: Callable[..., RowFile] = partial(
            chat_rows, tokenizer=tokenizer_path, length=options.length, pack=options.pack,
            folder=folder, jobs=job.jobs, variables=variables,
            form=form_of(options.loss) if prefers else CHAT,
        )  # fmt: skip
        if options.loss == DISTILL:
            read = partial(
                scored_rows, fingerprint=tokenizer.fingerprint, vocabulary=spec.vocab_size,
                length=options.length, pack=options.pack, folder=folder,
            )  # fmt: skip
        with opened_rejects(job, world, what) as rejects:
            made = read(sources, reject=rejects.add)
        index = made.index
        count, predicted = index.about["conversations"], index.about["predicted"]
        if not count:
            expected = {
                "chat": "messages with an assistant's answer",
                "preference": "a prompt and "
                + ("chosen, rejected or both" if options.loss == "kto" else "two answers"),
            }.get(kind, "well-formed ones")
            raise BadData(
                f"no usable {what.removesuffix('s')}, {rejects.describe()} (expected {expected})"
            )
        part = "of the answers" if prefers else "the assistant's"
        notes.note(
            f"{count:,} {what} in {len(made):,} rows; {predicted:,} of {index.tokens:,} "
            f"tokens are {part}"
        )
        about = {what: f"{count:,}", "assistant tokens": f"{predicted:,}"}
        validation = None
        if options.validation:
            held_out = from_path(options.validation, kind, "--validation")
            refuse = warn_of_rejects(f"validation {kind}")
            validation = _rows(read(held_out, reject=refuse), options)
    task = Task(
        spec, load, _rows(made, options), validation, tokenizer_path, model=options.model,
        about=about,
    )  # fmt: skip
    if prefers:
        task = preference_task(call, task, options, tokenizer.pad_id)
    training_run.run(call, task, options)


def _rows(file: RowFile, options: SftOptions) -> TokenRows:
    if options.loss == DISTILL:
        return DistilledRows((file,), int(file.index.about["top"]))
    return rows_of(file, options) if options.loss in PAIRS else TokenRows((file,))
