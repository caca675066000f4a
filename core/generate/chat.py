"""Chat templates: messages → text → token ids, and the mask of the assistant's tokens.

Templates are rendered as in transformers (Jinja2 in an immutable sandbox, the same options, filters
and globals), so a template from the hub gives the same text. The mask is 1 on what the assistant
writes (content, tool calls, end of turn) and 0 elsewhere, role headers included. It comes from `{%
generation %}` blocks if the template has them, otherwise from prefix differences:
render(messages[:i], add_generation_prompt) must be a prefix of render(messages[:i+1]), which must
be a prefix of the whole text; both are verified. An empty mask is an error, because its loss would
be 0 and look like a good one.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from sabia.core.errors import BadData, UsageError
from sabia.core.text.tokenize.tokenizer import Tokenizer

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | str | None
Span = tuple[int, int]
# Private-use characters around generated text while a template with generation blocks is rendered.
OPEN, CLOSE = "\U0010f8f0", "\U0010f8f1"
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def chat_template(tokenizer: Tokenizer, source: str = "the tokenizer") -> str:
    """The template; raises UsageError, which names the `source` of the tokenizer, without one."""
    if not tokenizer.chat_template:
        raise UsageError(
            f"{source} has no chat template (expected one in chat_template.jinja or "
            "tokenizer_config.json; `sabia sft --tokenizer DIR` trains with another tokenizer's)"
        )
    return tokenizer.chat_template


def render(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    add_generation_prompt: bool = False,
    tools: Tools = None,
    **variables: Any,
) -> str:
    """The conversation as text, by the tokenizer's chat template.

    `tools` are JSON schemas of functions (or their JSON text); `variables` are passed to the
    template (enable_thinking=False, …).
    Raises UsageError without a template, BadData if the template rejects the messages.
    """
    text, _ = _render(messages, tokenizer, add_generation_prompt, tools, variables)
    return text


def render_with_mask(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Tools = None,
    **variables: Any,
) -> tuple[list[int], list[int]]:
    """(ids[T], mask[T]) of a conversation; mask is 1 on what the assistant writes.

    Raises BadData if the assistant wrote nothing, or if the template rewrites earlier turns (it may
    drop old reasoning) and has no generation blocks: `render_rows` splits such conversations.
    """
    text, spans = assistant_spans(messages, tokenizer, tools, **variables)
    return _masked(text, spans, tokenizer)


def render_rows(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Tools = None,
    **variables: Any,
) -> list[tuple[list[int], list[int]]]:
    """`render_with_mask` as one row, or one row per assistant turn if turns are rewritten.

    A row of the second kind ends with its turn and has the mask on that turn alone.
    """
    try:
        return [render_with_mask(messages, tokenizer, tools, **variables)]
    except NotPrefixPreserving:
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    rows = []
    for turn in turns:
        upto = messages[: turn + 1]
        text, _ = _render(upto, tokenizer, False, tools, variables)
        span = _turn_span(messages, turn, text, tokenizer, tools, variables)
        rows.append(_masked(text, [span], tokenizer))
    return rows


class NotPrefixPreserving(BadData):
    """A template that renders the first turns differently when others follow."""


def assistant_spans(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Tools = None,
    **variables: Any,
) -> tuple[str, list[Span]]:
    """(text, half-open character spans of what the assistant writes in it)."""
    text, marked = _render(messages, tokenizer, False, tools, variables)
    if GENERATION_MARK.search(tokenizer.chat_template or ""):
        return text, marked
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    spans = [_turn_span(messages, i, text, tokenizer, tools, variables) for i in turns]
    return text, spans


def _masked(text: str, spans: list[Span], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    spans = [_without_separator(text, span, tokenizer) for span in spans]
    ids, offsets = tokenizer.encode_with_offsets(text)
    mask = [0] * len(ids)
    following = iter(sorted(spans))
    span = next(following, None)
    for i, (start, end) in enumerate(offsets):
        while span is not None and start >= span[1]:
            span = next(following, None)
        if span is None:
            break
        mask[i] = int(max(end, start + 1) > span[0])
    if not any(mask):
        raise BadData(
            "no token of the conversation was written by the assistant (expected an assistant "
            "message with content); the loss would be empty"
        )
    return ids, mask


def _without_separator(text: str, span: Span, tokenizer: Tokenizer) -> Span:
    """Leave out white space after a special end-of-turn token: no model has to write it."""
    start, end = span
    kept = text[start:end].rstrip()
    added = tokenizer.backend.get_added_tokens_decoder()
    special = tuple(token.content for token in added.values() if token.special)
    if kept != text[start:end] and kept.endswith(special):
        return start, start + len(kept)
    return span


def _turn_span(
    messages: Sequence[Message],
    turn: int,
    text: str,
    tokenizer: Tokenizer,
    tools: Tools,
    variables: Mapping[str, Any],
) -> Span:
    """Span of one assistant turn in `text` by prefix difference."""
    before, _ = _render(messages[:turn], tokenizer, True, tools, variables)
    after, _ = _render(messages[: turn + 1], tokenizer, False, tools, variables)
    if not (after.startswith(before) and text.startswith(after)):
        raise NotPrefixPreserving(
            f"the chat template rewrites earlier turns: message {turn} (expected a template whose "
            "text only grows, or one with {% generation %} marks); split into one row a turn"
        )
    return len(before), len(after)


def _render(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    add_generation_prompt: bool,
    tools: Tools,
    variables: Mapping[str, Any],
) -> tuple[str, list[Span]]:
    """(text, spans inside generation blocks)."""
    import jinja2

    names = {**tokenizer.special_tokens, **variables}
    json_messages = [_message(message) for message in messages]
    try:
        framed = _compiled(chat_template(tokenizer)).render(
            messages=json_messages,
            tools=_json_types(_from_json(tools, "tools")) if tools else None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **names,
        )
    except (jinja2.TemplateError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise BadData(f"the chat template rejects the messages: {reason}") from error
    return _unframed(framed)


def _unframed(framed: str) -> tuple[str, list[Span]]:
    """Remove the frame characters: (text, spans that were framed)."""
    if OPEN not in framed:
        return framed, []
    pieces, spans, length = [], [], 0
    for part in re.split(f"({OPEN}[^{CLOSE}]*{CLOSE})", framed):
        inner = part[1:-1] if part.startswith(OPEN) else part
        if part.startswith(OPEN):
            spans.append((length, length + len(inner)))
        pieces.append(inner)
        length += len(inner)
    return "".join(pieces), spans


def _json_types(value: Any) -> Any:
    """A copy in JSON types, without the frame characters."""
    if isinstance(value, str):
        return value.replace(OPEN, "").replace(CLOSE, "")
    if isinstance(value, Mapping):
        return {_json_types(key): _json_types(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_types(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise BadData(f"a message holds {type(value).__name__} (expected JSON types only)")


def _message(message: Message) -> dict[str, Any]:
    """A message for the template; as in chat records, fields may be null and calls JSON text.

    It has the reasoning under every name that templates read, as in transformers.
    """
    kept = {k: v for k, v in message.items() if v is not None or k == "content"}
    if "tool_calls" in kept:
        kept["tool_calls"] = _from_json(kept["tool_calls"], "tool_calls")
    kept = _json_types(kept)
    reasoning = [kept[name] for name in REASONING_NAMES if kept.get(name) is not None]
    if not reasoning:
        return kept
    return {"thinking": reasoning[0], **kept, "reasoning_content": reasoning[0]}


def _from_json(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadData(f"{name} is not JSON: {value!r:.60}") from error


@lru_cache(maxsize=64)
def _compiled(template: str) -> Any:
    """The template in the sandbox that transformers documents for chat templates."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationMarks(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            frame = self.call_method("_framed")
            return jinja2.nodes.CallBlock(frame, [], [], body).set_lineno(line)

        def _framed(self, caller: Any) -> str:
            return OPEN + caller() + CLOSE

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMarks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise BadData(f"not a Jinja template: line {error.lineno} ({error.message})") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)
