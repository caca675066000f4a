"""Replies of a server that end inside of reasoning which their prompt has opened.

A reply does not show the prompt, so a text without marks of reasoning is either an answer or
reasoning that was never closed. What tells them apart is the reply to one short question, asked
only where replies leave it open: it closes reasoning that it did not open if the server's template
opens it. A server that takes reasoning out of the text gives it in a field of the message, and some
of them give a text that was cut before the end of its reasoning as an answer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sabia.core.generate.calls import ChatRequest, ChatResponse
from sabia.core.generate.message_forms import REASONING_NAMES
from sabia.core.generate.reasoning import CLOSING, closed_unopened, is_unmarked
from sabia.core.generate.requests import LENGTH

QUESTION = ({"role": "user", "content": "Reply with the word yes."},)
TOKENS = 1_024  # of the reply


def reasoning_of(reply: ChatResponse) -> str:
    """The reasoning that a server has taken out of the text."""
    return str(next(filter(None, map(reply.message.get, REASONING_NAMES)), ""))


def closings(
    replies: Sequence[ChatResponse],
    extra: Mapping[str, Any],
    ask: Callable[[ChatRequest], ChatResponse],
) -> list[str]:
    """What would close the reasoning that each reply ends in; '' for answers and for texts with
    marks of reasoning, which tell themselves.

    extra: fields of the requests. ask: gives the reply to a question.
    """
    unmarked = [bool(r.text) and is_unmarked(r.text or "") and not reasoning_of(r) for r in replies]
    cut = [reply.finish_reason == LENGTH for reply in replies]
    closed = next(filter(None, (closed_unopened(reply.text or "") for reply in replies)), "")
    suspects = [a and (b or bool(closed)) for a, b in zip(unmarked, cut, strict=True)]
    if not any(suspects):
        return [""] * len(replies)
    probe = ask(ChatRequest(QUESTION, TOKENS, extra=extra))
    if opened := closed_unopened(probe.text or ""):
        return [opened if suspect else "" for suspect in suspects]
    if reasoning_of(probe):
        closed = CLOSING
    elif probe.text and probe.finish_reason != LENGTH:  # the prompt opens none
        closed = ""
    return [closed if a and b else "" for a, b in zip(suspects, cut, strict=True)]
