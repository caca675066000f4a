"""Chat templates in the Jinja sandbox of transformers: messages in JSON types → text.

The options, filters and globals are those of transformers, so a template from the hub gives the
same text. `strftime_now` gives the date of the variable `date`, at midnight, so that a text does
not depend on when it is rendered; without one it gives the time.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from functools import lru_cache
from typing import Any

from sabia.core.errors import BadData, UsageError
from sabia.core.options.chat_template import DATE
from sabia.core.text.tokenize.tokenizer import Tokenizer

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | str | None
Span = tuple[int, int]
# Private-use characters around generated text while a template with generation blocks is rendered,
# and around a part of a message whose position in the text is looked for.
OPEN, CLOSE, START, END = "\U0010f8f0", "\U0010f8f1", "\U0010f8f2", "\U0010f8f3"
MARKS = re.compile(f"[{OPEN}{CLOSE}{START}{END}]")


def chat_template(tokenizer: Tokenizer, source: str = "the tokenizer") -> str:
    """The template; raises UsageError, which names the `source` of the tokenizer, without one."""
    if not tokenizer.chat_template:
        raise UsageError(
            f"{source} has no chat template (expected one in chat_template.jinja or "
            "tokenizer_config.json; `sabia sft --tokenizer DIR` trains with another tokenizer's)"
        )
    return tokenizer.chat_template


def reads_date(tokenizer: Tokenizer) -> bool:
    """Whether the texts of the template depend on the date."""
    return "strftime_now" in (tokenizer.chat_template or "")


def rendered(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    add_generation_prompt: bool,
    tools: Tools,
    variables: Mapping[str, Any],
) -> tuple[str, list[Span]]:
    """(text, spans inside generation blocks) of messages in JSON types.

    Raises UsageError without a template, BadData if the template rejects the messages.
    """
    import jinja2

    names = {**tokenizer.special_tokens, **variables}
    if day := names.pop(DATE, None):
        midnight = datetime.combine(date.fromisoformat(day), datetime.min.time())
        names["strftime_now"] = midnight.strftime
    try:
        framed = _compiled(chat_template(tokenizer)).render(
            messages=messages,
            tools=json_types(from_json(tools, "tools")) if tools else None,
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


def json_types(value: object) -> Any:
    """A copy in JSON types, without the private-use characters."""
    if isinstance(value, str):
        return MARKS.sub("", value)
    if isinstance(value, Mapping):
        return {json_types(key): json_types(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_types(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise BadData(f"a message holds {type(value).__name__} (expected JSON types only)")


def from_json(value: object, name: str) -> Any:
    """The value of a JSON text, and anything else as it is; raises BadData."""
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

        def parse(self, parser: jinja2.parser.Parser) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            frame = self.call_method("_framed")
            return jinja2.nodes.CallBlock(frame, [], [], body).set_lineno(line)

        def _framed(self, caller: Callable[[], str]) -> str:
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
    value: object,
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
