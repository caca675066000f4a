"""What the recipes that answer prompt records share: conversations, answers, and rows of chat
records, which keep the other columns of the prompt records."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa

from sabia.core.errors import BadData, UsageError
from sabia.core.generate.calls import ChatResponse
from sabia.core.generate.message_forms import message_of
from sabia.core.generate.reasoning import split_reasoning
from sabia.core.generate.template_engine import from_json
from sabia.core.options.rewrite import RewriteOptions
from sabia.core.shards import schemas
from sabia.core.shards.columns import unified
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import ShardContext
from sabia.core.text.rewrite.model_engine import BATCHES_AHEAD

OF_DOCUMENTS = ("on_unfaithful", "text_column")
PROMPT = schemas.KINDS["prompt"]
COLUMNS = ("tools", "meta", "rubric", "answer")  # of the chat record as of the prompt record
SCHEMA = pa.schema([*schemas.KINDS["chat"], PROMPT.field("rubric"), PROMPT.field("answer")])
Row = tuple[int, dict[str, Any]]  # (number of the prompt record in its batch, new row)
Asked = TypeVar("Asked")


@dataclass(frozen=True)
class Answer:
    """The text of a response without reasoning, and why it cannot be used ('' if it can)."""

    text: str
    reasoning: str
    response: ChatResponse
    reason: str = field(default="")


def check_options(options: RewriteOptions, recipe: str) -> None:
    """Raise UsageError for what prompt records do not have, and for an engine without a model."""
    if options.engine == "rules":
        raise UsageError(
            f"--engine rules: recipe {recipe} asks a model (expected --engine endpoint or local)"
        )
    if unused := [name for name in OF_DOCUMENTS if name in options.given]:
        flag = unused[0].replace("_", "-")
        raise UsageError(f"--{flag}: only for documents (recipe {recipe} reads prompts)")


def prompt_sources(job: Job, schema: pa.Schema) -> tuple[list[Any], pa.Schema]:
    """The job's prompt records, and the schema with the columns that are only in them."""
    sources = unified(open_inputs(job, "prompt", once=True), kind="prompt")
    there = sources[0].schema if sources else PROMPT
    extras = [one for one in there if one.name not in {*PROMPT.names, *schema.names}]
    return sources, pa.schema([*schema, *extras])


def conversation(record: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages of a prompt record, and its tools as fields of a request; raises BadData."""
    messages = [message_of(message) for message in record["messages"] or ()]
    if not messages or messages[-1].get("role") == "assistant":
        raise BadData("the conversation does not end with a turn to answer")
    return messages, {"tools": from_json(record["tools"], "tools")} if record["tools"] else {}


def in_batches(
    batches: Iterator[pa.RecordBatch],
    context: ShardContext,
    recipe: str,
    ask: Callable[[int, Mapping[str, Any]], Asked],
    submit: Callable[[pa.RecordBatch, Sequence[Asked]], Callable[[], pa.RecordBatch]],
) -> Iterator[pa.RecordBatch]:
    """The rows that `submit` makes of each batch, with up to BATCHES_AHEAD batches requested in
    advance. A record that `ask` cannot use is rejected."""
    pending: deque[Callable[[], pa.RecordBatch]] = deque()
    for batch in batches:
        prompts = []
        for number, record in enumerate(batch.to_pylist()):
            try:
                prompts.append(ask(number, record))
            except BadData as error:
                context.reject(record, f"{recipe}: {error}")
        pending.append(submit(batch, prompts))
        if len(pending) > BATCHES_AHEAD:
            yield pending.popleft()()
    while pending:
        yield pending.popleft()()


def answer_of(response: ChatResponse) -> Answer:
    """What a response answers, and why it cannot be used."""
    text, reasoning = split_reasoning(response.text or "")
    given = response.message.get("reasoning_content")
    reasoning = given if isinstance(given, str) else reasoning
    try:
        f"{text or ''}{reasoning}".encode()
    except UnicodeEncodeError:
        return Answer("", "", response, "not valid Unicode")
    reason = response.error or ""
    if not reason and response.message.get("tool_calls"):
        reason = "calls a tool"
    if not reason and response.finish_reason not in ("stop", None):
        reason = f"cut short (finish reason {response.finish_reason})"
    if not reason and not (text or "").strip():
        reason = "empty"
    return Answer(text or "", reasoning, response, reason)


def answered(record: Mapping[str, Any], text: str, reasoning: str = "") -> dict[str, object]:
    """The columns of a chat record in which the assistant answers with `text`."""
    turn = {"role": "assistant", "content": text, "reasoning_content": reasoning or None}
    columns = {name: record[name] for name in COLUMNS}
    return {**columns, "id": record["id"], "messages": [*record["messages"], turn]}


def with_columns_of(
    batch: pa.RecordBatch, rows: Sequence[Row], own: pa.Schema, schema: pa.Schema
) -> pa.RecordBatch:
    """The rows, which have the columns of `own`, with those of the schema that are of their prompt
    records."""
    made = pa.RecordBatch.from_pylist([row for _, row in rows], schema=own)
    numbers = pa.array([number for number, _ in rows], pa.int64())
    for one in schema:
        if one.name not in own.names:
            made = made.append_column(one, batch.column(one.name).take(numbers))
    return made
