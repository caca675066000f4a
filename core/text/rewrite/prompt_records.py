"""What the recipes that answer prompt records share: conversations, answers, and rows of chat
records, which keep the other columns of the prompt records."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from sabia.core.errors import BadData, UsageError
from sabia.core.generate.calls import ChatResponse
from sabia.core.generate.message_forms import message_of
from sabia.core.generate.opened import cost_so_far, open_budget
from sabia.core.generate.reasoning import split_reasoning
from sabia.core.generate.template_engine import from_json
from sabia.core.judge.opened_judges import judges_identity, note_calls, open_panel
from sabia.core.judge.panel import Panel
from sabia.core.options.rewrite import RewriteOptions
from sabia.core.shards import schemas
from sabia.core.shards.columns import unified
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import ShardContext
from sabia.core.text.rewrite.model_engine import Answers, in_advance, open_answers
from sabia.core.text.rewrite.rewrite_recipe import AnyRecipe

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


class Asker(Protocol):
    """Asks models what a recipe says about prompt records, and makes rows of the answers."""

    base: str
    own: pa.Schema

    def prompt(self, number: int, record: Mapping[str, Any]) -> Any:
        """What is asked about a record, the number of which is that in its batch; raises BadData if
        it cannot be used."""

    def submit(self, prompts: Sequence[Any]) -> Any:
        """Start the requests; what is returned waits for the answers."""

    def rows(self, prompts: Sequence[Any], collect: Any, context: ShardContext) -> list[Row]:
        """Wait for the answers, and make rows of those that are used."""


def check_options(options: RewriteOptions, recipe: str) -> None:
    """Raise UsageError for what prompt records do not have, and for an engine without a model."""
    if options.engine == "rules":
        raise UsageError(
            f"--engine rules: recipe {recipe} asks a model (expected --engine endpoint or local)"
        )
    if unused := [name for name in OF_DOCUMENTS if name in options.given]:
        flag = unused[0].replace("_", "-")
        raise UsageError(f"--{flag}: only for documents (recipe {recipe} reads prompts)")


@contextmanager
def one_model(
    job: Job, options: RewriteOptions, recipe: AnyRecipe, calls: str
) -> Iterator[tuple[Answers, Panel | None, str, Callable[[], str]]]:
    """The model of a recipe, its judges, what its outputs depend on, and the cost so far. calls:
    what those of the model are called in the note at the end."""
    budget = open_budget(options, job, options.max_tokens)
    with (
        closing(open_answers(options, budget)) as answers,
        open_panel(options, budget) as panel,
    ):
        salt = f"{recipe.digest} {judges_identity(options)} {answers.fingerprint}".rstrip()
        spenders = [one for one in (answers.client, panel) if one is not None]
        yield answers, panel, salt, partial(cost_so_far, spenders)
        if answers.client is not None and not job.dry_run:
            note_calls(calls, answers.client)


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


def answered_shard(
    batches: Iterator[pa.RecordBatch], context: ShardContext, asker: Asker, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows that are made of a shard of prompt records, which have the columns of `asker.own`,
    with those of the schema that are of their prompt records: a transform for `run_map`. A record
    that cannot be used is rejected."""

    def submit(batch: pa.RecordBatch) -> Callable[[], pa.RecordBatch]:
        prompts = []
        for number, record in enumerate(batch.to_pylist()):
            try:
                prompts.append(asker.prompt(number, record))
            except BadData as error:
                context.reject(record, f"{asker.base}: {error}")
        collect = asker.submit(prompts)
        return lambda: finish(batch, asker.rows(prompts, collect, context))

    def finish(batch: pa.RecordBatch, rows: Sequence[Row]) -> pa.RecordBatch:
        made = pa.RecordBatch.from_pylist([row for _, row in rows], schema=asker.own)
        numbers = pa.array([number for number, _ in rows], pa.int64())
        for one in schema:
            if one.name not in asker.own.names:
                made = made.append_column(one, batch.column(one.name).take(numbers))
        return made

    return in_advance(submit(batch) for batch in batches)


def usable(
    sources: Sequence[Any], columns: Sequence[str], prompt: Callable[[int, Any], Asked]
) -> Iterator[Asked]:
    """What is asked about the records of sources that can be used, for an estimate."""
    for source in sources:
        for batch in source.batches(columns=columns):
            for record in batch.to_pylist():
                with suppress(BadData):
                    yield prompt(0, record)


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
