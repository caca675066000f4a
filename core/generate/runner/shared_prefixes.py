"""Rows in flight whose prompts begin with the same tokens, such as samples of one prompt.

Attention over what they share is a product of matrices that reads keys and values once for all of
them (Hydragen, arXiv 2402.05099, section 3).
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from sabia.core.generate.prefixes import common_length
from sabia.kernels.attention.torch_cached import SharedSlots

LEAST_SHARED = 32  # tokens of a prefix
LEAST_SAVED = 256  # keys that are not read again
_LEAD = 2  # numbers before the tokens
_Best = tuple[int, list[tuple[list[int], int]]]  # keys not read again, (rows, shared tokens)


class SharedPrefixes:
    """The prompts of rows, and which of them share a beginning."""

    def __init__(self) -> None:
        self._prompts: list[bytes] = []  # of each row: what else keys depend on, and its tokens
        self._shared: tuple[int, list[SharedSlots]] | None = None  # of so many rows

    def admit(
        self, prompts: Sequence[Sequence[int]], first: int, version: int, adapters: np.ndarray
    ) -> None:
        """Rows first.. have these prompts, run with weights of a version and adapters[B]."""
        self._prompts[first:] = [
            np.array([version, number, *prompt], np.int32).tobytes()
            for number, prompt in zip(adapters.tolist(), prompts, strict=True)
        ]
        self._shared = None

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Rows `target` become what rows `source` are."""
        for one, other in zip(source.tolist(), target.tolist(), strict=True):
            self._prompts[other] = self._prompts[one]
        self._shared = None

    def of(self, rows: int) -> list[SharedSlots]:
        """The groups of the first rows; no row is in two."""
        if self._shared is None or self._shared[0] != rows:
            groups = _groups(self._prompts[:rows])
            self._shared = rows, [SharedSlots.of(sorted(group), slots) for group, slots in groups]
        return self._shared[1]


def _groups(prompts: Sequence[bytes]) -> list[tuple[list[int], int]]:
    """(numbers of prompts, the tokens at the beginning that all of them have) where that pays."""
    order = sorted(range(len(prompts)), key=prompts.__getitem__)
    common = [_common(prompts[a], prompts[b]) for a, b in pairwise(order)]

    def best(first: int, last: int) -> _Best:
        """Of order[first:last]: as one group, or cut where neighbours share least."""
        if last - first < 2:
            return 0, []
        between = common[first : last - 1]
        least = min(between)
        cuts = [first, *(first + 1 + i for i, n in enumerate(between) if n == least), last]
        parts = [best(*ends) for ends in pairwise(cuts)]
        saved, groups = sum(part[0] for part in parts), [g for part in parts for g in part[1]]
        whole = least * (last - first - 1) if least >= LEAST_SHARED else 0
        if whole < max(saved, LEAST_SAVED):
            return saved, groups
        return whole, [(order[first:last], least)]

    return best(0, len(order))[1]


def _common(one: bytes, other: bytes) -> int:
    """The number of tokens at the beginning that two prompts share, with the same weights."""
    a, b = (np.frombuffer(text, np.int32) for text in (one, other))
    return max(common_length(a, b), _LEAD) - _LEAD
