"""Draws of tokens in JAX; see core/generate/sampling.py for the order of the filters.

As in torch, the token whose interval of the cumulative distribution holds u is found among the sums
of BLOCK tokens, then within one block; the sums are float64, which needs `double_precision`.
"""

from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
BLOCK = 128


def double_precision() -> AbstractContextManager[Any]:
    """The context in which `draw` is called."""
    if hasattr(jax, "enable_x64"):
        enabled: AbstractContextManager[Any] = jax.enable_x64(True)
        return enabled
    experimental: Any = import_module("jax.experimental")  # before JAX 0.8
    before: AbstractContextManager[Any] = experimental.enable_x64(True)
    return before


@partial(jax.jit, static_argnames=("plain", "filters"))
def draw(
    logits: Array, which: Array, columns: tuple[Array, ...], uniform: Array, bias: Array | None,
    plain: bool, filters: bool,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """(tokens[B], logprobs[B], raw_logprobs[B]) of one draw from logits[which[b]] for each row.

    columns: temperature, top_k, top_p, min_p, each [B]. plain, filters: as in RowParams. bias[B, V]
    is added to the logits, but not for `raw_logprobs`.
    """
    own, greedy = logits[which], columns[0][:, None] == 0
    unscaled = own if bias is None else own + bias
    drawn, logprobs = _drawn(_steered(unscaled, columns, plain, filters), uniform[:, None])
    best = unscaled.argmax(-1, keepdims=True).astype(drawn.dtype)
    tokens = jnp.where(greedy, best, drawn)
    logprobs = jnp.where(greedy, 0.0, logprobs)
    raw = _log_probabilities(own, tokens)
    return tokens[:, 0], logprobs[:, 0], raw[:, 0]


@partial(jax.jit, static_argnames=("plain", "filters"))
def verify(
    logits: Array, which: Array, columns: tuple[Array, ...], uniform: Array, bias: Array | None,
    theirs: Array, steps: Array, rows: Array, proposed: Array, keeping: Array, plain: bool,
    filters: bool,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """As in torch; the draft's distribution of b is that of theirs[steps[b], rows[b]]."""
    own, greedy = logits[which], columns[0][:, None] == 0
    unscaled = own if bias is None else own + bias
    given, at = proposed[:, None] >= 0, jnp.maximum(proposed[:, None], 0)
    scores = jax.nn.log_softmax(_steered(unscaled, columns, plain, filters), -1)
    other = jax.nn.log_softmax(_steered(theirs[steps, rows], columns, plain, filters), -1)
    ours, drafted = (jnp.exp(x.astype(jnp.float64)) for x in (scores, other))
    chosen, q = (jnp.take_along_axis(x, at, -1) for x in (ours, drafted))
    kept = given & (keeping[:, None] * q < chosen)
    rest = jnp.maximum(ours - drafted, 0)
    rest = jnp.where(given & (rest.sum(-1, keepdims=True) > 0), rest, ours)
    drawn = _drawn(jnp.log(rest).astype(scores.dtype), uniform[:, None])[0]
    best = unscaled.argmax(-1, keepdims=True).astype(drawn.dtype)
    tokens = jnp.where(greedy, best, jnp.where(kept, at.astype(drawn.dtype), drawn))
    kept = jnp.where(greedy, best == proposed[:, None], kept)
    logprobs = jnp.where(greedy, 0.0, jnp.take_along_axis(scores, tokens, -1))
    raw = _log_probabilities(own, tokens)
    return tokens[:, 0], logprobs[:, 0], raw[:, 0], kept[:, 0]


def _log_probabilities(logits: Array, tokens: Array) -> Array:
    """Of tokens[B, 1], as those of a log-softmax, which would be as large as the logits."""
    top = logits.max(-1, keepdims=True)
    total = jnp.exp(logits - top).sum(-1, keepdims=True)
    return jnp.take_along_axis(logits, tokens, -1) - top - jnp.log(total)


def _steered(logits: Array, columns: tuple[Array, ...], plain: bool, filters: bool) -> Array:
    """Logits after temperature and filters; those of greedy rows are of no use."""
    temperature, top_k, top_p, min_p = (column[:, None] for column in columns)
    if not plain:
        logits = logits / jnp.where(temperature == 0, jnp.float32(1), temperature)
    return _filtered(logits, top_k, top_p, min_p) if filters else logits


def _drawn(scores: Array, uniform: Array) -> tuple[Array, Array]:
    """(token, log-probability), each [B, 1], drawn from softmax(scores[B, V])."""
    rows, size = scores.shape
    top = scores.max(-1, keepdims=True)
    weights = jnp.pad(jnp.exp(scores - top), ((0, 0), (0, -size % BLOCK))).astype(jnp.float64)
    weights = weights.reshape(rows, -1, BLOCK)
    ends = weights.sum(-1).cumsum(-1)  # [B, blocks]
    total = ends[:, -1:]
    goal = uniform * total
    block = jnp.minimum((ends <= goal).sum(-1, keepdims=True), ends.shape[1] - 1)
    before = jnp.take_along_axis(ends, jnp.maximum(block - 1, 0), 1)
    within = jnp.take_along_axis(weights, block[..., None], 1)[:, 0].cumsum(-1)
    goal = goal - jnp.where(block > 0, before, 0.0)
    # rounding may put the goal at the end of the block's own sum: then its last token of weight > 0
    goal = jnp.minimum(goal, jnp.nextafter(within[:, -1:], jnp.zeros_like(goal)))
    tokens = (block * BLOCK + (within <= goal).sum(-1, keepdims=True)).astype(jnp.int32)
    logprobs = jnp.take_along_axis(scores, tokens, -1) - top - jnp.log(total).astype(scores.dtype)
    return tokens, logprobs


def _filtered(scaled: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Logits[B, V] with -inf for tokens excluded by top-k, top-p or min-p."""
    index = jnp.argsort(-scaled, axis=-1, stable=True)
    ordered = jnp.take_along_axis(scaled, index, -1)
    rank = jnp.arange(scaled.shape[-1])[None]
    keep = (rank < top_k) | (top_k == 0)
    probability = jax.nn.softmax(jnp.where(keep, ordered, -jnp.inf).astype(jnp.float64), -1)
    before = probability.cumsum(-1) - probability
    keep &= (before < top_p) | (top_p >= 1)
    keep &= ordered >= ordered[:, :1] + jnp.log(min_p)  # log 0 = -inf keeps all
    keep = keep.at[:, 0].set(True)
    rows = jnp.arange(len(scaled))[:, None]
    kept = jnp.zeros_like(keep).at[rows, index].set(keep)
    return jnp.where(kept, scaled, -jnp.inf)


@partial(jax.jit, static_argnames="count")
def likeliest(logits: Array, count: int) -> tuple[Array, Array]:
    """(values, ids) of the `count` likeliest tokens of logits[B, V], at temperature 1."""
    return jax.lax.top_k(jax.nn.log_softmax(logits, -1), count)


@jax.jit
def given(logits: Array, ids: Array) -> Array:
    """The log-probabilities of ids[B] by logits[B, V]."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits, -1), ids[:, None], -1)[:, 0]
