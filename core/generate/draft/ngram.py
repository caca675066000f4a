"""Proposals from the tokens of a sample itself: what followed its last tokens before.

The continuation of the latest earlier place that has the same NGRAM tokens (prompt lookup decoding,
github.com/apoorvumang/prompt-lookup-decoding); a place so near that it overlaps goes on with what
was copied from it, as in LZ77.
"""

from collections.abc import Sequence

import numpy as np

from sabia.core.generate.draft.proposal import Proposal
from sabia.core.generate.slots import Slots, Waiting

NGRAM = 3
Places = dict[tuple[int, ...], int]  # an n-gram → the position after its latest place


class _Text:
    """The tokens of a row: those of a prompt, whose places many rows share, and its own."""

    def __init__(self, prompt: list[int], shared: Places) -> None:
        self.tokens, self.shared, self.own = list(prompt), shared, Places()

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. The n-gram at the very end is known once a token follows it."""
        for token in tokens:
            self.own[tuple(self.tokens[-NGRAM:])] = len(self.tokens)
            self.tokens.append(token)

    def next_tokens(self, count: int) -> list[int]:
        """`count` tokens that may follow, or none."""
        last = tuple(self.tokens[-NGRAM:])
        start = self.own.get(last, self.shared.get(last))
        if start is None:
            return []
        period = len(self.tokens) - start
        return [self.tokens[start + i % period] for i in range(count)]


def _places(prompt: Sequence[int]) -> Places:
    ends = range(NGRAM, len(prompt))
    return {tuple(prompt[end - NGRAM : end]): end for end in ends}


class NgramDrafter:
    """See core.generate.draft.proposal.Drafter."""

    def __init__(self) -> None:
        self._texts: list[_Text] = []

    def admit(self, group: Sequence[Waiting], which: np.ndarray, first: int) -> None:
        """See Drafter.admit."""
        prompts = [list(waiting.request.prompt) for waiting in group]
        places = [_places(prompt) for prompt in prompts]
        self._texts[first:] = [_Text(prompts[i], places[i]) for i in which.tolist()]

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """See Drafter.move."""
        for here, there in zip(source.tolist(), target.tolist(), strict=True):
            self._texts[there] = self._texts[here]

    def propose(self, slots: Slots, most: np.ndarray) -> Proposal:
        """See Drafter.propose."""
        tokens = np.zeros((slots.active, int(most.max())), np.int64)
        counts = np.zeros(slots.active, np.int64)
        for row, allowed in enumerate(most.tolist()):
            text = self._texts[row]
            have = len(text.tokens) - int(slots.length[row])
            text.extend(slots.tokens[row, have : slots.drawn[row]].tolist())
            if allowed and (following := text.next_tokens(allowed)):
                tokens[row, : len(following)], counts[row] = following, len(following)
        return Proposal(tokens, counts, None)

    def settle(self, kept: np.ndarray) -> None:
        """See Drafter.settle."""
