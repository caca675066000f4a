"""Guides: which tokens of a vocabulary may come next, so that a text fits a grammar in the end.

A token is allowed if the grammar has a text that begins with the bytes so far and the token's, and
if that text can be completed within the tokens that are left, one byte each if need be. A sample
therefore always ends with a text that fits, also at its limit of tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from sabia.core.errors import UsageError
from sabia.core.grammar.automaton import DEAD, Automaton, State
from sabia.core.grammar.nodes import Node

NEVER = np.iinfo(np.uint16).max  # of a shortest rest: the token is not allowed
CACHE_BYTES = 32 << 20  # shortest rests of an automaton's states


class Vocabulary:
    """The bytes of tokens. `tokens`: b"" for one that stands for no text; `opens`: whether a text
    that begins with the token is decoded as its bytes."""

    def __init__(self, tokens: Sequence[bytes], opens: Sequence[bool] | None = None) -> None:
        self.size = len(tokens)
        self.bytes = tokens
        lengths = np.array([len(token) for token in tokens], np.int64)
        order = np.argsort(-lengths, kind="stable")
        self.order = order[: int((lengths > 0).sum())]  # tokens with a text, the longest first
        self.longer = [int((lengths > depth).sum()) for depth in range(int(lengths.max(initial=0)))]
        self.columns = [
            np.array([tokens[i][depth] for i in self.order[:count].tolist()], np.int64)
            for depth, count in enumerate(self.longer)
        ]
        self.available = sum(
            1 << byte for byte in {token[0] for token in tokens if len(token) == 1}
        )
        self.opens = np.ones(self.size, bool) if opens is None else np.asarray(opens, bool)


class Guide:
    """A grammar on a vocabulary; of one thread."""

    def __init__(self, root: Node, vocabulary: Vocabulary, what: str) -> None:
        """Raises UsageError if no text of finite length fits; `what` names the grammar."""
        self.root, self.vocabulary, self.what = root, vocabulary, what
        self.automaton = Automaton(root, vocabulary.available)
        self._needs: OrderedDict[tuple[State, bool], np.ndarray] = OrderedDict()
        self._kept = max(CACHE_BYTES // (2 * max(vocabulary.size, 1)), 8)
        if self.automaton.shortest == float("inf"):
            raise UsageError(f"{what}: no text of finite length fits")
        self.least_tokens = int(self.automaton.shortest)

    def needs(self, state: State, opening: bool) -> np.ndarray:
        """The shortest rest in bytes after each token, uint16[V]; NEVER for those that do not
        fit. opening: the token is the first of the text."""
        key = state, opening
        if key in self._needs:
            self._needs.move_to_end(key)
        else:
            self._needs[key] = self._computed(state, opening)
            if len(self._needs) > self._kept:
                self._needs.popitem(last=False)
        return self._needs[key]

    def _computed(self, state: State, opening: bool) -> np.ndarray:
        automaton, vocabulary = self.automaton, self.vocabulary
        ends = np.full(len(vocabulary.order), automaton.number(state), np.int64)
        for count, column in zip(vocabulary.longer, vocabulary.columns, strict=True):
            alive = np.flatnonzero(ends[:count] != DEAD)
            reached = ends[alive]
            automaton.fill(np.unique(reached).tolist())
            ends[alive] = automaton.table[reached, column[alive]]
        rests = np.minimum(automaton.rests(), NEVER - 1)[ends]
        needs = np.full(vocabulary.size, NEVER, np.uint16)
        needs[vocabulary.order] = np.where(ends == DEAD, NEVER, rests)
        if opening:
            needs[~vocabulary.opens] = NEVER
        return needs


class Walk:
    """The text of one sample so far, in a guide."""

    def __init__(self, guide: Guide) -> None:
        self._guide, self._opening = guide, True
        self._state = guide.automaton.start

    def allowed(self, left: int) -> np.ndarray:
        """Whether each token may come next, bool[V], if `left` tokens can be drawn, this one
        included."""
        return self._guide.needs(self._state, self._opening) < left

    def take(self, token: int) -> None:
        """Add a token that is allowed."""
        state = self._guide.automaton.after(self._state, self._guide.vocabulary.bytes[token])
        assert state is not None, "the token is allowed"
        self._state, self._opening = state, False

    @property
    def accepts(self) -> bool:
        """Whether the text may end here."""
        return self._guide.automaton.accepts(self._state)

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        return self._guide.automaton.complete(self._state)
