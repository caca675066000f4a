"""Rows of a task as items: id, prompt, choices, right answer; templates on rows."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sabia.core.bench.checks.instruction_checks import checks_text
from sabia.core.bench.task import Task
from sabia.core.errors import BadData
from sabia.core.judge.verifiers import check_reference

Row = Mapping[str, Any]
Message = dict[str, str]
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


def item_of(task: Task, row: Row, number: int) -> Item:
    """The only item of a row, such as a few-shot example."""
    (item,) = items_of_row(task, row, number)
    return item


def items_of_row(task: Task, row: Row, number: int) -> list[Item]:
    """The items of a row: one, or one for each element or turn. BadData."""
    try:
        if not isinstance(row, Mapping):
            raise BadData(f"{row!r:.40} (expected an object)")
        if not task.each:
            return _of_turns(task, row, number)
        return [
            replace(item, id=f"{item.id}/{index}")
            for index, element in enumerate(listed(task.each, row), 1)
            for item in _of_turns(task, {**row, "each": element, "each_number": index}, number)
        ]
    except (BadData, KeyError, ValueError) as error:
        name = row.get(task.id, f"row {number}") if isinstance(row, Mapping) else f"row {number}"
        raise BadData(f"{task.name}, item {name}: {error}") from error


def listed(name: str, row: Row) -> Sequence[Any]:
    """The list of one or more that a column or template gives. BadData."""
    given = value(name, row)
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise BadData(f"{name} gives {given!r:.60} (expected a list of one or more)")
    return given


def _of_turns(task: Task, row: Row, number: int) -> list[Item]:
    """The item of a row, or those of its turns."""
    cluster = str(value(task.cluster, row)) if task.cluster else ""
    if not task.turns:
        return [replace(_made(task, row, number), cluster=cluster)]
    turns = [
        _made(task, {**row, "turn": turn, "turn_number": index}, number)
        for index, turn in enumerate(listed(task.turns, row), 1)
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
        given = checks_text(*map(from_json, (names, of_each)))
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
    choices = from_json(choices)
    if not isinstance(choices, list | tuple) or len(choices) < 2:
        reason = "expected a list of two or more, or its JSON"
        raise BadData(f"choices = {task.choices!r:.60} gives {choices!r:.60} ({reason})")
    return tuple(str(choice) for choice in choices)


def from_json(given: object) -> Any:
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
    environment.filters["regex_replace"] = lambda text, old, new: re.sub(old, new, text)
    return environment


def _shuffled(values: Sequence[Any], key: object) -> list[Any]:
    """The values in an order that follows from a key, such as the id of a row."""
    return random.Random(str(key)).sample(list(values), len(values))


def names_of(row: Row) -> dict[str, object]:
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
        return str(_template(template).render(**names_of(row)))
    except (jinja2.TemplateError, TypeError, ArithmeticError) as error:
        raise BadData(f"template {template!r:.60}: {error}") from error


def _evaluated(expression: str, row: Row) -> Any:
    try:
        result = compiled(expression)(**names_of(row))
    except (jinja2.TemplateError, TypeError, ArithmeticError) as error:
        raise BadData(f"template {expression!r:.60}: {error}") from error
    parts = result.values() if isinstance(result, Mapping) else ()
    for part in (result, *parts):
        if isinstance(part, jinja2.Undefined):
            raise BadData(f"template {expression!r:.60}: {part._undefined_message}")
    return result


@lru_cache(maxsize=256)
def compiled(text: str) -> Any:
    """A Jinja expression as a function of its names."""
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
