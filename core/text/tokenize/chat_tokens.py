"""The words of the chat template's headers as single tokens of a freshly trained BPE.

A corpus seldom holds `assistant`, so a small vocabulary would spell it in pieces at the start of
every turn. After training, merges that join those pieces are added behind all others, and as many
of the rarest trained ones make room; every other text keeps its tokens but for those.
"""

import json
from itertools import pairwise
from typing import Any

ROLE_WORDS = ("user", "assistant", "system", "tool")


def with_role_words(definition: str, vocab_size: int) -> str:
    """The definition (tokenizer.json) of at most `vocab_size` tokens with ROLE_WORDS among them.

    Left as it is where the vocabulary has no trained merges to spare.
    """
    trained = json.loads(definition)
    size = len(trained["model"]["vocab"])
    for dropped in range(len(trained["model"]["merges"]) + 1):
        kept = _without_last(trained, dropped)
        joined = _join_words(kept)
        if size - dropped + joined <= vocab_size:
            return json.dumps(kept, ensure_ascii=False, indent=2)
    return definition


def _without_last(trained: dict[str, Any], count: int) -> dict[str, Any]:
    """A copy without the last `count` merges and the tokens they made."""
    copy = json.loads(json.dumps(trained))
    model = copy["model"]
    size = len(model["vocab"]) - count
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < size}
    model["merges"] = model["merges"][: len(model["merges"]) - count]
    return copy


def _join_words(definition: dict[str, Any]) -> int:
    """Add the merges that make each word one token; returns how many tokens that took."""
    model, before = definition["model"], len(definition["model"]["vocab"])
    for word in ROLE_WORDS:
        pieces = _pieces(word, model["merges"])
        for end in range(1, len(pieces)):
            left = "".join(pieces[:end])
            model["merges"].append([left, pieces[end]])
            model["vocab"].setdefault(left + pieces[end], len(model["vocab"]))
    return len(model["vocab"]) - before


def _pieces(word: str, merges: list[list[str]]) -> list[str]:
    """The word under the merges in their order (the definition of BPE, on one short word)."""
    rank = {tuple(pair): number for number, pair in enumerate(merges)}
    pieces = list(word)
    while len(pieces) > 1:
        pairs = [(rank.get((a, b), len(rank)), i) for i, (a, b) in enumerate(pairwise(pieces))]
        best, i = min(pairs)
        if best == len(rank):
            break
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return pieces
