"""Make the role names of the chat template single tokens of a newly trained BPE tokenizer.

`assistant` is rare in a corpus, so a small vocabulary would split it at the start of every turn.
After training, merges that join its pieces are appended, and as many of the last trained merges
are removed; the encoding of other text changes only where it used a removed merge.
"""

import json
from itertools import pairwise
from typing import Any

ROLE_WORDS = ("user", "assistant", "system", "tool")


def with_role_words(definition: str, vocab_size: int) -> str:
    """The definition (tokenizer.json) with ROLE_WORDS as tokens, at most `vocab_size` in all.

    It is unchanged where the vocabulary has too few trained merges to remove.
    """
    trained = json.loads(definition)
    vocab, merges = trained["model"]["vocab"], trained["model"]["merges"]
    for dropped in range(len(merges) + 1):
        size = len(vocab) - dropped
        trained["model"]["vocab"] = {token: i for token, i in vocab.items() if i < size}
        trained["model"]["merges"] = merges[: len(merges) - dropped]
        if size + _join_words(trained) <= vocab_size:
            return json.dumps(trained, ensure_ascii=False, indent=2)
    return definition


def _join_words(definition: dict[str, Any]) -> int:
    """Add the merges that make each word one token; returns the number of new tokens."""
    model, before = definition["model"], len(definition["model"]["vocab"])
    for word in ROLE_WORDS:
        pieces = _pieces(word, model["merges"])
        for end in range(1, len(pieces)):
            left = "".join(pieces[:end])
            model["merges"].append([left, pieces[end]])
            model["vocab"].setdefault(left + pieces[end], len(model["vocab"]))
    return len(model["vocab"]) - before


def _pieces(word: str, merges: list[list[str]]) -> list[str]:
    """The pieces of a word after all merges, in their order (the definition of BPE)."""
    rank = {tuple(pair): number for number, pair in enumerate(merges)}
    pieces = list(word)
    while len(pieces) > 1:
        pairs = [(rank.get((a, b), len(rank)), i) for i, (a, b) in enumerate(pairwise(pieces))]
        best, i = min(pairs)
        if best == len(rank):
            break
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return pieces
