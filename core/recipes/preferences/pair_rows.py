"""Preference records as units of documents, which stay together in a row.

A pair is the conversation with the chosen and with the rejected answer. For KTO a record may have
one answer alone, and each has a mismatched one besides: its prompt with an answer of the record
before it (of the first record: of the second), cut off where the row would be too long. So the
estimate of the divergence is a function of the data, whatever is computed together.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sabia.core.errors import BadData
from sabia.core.generate.chat import render_answer
from sabia.core.recipes.chat_rows import Form, Rendered, Unit, document
from sabia.core.shards.records import json_messages
from sabia.core.shards.schemas import ANSWERS
from sabia.core.text.tokenize.tokenizer import Tokenizer

FREE = ("tool_calls", "reasoning_content", "thinking")  # fields of an answer besides its content


def _answers(
    row: Any, tokenizer: Tokenizer, length: int, variables: Mapping[str, Any]
) -> dict[str, Rendered]:
    """The record's answers by name; raises BadData for one that cannot be used."""
    prompt = row["prompt"] or []
    if not prompt or prompt[-1].get("role") == "assistant":
        raise BadData("the prompt does not end with a turn to answer")
    given = [name for name in ANSWERS if row[name] is not None]
    if not given:
        raise BadData("neither a chosen nor a rejected answer")
    turns = {name: _turn(row[name], prompt, name) for name in given}
    bare = [turn | {"content": turn["content"].strip()} for turn in turns.values()]
    if len(given) == 2 and bare[0] == bare[1]:
        raise BadData("the chosen and the rejected answer are equal")
    made: dict[str, Rendered] = {}
    for name, turn in turns.items():
        before = sum(len(ids) for ids, *_ in made.values())
        ids, mask = render_answer([*prompt, turn], tokenizer, **variables)
        if not any(mask[1:]):  # the first token is never predicted
            raise BadData(f"the {name} answer has no token that follows another")
        made[name] = document(ids, mask, row["id"], before)
    if len(given) == 2 and np.array_equal(made["chosen"][0], made["rejected"][0]):
        raise BadData("the chosen and the rejected answer have the same tokens")
    return made


def _turn(answer: str, prompt: list[dict[str, str]], name: str) -> dict[str, str]:
    """The answer as a message: of a text, or of messages, which may begin with those of the prompt.

    Messages are a list of objects with a role, as JSON; raises BadData if they do not end with one
    of the assistant that is all that follows the prompt.
    """
    messages = json_messages(answer)
    if messages is None:
        return {"role": "assistant", "content": answer}
    *lead, last = messages
    before = [(turn.get("role"), turn.get("content")) for turn in prompt]
    if lead and [(turn.get("role"), turn.get("content")) for turn in lead] != before:
        raise BadData(f"the {name} messages have other turns than the prompt before the last one")
    if last["role"] != "assistant":
        raise BadData(
            f"the {name} messages end with the role {last['role']!r} (expected assistant)"
        )
    free = {k: v for k, v in last.items() if v is not None and k in FREE}
    content = str(last.get("content") or "")
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in free.items()}
    return {"role": "assistant", "content": content, **texts}


def _render_pair(
    row: object, tokenizer: Tokenizer, length: int, variables: Mapping[str, Any]
) -> tuple[list[Unit], list[str]]:
    made = _answers(row, tokenizer, length, variables)
    for name in ANSWERS:
        if name not in made:
            raise BadData(f"no {name} answer (expected both; --loss kto trains on single answers)")
    size = sum(len(ids) for ids, *_ in made.values())
    if size > length:
        raise BadData(f"a pair of {size} tokens (expected at most --length {length})")
    return [("", [made[name] for name in ANSWERS])], []


def _render_answers(
    row: object, tokenizer: Tokenizer, length: int, variables: Mapping[str, Any]
) -> tuple[list[Unit], list[str]]:
    made = _answers(row, tokenizer, length, variables)
    shortest = sum(len(ids) for ids, *_ in made.values()) + 1
    shortest += len(_prompt(next(iter(made.values()))))
    if shortest > length:
        raise BadData(
            f"{shortest} tokens of the answers and of a mismatched one (expected at most --length "
            f"{length})"
        )
    return [("pairs" if len(made) == 2 else next(iter(made)), list(made.values()))], []


def _prompt(rendered: Rendered) -> np.ndarray:
    """The ids before the answer."""
    return rendered[0][: int(np.argmax(rendered[1]))]


def _with_mismatched(records: Iterator[list[Unit]], length: int) -> Iterator[Unit]:
    """The units with a mismatched document each; raises BadData if there is one record alone."""
    first, before = next(records, None), None
    if first is None:
        return
    for units in records:
        if before is None:
            yield _mismatched(first[0], units[0], length)
        yield _mismatched(units[0], before or first[0], length)
        before = units[0]
    if before is None:
        raise BadData("a single record (expected two or more: --loss kto compares their answers)")


def _mismatched(unit: Unit, other: Unit, length: int) -> Unit:
    source, documents = unit
    prompt, answer = _prompt(documents[0]), other[1][0]
    limit = length - sum(len(ids) for ids, *_ in documents) - len(prompt)
    ids, mask = (part[len(_prompt(answer)) :][:limit] for part in answer[:2])
    before = documents[-1][3] + len(documents[-1][0])
    joined = np.concatenate([prompt, ids]), np.concatenate([np.zeros(len(prompt), bool), mask])
    return source, [*documents, (*joined, documents[0][2], before)]


COLUMNS = ("id", "prompt", *ANSWERS)
PAIRS = Form("pairs", COLUMNS, _render_pair)
SINGLE = Form("answers", COLUMNS, _render_answers, _with_mismatched)


def form_of(loss: str) -> Form:
    """The form of the rows of a loss."""
    return SINGLE if loss == "kto" else PAIRS
