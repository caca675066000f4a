"""Options of conversations: variables of the chat template, and a budget of reasoning."""

import json
import re
from datetime import date
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.options.option import choice, integer, needs, text
from sabia.core.options.table import Options

DATE = "date"  # the variable that sets the date of strftime_now
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now")
_NEXT = re.compile(r",(?=\s*[A-Za-z_]\w*\s*=)")


class ChatTemplate(Options, group="Model"):
    """How conversations are rendered."""

    chat: str = text(
        "Variables of the chat template: enable_thinking=false,date=2026-01-31", "KEY=VALUE,…",
        later=True, unset="none",
    )  # fmt: skip
    """A value that is JSON, such as `false` or `3`, has its type; any other is text. `date` is the
    date that the template's `strftime_now` gives, by default that of the first start (UTC). The
    variables are part of the identity of the result."""

    def check(self) -> None:
        """Refuse what is no variable."""
        super().check()
        chat_variables(self.chat)


class Reasoning(Options, group="Generation"):
    """How long a model may reason."""

    thinking_budget: int | None = integer(
        "Maximum tokens of a sample before its reasoning ends", None, least=1, later=True,
        unset="as many as its tokens",
    )  # fmt: skip
    """The chat template must have reasoning between `<think>` and `</think>`, or another pair that
    is known. A sample that does not begin with reasoning has no budget. A server must be `sabia
    serve`, which gets this option and the next as parameters of their names; another one, which
    would ignore them, is refused."""
    thinking_overflow: str = choice(
        "What happens at --thinking-budget: the reasoning is closed, or the sample ends", "close",
        "length", only=needs("thinking_budget"), later=True,
    )  # fmt: skip
    """`close` appends the text that closes the reasoning, and the model goes on with its answer;
    these tokens are not sampled, and no trainer learns them. `length` ends the sample as if it had
    reached its maximum of tokens."""


def chat_variables(given: str) -> dict[str, object]:
    """The variables of --chat by name; raises UsageError.

    A comma separates two variables where a name and = follow it, and belongs to the value
    otherwise.
    """
    variables: dict[str, Any] = {}
    for part in _NEXT.split(given) if given.strip() else ():
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name.isidentifier() or name in RESERVED or name in variables:
            raise UsageError(
                f"--chat: {part.strip()!r} (expected KEY=VALUE, each KEY once and the name of a "
                "variable of the chat template)"
            )
        variables[name] = _value(value)
    if DATE in variables:
        variables[DATE] = _day(str(variables[DATE]))
    return variables


def _value(given: str) -> Any:
    try:
        return json.loads(given)
    except ValueError:
        return given


def _day(given: str) -> str:
    try:
        return date.fromisoformat(given).isoformat()
    except ValueError:
        raise UsageError(f"--chat: date={given} (expected YYYY-MM-DD)") from None
