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
from sabia.core.ops.base import Ops, Params
from sabia.core.parallel.split_interface import SplitModel
from sabia.core.spec import ModelSpec

ECHO_POSITIONS = 512  # of a prompt, whose logits are computed together
Logits = Any  # fp32 [rows or more, V] on the device


class Model(Protocol):
    """What is run; the parameters may be replaced between two calls of a runner."""

    spec: ModelSpec
    cached: ModelSpec  # the same, with the heads whose keys, values and states are cached here
    split: SplitModel | None
    params: dict[str, Any]
    tokenizer: Any
    ops: Ops

    def prepared(self) -> Params:
        """The parameters, as `Ops.prepared` gives them; called again when they were replaced."""


class Prefilled(NamedTuple):
    """Prompts that have been run. logits: of the last token of each; hidden[P, T, D], the cache and
    the states to keep are the runner's own."""

    logits: Logits
    hidden: Any
    cache: Any
    states: Any
    lengths: np.ndarray  # tokens of each prompt
    adapters: np.ndarray  # number of the adapter of each
    prompts: Sequence[Sequence[int]] = ()


class Drawn(NamedTuple):
    """tokens[B], their log-probabilities in the distribution drawn from, and in the model's own."""

    tokens: np.ndarray
    logprobs: np.ndarray
    raw: np.ndarray


class Proposed(NamedTuple):
    """Tokens that another model has drawn: tokens[B] (-1: none) from its logits[steps[b], rows[b]],
    and the uniform numbers[B] by which they are kept."""

    tokens: np.ndarray
    logits: Logits
    steps: np.ndarray
    rows: np.ndarray
    uniform: np.ndarray


class Runner(Protocol):
    """A model on one device, with a cache of `capacity` rows of `context` positions, and pages. The
    last `slack` positions of a row are for tokens that it may not keep, of which a step writes so
    many at most. With `records`, `experts` has the experts [n, T, L, k] of the tokens that prefill
    (those of a prompt of which nothing is in pages) or step has run, in each of the L layers with
    experts."""

    records: bool
    experts: np.ndarray | None

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

    def width(self, tokens: int) -> int:
        """The T of a step that has `tokens` tokens of a row, or fewer."""

    def step(
        self, ids: np.ndarray, positions: np.ndarray, counts: np.ndarray | None = None,
        ahead: bool = False,
    ) -> Logits:  # fmt: skip
        """Write tokens ids[n, T] of rows 0..n-1 at positions[n, T]; the logits after them, in the
        order of the rows [n·T, V].

        counts[n]: of a row's tokens only the first so many are its own (None: all); what the others
        write is behind them, where a later step writes again. T is at most 1 more than the `slack`
        of the runner for a model whose layers keep their window only. ahead: states of all tokens
        so far stay as they are for `settle`; a further such step continues from those that this one
        has computed.
        """

    def settle(self, counts: np.ndarray | None) -> None:
        """Of the tokens of the last step ahead, rows 0..n-1 keep the first counts[n]; None: of all
        steps ahead they keep no token. States are then those after the tokens that are kept."""

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

    def stacked(self, parts: Sequence[tuple[Logits, np.ndarray]]) -> Logits:
        """[K, n or more, V]: the logits of the given numbers of each part."""

    def verify(
        self, logits: Logits, which: np.ndarray, params: RowParams, uniform: np.ndarray,
        bias: np.ndarray | None, proposed: Proposed,
    ) -> tuple[Drawn, np.ndarray]:  # fmt: skip
        """Draws as `draw`, of rows which keep a proposed token with the probability that makes
        them draws from their own distribution (speculative sampling, arXiv 2211.17192, algorithm
        1); whether it was kept, bool[B]."""

    def likeliest(self, logits: Logits, which: np.ndarray, count: int) -> list[Ranked]:
        """The `count` likeliest tokens of logits[which[b]] with their log-probabilities at
        temperature 1, in descending order."""

    def echo(self, prefilled: Prefilled, row: int, prompt: Sequence[int], ranked: int) -> Echo:
        """The log-probabilities of a prompt that was run from its start, and the `ranked`
        likeliest tokens at each position (0: none)."""
