"""Rows of a task as items: id, prompt with its few-shot examples, choices, right answer.

Few-shot examples come from `shots_data`, or are the first rows of the data, which are then not
evaluated; sampled ones are drawn for each item from the pool without the item itself. Ids must be
unique, because models are compared item by item.
"""

import csv
import io
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

from sabia.core.bench.checks.instruction_checks import checks_text
from sabia.core.bench.task import Task
from sabia.core.digests import parquet_at
from sabia.core.errors import BadData, UsageError
from sabia.core.files import unreadable
from sabia.core.judge.verifiers import check_reference
from sabia.core.shards.json_lines import decompressed

Row = Mapping[str, Any]
Message = dict[str, str]
_PATTERN = re.compile(r"[*?\[]")
_EXPRESSION = re.compile(r"\s*\{\{((?:(?!\{\{|\}\}).)*)\}\}\s*", re.DOTALL)


@dataclass(frozen=True)
class Item:
    """One item. A prompt is `text`, or `messages` for the chat template; the other is empty.

    answer: the index of the right choice, or the reference answer. fields: the row itself.
    cluster: what it has in common with other items; '' if it is independent of them. conversation:
    the id of the row whose turn it is, where each turn is an item; messages are the user's up to
    this turn. further: the user's later turns, where all are one item.
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
    conversation: str = ""
    further: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    gold: Any = field(default=None, compare=False)
    query: str = ""

    @property
    def question(self) -> str:
        """The prompt as text for a report."""
        return self.text or "\n\n".join(f"[{m['role']}] {m['content']}" for m in self.asked)

    @property
    def asked(self) -> list[Message]:
        """The messages and the user's later turns."""
        return [*self.messages, *({"role": "user", "content": text} for text in self.further)]

    @property
    def as_messages(self) -> list[Message]:
        """The prompt as a conversation."""
        return self.asked or [{"role": "user", "content": self.text}]


def by_context(item: Item) -> list[tuple[str, list[str]]]:
    """The pairs of an item as contexts, each with its continuations in turn."""
    parts: list[tuple[str, list[str]]] = []
    for context, text in item.pairs:
        if not parts or parts[-1][0] != context:
            parts.append((context, []))
        parts[-1][1].append(text)
    return parts


def units_of(items: Sequence[Item]) -> int:
    """The number of conversations and single items."""
    return len({item.conversation or item.id for item in items})


def part_of(items: Sequence[Item], index: int, count: int) -> list[Item]:
    """Every `count`th item from number `index` on; the turns of a conversation stay together."""
    numbers: dict[str, int] = {}
    for item in items:
        numbers.setdefault(item.conversation or item.id, len(numbers))
    return [item for item in items if numbers[item.conversation or item.id] % count == index]


def question_of(item: Item) -> str:
    """The prompt; of a conversation all messages but the system's, of a YAML task its query."""
    if item.query:
        return item.query
    turns = [m["content"] for m in item.messages if m["role"] != "system"]
    return item.text or "\n".join(turns)


def load_items(task: Task, limit: int = 0, seed: int = 0) -> list[Item]:
    """The items of a TOML task, at most `limit` or the task's own limit.

    Raises UsageError for a missing file, BadData for rows that do not give what the task names.
    """
    rows = _rows_of(task, task.data)
    pool, rows = _shots(task, rows)
    items = [item for number, row in enumerate(rows) for item in _items(task, row, number)]
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
    """Rows of a Parquet, CSV, JSON (an array, or one object) or JSON lines file (also .gz, .zst).

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
        try:
            text = decompressed(file).read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadData(f"{path}: not UTF-8 ({error})") from error
    if path.suffix == ".csv":
        csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))  # of the whole process
        return list(csv.DictReader(io.StringIO(text, newline="")))
    try:
        if text.lstrip()[:1] == "[":
            return list(json.loads(text))
        if path.suffix == ".json" and text.lstrip()[:1] == "{":
            with suppress(ValueError):  # else rows under this name
                return [json.loads(text)]
        # not splitlines(): it would also split at U+2028 inside strings
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise BadData(f"{path}: not JSON ({error})") from error


def _files(task: Task, name: str) -> list[Path]:
    """The files of a path, whose last parts may be a pattern. UsageError."""
    path = task.resolve(name)
    if not _PATTERN.search(name):
        return [path]
    fixed = [part for part in path.parts if not _PATTERN.search(part)]
    first = next(i for i, part in enumerate(path.parts) if _PATTERN.search(part))
    folder = Path(*fixed[:first])
    files = sorted(folder.glob(str(Path(*path.parts[first:]))))
    if not files:
        raise UsageError(f"task {task.name}: no file {path}")
    return files


def _with_joined(task: Task, rows: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """The rows of a file with what is joined to each as a column. UsageError, BadData."""
    other = path.parent / task.joined
    other = other if other.exists() else path.parent / other.name
    joined = read_rows(other, f"task {task.name}: joined")
    if not task.joined_on:
        whole = joined[0] if len(joined) == 1 else joined
        return [row | {"joined": whole} for row in rows]
    by_key = {str(value(task.joined_on, row)): row for row in joined}
    keys = [str(value(task.joined_on, row)) for row in rows]
    if missing := [key for key in keys if key not in by_key]:
        raise BadData(f"{task.name}: {other}: no row with {task.joined_on} {missing[0]!r}")
    return [row | {"joined": by_key[key]} for row, key in zip(rows, keys, strict=True)]


def _rows_of(task: Task, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in _files(task, name):
        read = read_rows(path, f"task {task.name}")
        rows += _with_joined(task, read, path) if task.joined else read
    if not task.where:
        return rows
    try:
        keep = _environment().compile_expression(task.where, undefined_to_none=False)
        return [row for row in rows if keep(**_names(row))]
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
    """The only item of a row, such as a few-shot example."""
    (item,) = _items(task, row, number)
    return item


def _items(task: Task, row: Row, number: int) -> list[Item]:
    """The items of a row: one, or one for each element or turn. BadData."""
    try:
        if not isinstance(row, Mapping):
            raise BadData(f"{row!r:.40} (expected an object)")
        if not task.each:
            return _of_turns(task, row, number)
        items = []
        for index, element in enumerate(_list(task.each, row), 1):
            part = {**row, "each": element, "each_number": index}
            for item in _of_turns(task, part, number):
                items.append(replace(item, id=f"{item.id}/{index}"))
        return items
    except (BadData, KeyError, ValueError) as error:
        name = row.get(task.id, f"row {number}") if isinstance(row, Mapping) else f"row {number}"
        raise BadData(f"{task.name}, item {name}: {error}") from error


def _list(name: str, row: Row) -> Sequence[Any]:
    listed = value(name, row)
    if isinstance(listed, str) or not isinstance(listed, Sequence) or not listed:
        raise BadData(f"{name} gives {listed!r:.60} (expected a list of one or more)")
    return listed


def _of_turns(task: Task, row: Row, number: int) -> list[Item]:
    """The item of a row, or those of its turns."""
    cluster = str(value(task.cluster, row)) if task.cluster else ""
    if not task.turns:
        return [replace(_made(task, row, number), cluster=cluster)]
    turns = [
        _made(task, {**row, "turn": turn, "turn_number": index}, number)
        for index, turn in enumerate(_list(task.turns, row), 1)
    ]
    asked = [item.messages[-1]["content"] for item in turns]
    first = turns[0]
    if task.graded == "conversation":
        return [replace(first, further=tuple(asked[1:]), cluster=cluster)]
    users = [{"role": "user", "content": text} for text in asked]
    return [
        replace(item, id=f"{first.id}/{index}", messages=(*first.messages[:-1], *users[:index]),
                conversation=first.id, cluster=cluster or first.id)
        for index, item in enumerate(turns, 1)
    ]  # fmt: skip


def _made(task: Task, row: Row, number: int) -> Item:
    name = str(value(task.id, row)) if task.id in row or "{" in task.id else f"{number}"
    if task.kind == "perplexity":
        return Item(name, text=str(value(task.text, row)), fields=row)
    choices = _choices(task, row)
    given = None if task.kind == "rubric" or task.checks else value(task.answer, row)
    if task.checks:
        names = value(task.checks, row)
        of_each = value(task.check_arguments, row) if task.check_arguments else [{} for _ in names]
        given = checks_text(*map(_from_json, (names, of_each)))
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
        messages.insert(0, {"role": "system", "content": render(task.system, row)})
    return Item(name, "", tuple(messages), choices, answer, row)


def _choices(task: Task, row: Row) -> tuple[str, ...]:
    if task.kind != "multiple_choice":
        return ()
    choices = task.choices if isinstance(task.choices, tuple) else value(task.choices, row)
    choices = _from_json(choices)
    if not isinstance(choices, list | tuple) or len(choices) < 2:
        reason = "expected a list of two or more, or its JSON"
        raise BadData(f"choices = {task.choices!r:.60} gives {choices!r:.60} ({reason})")
    return tuple(str(choice) for choice in choices)


def _from_json(given: object) -> Any:
    """What a text says in JSON; anything else as it is."""
    if isinstance(given, str):
        with suppress(ValueError):
            return json.loads(given)
    return given


def choice_index(given: object, choices: Sequence[str]) -> int:
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


def _not_null(value: object) -> Any:
    """What a template puts into a text; a null would become the word None."""
    if value is None:
        raise jinja2.UndefinedError("a value of the template is null")
    return value


@lru_cache(maxsize=1)
def _environment() -> Any:
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False,
        finalize=_not_null,
    )  # fmt: skip
    environment.filters["shuffled"] = _shuffled
    environment.filters["regex_escape"] = re.escape
    return environment


def _shuffled(values: Sequence[Any], key: object) -> list[Any]:
    """The values in an order that follows from a key, such as the id of a row."""
    return random.Random(str(key)).sample(list(values), len(values))


def _names(row: Row) -> dict[str, object]:
    """The names of a template: the columns, and the row itself, whose columns may be no names."""
    return {"row": row, **row}


@lru_cache(maxsize=256)
def _template(text: str) -> Any:
    try:
        return _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise BadData(f"not a Jinja template: {text!r:.60} ({error.message})") from error


def render(template: str, row: Row) -> str:
    """A template with the columns of a row; raises BadData for an undefined name."""
    try:
        return str(_template(template).render(**_names(row)))
    except jinja2.TemplateError as error:
        raise BadData(f"template {template!r:.60}: {error}") from error


def _evaluated(expression: str, row: Row) -> Any:
    try:
        result = _expression(expression)(**_names(row))
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
