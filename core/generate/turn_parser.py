"""From sampled text to a message: content, reasoning and tool calls.

The text is read by the formats of all known families (`call_formats`), and a reading counts only if
the chat template writes it back: rendered as the last message, it must give the sampled text, up to
white space, and without reasoning that the template leaves out. Otherwise the whole text is the
content, so no text is lost.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sabia.core.errors import BadData
from sabia.core.generate.call_formats import FRAMES, REASONING, Types, split_calls
from sabia.core.generate.chat import turn_text
from sabia.core.generate.template_engine import Message, Tools, from_json
from sabia.core.text.tokenize.tokenizer import Tokenizer


def parse_turn(
    text: str,
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Tools = None,
    **variables: Any,
) -> dict[str, Any]:
    """The message that a sampled `text` (with its special tokens) answers `messages` with.

    It has `role`, `content`, and `reasoning_content` and `tool_calls` where the text has them.
    """
    special, types = tokenizer.special_texts, _types(tools)
    sampled = _without_end(text, special)
    for reasoning, rest, closing in _reasoned(text):
        readable = {_squeezed(sampled)}
        if closing and closing in (tokenizer.chat_template or ""):  # which may leave it out
            readable.add(_squeezed(_without_end(rest, special)))
        for content, calls in _called(rest, types, special):
            message = _message(content, reasoning, calls)
            if message == {"role": "assistant", "content": sampled}:
                return message  # the text as it is
            try:
                written = turn_text([*messages, message], tokenizer, tools, **variables)
            except BadData:
                continue
            if _squeezed(_without_end(written, special)) in readable:
                return message
    return {"role": "assistant", "content": sampled}


def _reasoned(text: str) -> Iterator[tuple[str, str, str]]:
    """(reasoning, the rest, what closed it) by each format that the text has, then by none."""
    for opening, closing, prompted in REASONING:
        before, opened, inside = text.partition(opening)
        if not opened:
            before, inside = "", text if prompted else ""
        reasoning, closed, rest = inside.partition(closing)
        if closed and not before.strip():
            yield reasoning.strip(), rest, closing
    yield "", text, ""


def _called(
    rest: str, types: Types, special: tuple[str, ...]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(content, tool calls) of what follows the reasoning."""
    for text in (rest, _without_end(rest, special)):
        if (split := split_calls(text, types)) is not None:
            content, calls = split
            yield (
                _without_end(FRAMES.sub("", content), special).strip(),
                [
                    {"type": "function", "function": {"name": name, "arguments": arguments}}
                    for name, arguments in calls
                ],
            )
            break
    yield _without_end(FRAMES.sub("", rest), special).strip(), []


def _message(content: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, object]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if calls else {})


def _without_end(text: str, special: tuple[str, ...]) -> str:
    """The text without special tokens and white space at its end."""
    text = text.rstrip()
    while special and text.endswith(special):
        text = text.removesuffix(max((s for s in special if text.endswith(s)), key=len)).rstrip()
    return text


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _types(tools: Tools) -> dict[str, dict[str, str]]:
    """Tool → parameter → type in its JSON schema."""
    types = {}
    for tool in from_json(tools, "tools") or ():
        function = tool.get("function", tool)
        properties = (function.get("parameters") or {}).get("properties") or {}
        types[function.get("name")] = {
            name: schema["type"]
            for name, schema in properties.items()
            if isinstance(schema, Mapping) and isinstance(schema.get("type"), str)
        }
    return types
