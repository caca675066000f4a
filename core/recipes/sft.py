"""Supervised fine-tuning: conversations → a model that answers as the assistant does in them.

Each conversation is rendered by the tokenizer's chat template; the loss is computed on the
assistant's tokens only. Conversations are packed into rows (best fit, in windows), where positions
restart and none attends to another; those that cannot be used are rejected with a reason.
`core.recipes.training_run` trains.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core import notes, stop
from sabia.core.errors import BadData
from sabia.core.generate.chat import render_rows
from sabia.core.generate.model_directory import weights_fingerprint
from sabia.core.options.sft import SftOptions
from sabia.core.recipes import training_config, training_run
from sabia.core.recipes.embedding_extension import model_for
from sabia.core.recipes.rejected_rows import opened_rejects, warn_of_rejects
from sabia.core.recipes.training_run import RunCall, Task
from sabia.core.shards.inputs import from_path, open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.sources import Source
from sabia.core.shards.token_rows.row_store import RejectRow
from sabia.core.text.tokenize.packing import WINDOW, best_fit
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer
from sabia.core.train.token_rows import TokenRows, read_token_rows

Rendered = tuple[list[int], list[int]]
ROWS = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("document_lengths", pa.list_(pa.int32())),
     ("loss_mask", pa.list_(pa.bool_()))]
)  # fmt: skip


def run(job: Job, options: SftOptions) -> None:
    """Train by the job and the options; raises what its parts raise."""
    directory, world = training_run.open_run(job, options)
    sources = open_inputs(job, "chat")
    model, tokenizer_path = weights_fingerprint(options.model), options.tokenizer or options.model
    tokenizer = load_tokenizer(tokenizer_path, "--tokenizer" if options.tokenizer else "--model")
    identity = {
        "command": job.command,
        "inputs": [source.fingerprint() for source in sources],
        "model": model,
        "tokenizer": tokenizer.fingerprint,
        "length": options.length,
        "packed": options.pack,
        "seed": job.seed,
        **training_config.identity(options),
    }
    call = RunCall(job, identity, directory, world)
    if call.already_done():
        return
    spec, load = model_for(tokenizer_path, options.model, bool(options.lora_rank))
    with opened_rejects(job, world, "conversations") as rejects:
        rendered = list(_conversations(sources, tokenizer, options.length, rejects.add))
    if not rendered:
        raise BadData(
            f"no usable conversation, {rejects.count:,} rejected (expected messages with an "
            "assistant's answer that fit into --length)"
        )
    rows = _pack(options, rendered)
    predicted = sum(sum(mask) for _, mask in rendered)
    total = sum(len(ids) for ids, _ in rendered)
    notes.note(
        f"{len(rendered):,} conversations in {len(rows):,} rows; {predicted:,} of {total:,} tokens "
        "are the assistant's"
    )
    about = {"conversations": f"{len(rendered):,}", "assistant tokens": f"{predicted:,}"}
    del rendered  # not needed in the training
    validation = None
    if options.validation:
        held_out = from_path(options.validation, "chat", "--validation")
        refuse = warn_of_rejects("validation conversation")
        validation = _pack(options, _conversations(held_out, tokenizer, options.length, refuse))
    task = Task(spec, load, rows, validation, tokenizer_path, model=options.model, about=about)
    training_run.run(call, task, options)


def _conversations(
    sources: Sequence[Source], tokenizer: Tokenizer, length: int, reject: RejectRow
) -> Iterator[Rendered]:
    """(ids, mask) of each usable conversation, in order."""
    for source in sources:

        def refuse(row: dict[str, Any], reason: str, name: str = source.name) -> None:
            reject(row, reason, name)

        for batch in source.batches(columns=["messages", "tools"], reject=refuse):
            stop.check()
            for row in batch.to_pylist():
                try:
                    rendered = render_rows(row["messages"], tokenizer, row["tools"])
                except BadData as error:
                    refuse(row, str(error))
                    continue
                for ids, mask in rendered:
                    if len(ids) > length:
                        refuse(row, f"{len(ids)} tokens (expected at most --length {length})")
                    elif not any(mask[1:]):  # the first token is never predicted
                        refuse(row, "no token of the assistant follows another")
                    else:
                        yield ids, mask


def _pack(options: SftOptions, rendered: Iterator[Rendered] | list[Rendered]) -> TokenRows:
    """Token rows of the conversations: packed, or one per row."""
    return read_token_rows(_packed(list(rendered), options.length, options.pack))


def _packed(rendered: list[Rendered], length: int, packed: bool) -> Iterator[pa.RecordBatch]:
    """The rows of each window of conversations; `bins`: the conversations of each row."""
    for start in range(0, len(rendered), WINDOW):
        window = rendered[start : start + WINDOW]
        sizes = [len(ids) for ids, _ in window]
        bins = best_fit(sizes, length) if packed else [[i] for i in range(len(window))]
        columns = {
            "input_ids": [np.concatenate([window[i][0] for i in one]) for one in bins],
            "document_lengths": [[sizes[i] for i in one] for one in bins],
            "loss_mask": [np.concatenate([window[i][1] for i in one]) > 0 for one in bins],
        }
        yield pa.RecordBatch.from_pydict(columns, schema=ROWS)
