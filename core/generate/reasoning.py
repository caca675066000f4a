"""Reasoning apart from the answer, in text of any family that `call_formats` knows.

Reasoning is no part of an answer: neither a right result in it nor a wrong one counts. A text that
ends inside of reasoning has no answer.
"""

import re

from sabia.core.generate.call_formats import FRAMES, REASONING

_CLOSING = {opening: closing for opening, closing, _ in REASONING}
_BY_PROMPT = tuple(closing for _, closing, prompted in REASONING if prompted)
CLOSING = _BY_PROMPT[0]
_MARKS = re.compile("|".join(re.escape(mark) for mark in (*_CLOSING, *_BY_PROMPT)))


def opened_by_prompt(prompt: str) -> str:
    """The text that closes the reasoning that a rendered prompt ends with; '' if there is none."""
    end = prompt.rstrip()
    for opening, closing in _CLOSING.items():
        if end.endswith(opening.rstrip()):
            return closing
    return ""


def closed_unopened(text: str) -> str:
    """What closes reasoning that the text does not open, so that its prompt did; '' else."""
    mark = _MARKS.search(text)
    return mark[0] if mark and mark[0] in _BY_PROMPT else ""


def is_unmarked(text: str) -> bool:
    """Whether nothing in the text opens or closes reasoning."""
    return _MARKS.search(text) is None


def split_reasoning(text: str, closing: str = "") -> tuple[str | None, str]:
    """(the answer, the reasoning) of a sampled text; the answer is None while reasoning is open.

    closing: what closes the reasoning that the prompt has opened (`opened_by_prompt`).
    """
    answer, reasoning, at = list[str](), list[str](), 0
    while True:
        if closing:
            end = text.find(closing, at)
            if end < 0:
                reasoning += [*answer, text[at:]]
                return None, _joined(reasoning)
            reasoning.append(text[at:end])
            at, closing = end + len(closing), ""
            continue
        mark = _MARKS.search(text, at)
        if mark is None:
            break
        answer.append(text[at : mark.start()])
        at, closing = mark.end(), _CLOSING.get(mark[0], "")
        if not closing:  # it closes what the prompt opened
            reasoning, answer = [*reasoning, *answer], []
    if at == 0:
        return FRAMES.sub("", text), ""
    return FRAMES.sub("", "".join([*answer, text[at:]])).strip(), _joined(reasoning)


def _joined(parts: list[str]) -> str:
    return "\n\n".join(part.strip() for part in parts if part.strip())
