"""The variables that conversations of a run are rendered with: those of --chat, and the date.

A template that reads the date (strftime_now) would give other tokens on another day, and a run that
is resumed after midnight other rows. Its date is therefore a variable like the others: that of the
first start, in UTC, unless --chat gives one.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.generate.template_engine import reads_date
from sabia.core.options.chat_template import DATE, chat_variables
from sabia.core.text.tokenize.tokenizer import Tokenizer


def template_variables(
    given: str, tokenizer: Tokenizer, recorded: Mapping[str, Any] | None = None
) -> dict[str, object]:
    """The variables of --chat with the date, if the template reads it.

    recorded: the variables of an earlier start of the same run, whose date is kept. Raises
    UsageError for a date that the template does not read.
    """
    variables = chat_variables(given)
    if reads_date(tokenizer):
        today = datetime.now(UTC).date().isoformat()
        return {DATE: (recorded or {}).get(DATE, today), **variables}
    if DATE in variables:
        raise UsageError("--chat: date: the chat template reads no date (it has no strftime_now)")
    return variables


def server_variables(given: str) -> dict[str, object]:
    """Fields of a request that send --chat to a server, as vLLM and SGLang read them."""
    variables = chat_variables(given)
    if DATE in variables:
        raise UsageError("--chat: date: only with a model directory (a server has its own date)")
    return {"chat_template_kwargs": variables} if variables else {}
