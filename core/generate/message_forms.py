"""Forms of a conversation that templates read, and whether a template wrote what is in it.

Servers return the arguments of a call as JSON text, some templates write them as they are, others
as JSON, and others go through an object; the content of a message with calls is null or empty; some
templates read content as a list of parts. A template that gets another form fails, writes JSON text
as a quoted string, or writes nothing. `forms` are tried in order, the record's own first, and
`left_out` says what a text lacks.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sabia.core.errors import BadData
from sabia.core.generate.template_engine import END, START, Message, from_json, json_types

REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
Messages = list[dict[str, Any]]
Render = Callable[[Sequence[Message]], str]


def message_of(message: Message) -> dict[str, object]:
    """A message for the template; as in chat records, fields may be null and calls JSON text.

    It has the reasoning under every name that templates read, as in transformers.
    """
    kept = {k: v for k, v in message.items() if v is not None or k == "content"}
    if "tool_calls" in kept:
        kept["tool_calls"] = from_json(kept["tool_calls"], "tool_calls")
    elif "content" in kept and kept["content"] is None:
        kept["content"] = ""
    kept = json_types(kept)
    reasoning = [kept[name] for name in REASONING_NAMES if kept.get(name) is not None]
    if not reasoning:
        return kept
    return {"thinking": reasoning[0], **kept, "reasoning_content": reasoning[0]}


def forms(messages: Sequence[Message]) -> Iterator[Messages]:
    """The messages as in the record, then in other forms, without repeats."""
    record = [message_of(message) for message in messages]
    given = list[Messages]()
    calls = any(message.get("tool_calls") for message in record)
    for parts in (False, True):
        for arguments in (None, _object, _text) if calls else (None,):
            for empty in ((), (None,), ("",)) if calls else ((),):
                form = [_changed(message, parts, arguments, empty) for message in record]
                if form not in given:
                    given.append(form)
                    yield form


def _changed(
    message: dict[str, Any],
    parts: bool,
    arguments: Callable[[Any], Any] | None,
    empty: tuple[str | None, ...],
) -> dict[str, object]:
    changed = dict(message)
    if calls := message.get("tool_calls"):
        if arguments is not None:
            changed["tool_calls"] = [_call(call, arguments=arguments) for call in calls]
        if empty and not message.get("content"):
            changed["content"] = empty[0]
    if parts and isinstance(content := changed.get("content"), str):
        changed["content"] = [{"type": "text", "text": content}]
    return changed


def _call(call: Any, **functions: Callable[[Any], Any]) -> Any:
    """A call with functions applied to fields of its function."""
    inner = _function(call)
    new = inner | {name: f(inner[name]) for name, f in functions.items() if name in inner}
    return {**call, "function": new} if "function" in call else new


def _function(call: object) -> dict[str, object]:
    """The name and arguments of a call, which is written with or without `function`."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise BadData(f"not a tool call: {call!r:.80} (expected an object with a function's name)")
    return dict(inner)


def _object(arguments: object) -> Any:
    """JSON text of an object as the object."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _text(arguments: object) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def left_out(messages: Messages, text: str, render: Render) -> str:
    """What of the messages is not in `text`, their rendered text; "" if nothing.

    Looked for: what users wrote, and the names and arguments of calls. What the assistant wrote
    before may be left out, as templates do with earlier reasoning.
    """
    squeezed = "".join(text.split())
    for number, message in enumerate(messages):
        if message.get("role") == "user" and not written(text_of(message), squeezed):
            return f"the chat template leaves out the content of message {number}"
    if not any(message.get("tool_calls") for message in messages):
        return ""
    return _calls_left_out(messages, render) or _null_as_text(messages, text, render)


def written(content: str, squeezed: str) -> bool:
    """Whether the content is in a text without white space, as it is or as JSON."""
    plain, escaped = "".join(content.split()), "".join(json.dumps(content)[1:-1].split())
    return plain in squeezed or escaped in squeezed


def text_of(message: Message) -> str:
    """The text of a message's content."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content if isinstance(part, Mapping))


def _null_as_text(messages: Messages, text: str, render: Render) -> str:
    """A null content that the template writes as None or null."""
    nulls = [n for n, m in enumerate(messages) if m.get("content", "") is None]
    if not nulls:
        return ""
    try:
        plain = render([m if m.get("content", "") is not None else {**m, "content": ""}
                        for m in messages])  # fmt: skip
    except BadData:
        return ""
    if any(text.count(word) > plain.count(word) for word in ("None", "null")):
        return f"the chat template writes the null content of message {nulls[0]} as text"
    return ""


def _calls_left_out(messages: Messages, render: Render) -> str:
    """The first call that is not in the text: its name is rendered with a mark for its place."""
    numbered = list[tuple[int, dict[str, Any]]]()
    marked = list[dict[str, Any]]()
    for number, message in enumerate(messages):
        calls = []
        for call in message.get("tool_calls") or ():
            mark = f"{START}{len(numbered)}{END}"
            numbered.append((number, _function(call)))
            calls.append(_call(call, name=mark.__add__))
        marked.append({**message, "tool_calls": calls} if calls else message)
    text = render(marked)
    offsets = [text.find(f"{START}{k}{END}") for k in range(len(numbered))]
    for (number, call), offset, after in zip(numbered, offsets, [*offsets[1:], -1], strict=True):
        region = text[offset : after if after > offset else len(text)]
        if offset < 0 or not _has_arguments(region, call.get("arguments")):
            what = "call of" if offset < 0 else "arguments of the call of"
            what += f" {call['name']!r} in message {number}"
            return f"the chat template damages or drops the {what}"
    return ""


def _has_arguments(region: str, arguments: object) -> bool:
    if isinstance(arguments, str):  # not in quotes, nor as the inside of an object
        at = region.find(arguments)
        return at >= 0 and region[at - 1 : at] not in ('"', "{")
    if isinstance(arguments, Mapping) and arguments and repr(arguments) in region:
        return False  # Python's text of an object
    return all(any(form in region for form in spellings) for spellings in _leaves(arguments))


def _leaves(value: object) -> Iterator[tuple[str, ...]]:
    """How each key and each value that is not a container may be written."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(key)
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str):
        escaped = (json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
        yield (value, value.strip(), *escaped, repr(value))
    elif value is not None:  # templates leave out null
        yield (json.dumps(value), str(value))
