"""Proposed tokens of the rows in flight, and who proposes them.

A model checks the proposed tokens of a row in one pass, and keeps those before the first that it
would not have drawn (speculative decoding, arXiv 2211.17192). Samples keep their distribution. Rows
whose logits are changed by what they have (penalties, biases, grammars, tokens that close the
reasoning) get no proposals: they are decoded token by token.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from sabia.core.generate.runner.interface import Logits
from sabia.core.generate.slots import Slots, Waiting


class Proposal(NamedTuple):
    """tokens[n, K] of rows 0..n-1, of which the first counts[n] are proposed. logits: those that
    they were drawn from, [K, n or more, V] on the device; None: the tokens are not drawn."""

    tokens: np.ndarray
    counts: np.ndarray
    logits: Logits


class Drafter(Protocol):
    """What proposes tokens for the rows of a session."""

    def admit(self, group: Sequence[Waiting], which: np.ndarray, first: int) -> None:
        """Rows first.. are now samples of the requests group[which[row - first]]."""

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Rows were copied to others; no row is both source and target."""

    def propose(self, slots: Slots, most: np.ndarray) -> Proposal:
        """At most most[n] tokens after those of each row."""

    def settle(self, kept: np.ndarray) -> None:
        """The rows have got kept[n] of the proposed tokens, and one more."""
