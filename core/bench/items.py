"""Rows of a task as items: id, prompt with its few-shot examples, choices, right answer.

Few-shot examples come from `shots_data`, or are the first rows of the data, which are then not
evaluated; sampled ones are drawn for each item from the pool without the item itself. Ids must be
unique, because models are compared item by item.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sabia.core.bench.instruction_checks import checks_text
from sabia.core.bench.task import Task
from sabia.core.digests import parquet_at
from sabia.core.errors import BadData, UsageError
from sabia.core.files import unreadable
from sabia.core.judge.verifiers import check_reference
from sabia.core.shards.json_lines import decompressed

Row = Mapping[str, Any]
Message = dict[str, str]
_EXPRESSION = re.compile(r"\s*\{\{((?:(?!\{\{|\}\}).)*)\}\}\s*", re.DOTALL)


@dataclass(frozen=True)
class Item:
    """One item. A prompt is `text`, or `messages` for the chat template; the other is empty.

    answer: the index of the right choice, or the reference answer. fields: the row itself.
    cluster: what it has in common with other items; '' if it is independent of them.
    Of YAML tasks: pairs (context, continuation) to score, what the file gives as the answer (gold),
    and the text by which contamination is found (query).
    """

    id: str
    text: str = ""
    messages: tuple[Message, ...] = ()
    choices: tuple[str, ...] = ()
    answer: int | str | None = None
    fields: Row = field(default_factory=dict, compare=False)
    cluster: str = ""
    pairs: tuple[tuple[str, str], ...] = ()
    gold: Any = field(default=None, compare=False)
    query: str = ""

    @property
    def question(self) -> str:
        """The prompt as text for a report."""
        return self.text or "\n\n".join(f"[{m['role']}] {m['content']}" for m in self.messages)

    @property
    def as_messages(self) -> list[Message]:
        """The prompt as a conversation."""
        return list(self.messages) or [{"role": "user", "content": self.text}]


def by_context(item: Item) -> list[tuple[str, list[str]]]:
    """The pairs of an item as contexts, each with its continuations in turn."""
    parts: list[tuple[str, list[str]]] = []
    for context, text in item.pairs:
        if not parts or parts[-1][0] != context:
            parts.append((context, []))
        parts[-1][1].append(text)
    return parts


def load_items(task: Task, limit: int = 0, seed: int = 0) -> list[Item]:
    """The items of a TOML task, at most `limit` or the task's own limit.

    Raises UsageError for a missing file, BadData for rows that do not give what the task names.
    """
    rows = _rows_of(task, task.data)
    pool, rows = _shots(task, rows)
    items = [_item(task, row, number) for number, row in enumerate(rows)]
    ids: set[str] = set()
    for item in items:
        if item.id in ids:
            reason = f"two items have the id {item.id!r}; models are compared by id"
            raise BadData(f"{task.name}: {reason}")
        ids.add(item.id)
    cut = min(filter(None, (limit, task.limit)), default=len(items))
    items = items[:cut]
    if not items:
        raise BadData(f"{task.name}: no item in {task.data} (after where and few-shot examples)")
    return [_with_shots(task, item, pool, seed) for item in items]


def read_rows(path: Path, named: str) -> list[dict[str, Any]]:
    """Rows of a Parquet, JSON (an array) or JSON lines file (also .gz, .zst).

    `named` says what names the file: an option, or a key of a task.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise unreadable(named, path, error) from error
    if path.suffix == ".parquet":
        with parquet_at(path) as file:
            return file.read().to_pylist()
    with path.open("rb") as file:
        text = decompressed(file).read().decode("utf-8-sig")
    try:
        if text.lstrip()[:1] == "[":
            return list(json.loads(text))
        # not splitlines(): it would also split at U+2028 inside strings
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise BadData(f"{path}: not JSON ({error})") from error


def _rows_of(task: Task, name: str) -> list[dict[str, Any]]:
    rows = read_rows(task.resolve(name), f"task {task.name}")
    if not task.where:
        return rows
    try:
        keep = _environment().compile_expression(task.where, undefined_to_none=False)
        return [row for row in rows if keep(**row)]
    except jinja2.TemplateError as error:
        raise UsageError(f"{task.name}: where {task.where!r}: {error}") from error


def _shots(task: Task, rows: list[dict[str, Any]]) -> tuple[list[Item], list[dict[str, Any]]]:
    """(pool of examples, rows left to evaluate)."""
    if not task.shots:
        return [], rows
    shared = not task.shots_data
    source = rows if shared else _rows_of(task, task.shots_data)
    first = None if task.shots_sampler == "random" else task.shots
    pool = [_item(task, row, number) for number, row in enumerate(source[:first])]
    if first and len(pool) < first:
        raise BadData(f"{task.name}: {len(pool)} rows for {task.shots} few-shot examples")
    return pool, rows[first:] if first and shared else rows


def _item(task: Task, row: Row, number: int) -> Item:
    try:
        item = _made(task, row, number)
        return replace(item, cluster=str(value(task.cluster, row))) if task.cluster else item
    except (BadData, KeyError, ValueError) as error:
        name = row.get(task.id, f"row {number}") if isinstance(row, Mapping) else f"row {number}"
        raise BadData(f"{task.name}, item {name}: {error}") from error


def _made(task: Task, row: Row, number: int) -> Item:
    if not isinstance(row, Mapping):
        raise BadData(f"{row!r:.40} (expected an object)")
    name = str(value(task.id, row)) if task.id in row or "{" in task.id else f"{number}"
    if task.kind == "perplexity":
        return Item(name, text=str(value(task.text, row)), fields=row)
    choices = _choices(task, row)
    given = None if task.kind == "rubric" or task.checks else value(task.answer, row)
    if task.checks:
        names = value(task.checks, row)
        of_each = value(task.check_arguments, row) if task.check_arguments else [{} for _ in names]
        given = checks_text(names, of_each)
    if task.kind == "exact_match" and given is None:
        raise BadData(f"no answer in column {task.answer!r}")
    if task.verifier == "code":
        given = given if isinstance(given, str) else json.dumps(given)
        check_reference("code", given)
    answer = choice_index(given, choices) if choices else None if given is None else str(given)
    if task.prompt:
        text = render(task.prompt, row)
        if not task.chat:
            return Item(name, text, (), choices, answer, row)
        messages = [{"role": "user", "content": text}]
    elif row.get("messages"):
        turns = row["messages"]
        messages = [{"role": m["role"], "content": m.get("content") or ""} for m in turns]
    else:
        raise BadData("no prompt in the task and no messages in the row")
    if task.system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": task.system})
    return Item(name, "", tuple(messages), choices, answer, row)


def _choices(task: Task, row: Row) -> tuple[str, ...]:
    if task.kind != "multiple_choice":
        return ()
    choices = task.choices if isinstance(task.choices, tuple) else value(task.choices, row)
    if isinstance(choices, str):
        with suppress(ValueError):
            choices = json.loads(choices)
    if not isinstance(choices, list | tuple) or len(choices) < 2:
        reason = "expected a list of two or more, or its JSON"
        raise BadData(f"choices = {task.choices!r:.60} gives {choices!r:.60} ({reason})")
    return tuple(str(choice) for choice in choices)


def choice_index(given: Any, choices: Sequence[str]) -> int:
    """The index of a choice from a 0-based number, its text, or its letter."""
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(choices):
        return given
    text = str(given)
    if text in choices:
        return list(choices).index(text)
    if text.isdecimal() and int(text) < len(choices):
        return int(text)
    letter = text.strip().upper()
    if len(letter) == 1 and 0 <= ord(letter) - ord("A") < len(choices):
        return ord(letter) - ord("A")
    raise BadData(f"answer {given!r:.60} is none of {len(choices)} choices (index, letter or text)")


def value(name: str, row: Row) -> Any:
    """The column `name` of a row, the value of a template that is one expression, or the text of
    another template."""
    if name in row:
        return row[name]
    if expression := _EXPRESSION.fullmatch(name):
        return _evaluated(expression[1], row)
    if "{{" in name or "{%" in name:
        return render(name, row)
    raise BadData(f"no column {name!r} among {', '.join(map(str, row))}")


@lru_cache(maxsize=1)
def _environment() -> Any:
    return ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False
    )


@lru_cache(maxsize=256)
def _template(text: str) -> Any:
    try:
        return _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise BadData(f"not a Jinja template: {text!r:.60} ({error.message})") from error


def render(template: str, row: Row) -> str:
    """A template with the columns of a row; raises BadData for an undefined name."""
    try:
        return str(_template(template).render(**row))
    except jinja2.TemplateError as error:
        raise BadData(f"template {template!r:.60}: {error}") from error


def _evaluated(expression: str, row: Row) -> Any:
    try:
        result = _expression(expression)(**row)
    except jinja2.TemplateError as error:
        raise BadData(f"template {expression!r:.60}: {error}") from error
    if isinstance(result, jinja2.Undefined):
        raise BadData(f"template {expression!r:.60}: {result._undefined_message}")
    return result


@lru_cache(maxsize=256)
def _expression(text: str) -> Any:
    return _environment().compile_expression(text, undefined_to_none=False)


def target_text(task: Task, item: Item) -> str:
    """The answer of a few-shot example as text."""
    if task.target:
        return render(task.target, item.fields)
    if isinstance(item.answer, int):
        return item.choices[item.answer]
    if item.answer is None:
        raise BadData(f"{task.name}: example {item.id} has no answer (name one with target)")
    return item.answer


def _with_shots(task: Task, item: Item, pool: Sequence[Item], seed: int) -> Item:
    if not task.shots:
        return item if item.messages else replace(item, text=task.system + item.text)
    shots = list(pool)
    if task.shots_sampler == "random":
        others = [shot for shot in pool if shot.id != item.id]
        if len(others) < task.shots:
            raise BadData(f"{task.name}: {len(others)} rows for {task.shots} few-shot examples")
        shots = random.Random(f"{seed} {task.name} {item.id}").sample(others, task.shots)
    if not item.messages:
        shown = (s.text + task.delimiter + target_text(task, s) + task.separator for s in shots)
        return replace(item, text=task.system + "".join(shown) + item.text)
    system = tuple(m for m in item.messages[:1] if m["role"] == "system")
    turns: list[Message] = []
    for shot in shots:
        turns += [turn for turn in shot.messages if turn["role"] != "system"]
        turns.append({"role": "assistant", "content": target_text(task, shot)})
    return replace(item, messages=(*system, *turns, *item.messages[len(system) :]))
