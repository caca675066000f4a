"""The interface between the scheduler of a session and a device.

A runner holds the cache of the rows in flight and computes with the model's present parameters; the
scheduler decides which rows there are. What goes in and comes out are NumPy arrays; logits and the
results of prompts stay on the device, where they may have more rows than were asked for (JAX pads
rows and contexts, so that few programs are compiled).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np

from sabia.core.generate.pages import Begun, Kept
from sabia.core.generate.requests import Echo, Ranked
from sabia.core.generate.sampling import RowParams
from sabia.core.ops.base import Ops
from sabia.core.spec import ModelSpec

ECHO_POSITIONS = 512  # of a prompt, whose logits are computed together
Logits = Any  # fp32 [rows or more, V] on the device


class Model(Protocol):
    """What is run; the parameters may be replaced between two calls of a runner."""

    spec: ModelSpec
    params: dict[str, Any]
    tokenizer: Any
    ops: Ops


class Prefilled(NamedTuple):
    """Prompts that have been run. logits: of the last token of each; hidden[P, T, D], the cache and
    the states to keep are the runner's own."""

    logits: Logits
    hidden: Any
    cache: Any
    states: Any
    lengths: np.ndarray  # tokens of each prompt
    adapters: np.ndarray  # number of the adapter of each


class Drawn(NamedTuple):
    """tokens[B], their log-probabilities in the distribution drawn from, and in the model's own."""

    tokens: np.ndarray
    logprobs: np.ndarray
    raw: np.ndarray


class Runner(Protocol):
    """A model on one device, with a cache of `capacity` rows of `context` positions, and pages."""

    def computing(self) -> AbstractContextManager[Any]:
        """The context in which all other methods are called."""

    def prefill(
        self, prompts: Sequence[Sequence[int]], begun: Sequence[Begun], adapters: Sequence[str]
    ) -> Prefilled:
        """Run prompts after what of them is in pages, each with the adapter of that name ('':
        none)."""

    def keep(self, prefilled: Prefilled | None, kept: Kept) -> None:
        """Copy parts of prompts to pages; None: of the rows of the cache, without states."""

    def admit(self, prefilled: Prefilled, which: np.ndarray, first: int) -> None:
        """Copy the keys, values and states of prompts which[B] to rows first..first + B."""

    def step(self, ids: np.ndarray, positions: np.ndarray) -> Logits:
        """Write tokens ids[n, T] of rows 0..n-1 at positions[n, T]; the logits after them, in the
        order of the rows [n·T, V]. T is 1 for a model whose layers keep their window only."""

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy rows of the cache; no row is both source and target."""

    def draw(
        self,
        logits: Logits,
        which: np.ndarray | None,
        params: RowParams,
        uniform: np.ndarray,
        bias: np.ndarray | None,
    ) -> Drawn:
        """One draw from logits[which[b]] (None: from the first B) for each row b of `params`, with
        uniform[B]. bias[B, V] is added to the logits, but not for `raw`."""

    def likeliest(self, logits: Logits, which: np.ndarray, count: int) -> list[Ranked]:
        """The `count` likeliest tokens of logits[which[b]] with their log-probabilities at
        temperature 1, in descending order."""

    def echo(self, prefilled: Prefilled, row: int, prompt: Sequence[int], ranked: int) -> Echo:
        """The log-probabilities of a prompt that was run from its start, and the `ranked`
        likeliest tokens at each position (0: none)."""
