"""A layer of a decoder for one token of each row on a CPU: definitions.

A step of decoding multiplies a few vectors by every matrix; what lies between the products are a
few thousand numbers of a row. Calling as many operations for these can take longer than reading the
weights (tests/bench/RESULTS.md), so all that lies between two products is one call here, and for
one row the whole layer. Numbers are float32, or bfloat16 as uint16 (their bits), all of a call
alike; results are rounded where each operation by itself rounds them, and computed in float32
between. Norms may be float32 in any call.
"""

from typing import NamedTuple

import numpy as np

from sabia.kernels.runtime.dispatch import engine_module

# the order of the weights: shapes [out, in], and [out] or [in]
MATRICES = ("attn.q", "attn.k", "attn.v", "attn.gate", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
NORMS = (
    "attn.norm", "attn.post_norm", "mlp.norm", "mlp.post_norm", "attn.q_norm", "attn.k_norm",
)  # fmt: skip


class LayerWeights(NamedTuple):
    """Of one layer; what it lacks is an empty array, a matrix with no rows.

    biases: of MATRICES. norms: NORMS, RMSNorm before and after each part, and of queries and keys,
    of each head [N] or of all. numbers: epsilon of the norms, what is added to the first four of
    them and to the others, the factor of what a part adds to the stream, and that of the scores of
    attention.
    """

    matrices: tuple[np.ndarray, ...]
    biases: tuple[np.ndarray, ...]
    norms: tuple[np.ndarray, ...]
    numbers: tuple[float, float, float, float, float]


class Cached(NamedTuple):
    """Keys and values [B, S, K, N] of rows: those of the token are written to slot at[B], and its
    query sees the slots from first[B] to last[B]."""

    keys: np.ndarray
    values: np.ndarray
    at: np.ndarray
    first: np.ndarray
    last: np.ndarray


def decoder_layer(
    x: np.ndarray, weights: LayerWeights, cos: np.ndarray, sin: np.ndarray, cached: Cached,
    engine: str = "numba",
) -> None:  # fmt: skip
    """The residual stream x[1, D] after a layer, in place: x + norm(attention(norm(x))), then the
    same with down · (silu(gate · y) · (up · y)).

    Softmax attention; with a matrix attn.gate its output is multiplied by the logistic function of
    gate · y. float32 cos and sin[1, R] are of the first R numbers of each head, whose pairs (i, i +
    R/2) are rotated; R = 0: none.
    """
    engine_module("decoder_layer", engine).decoder_layer(x, *weights, cos, sin, *cached)


def normed(
    x: np.ndarray, norm: np.ndarray, offset: float, eps: float, y: np.ndarray,
    engine: str = "numba",
) -> None:  # fmt: skip
    """y[B, D] = RMSNorm of x by norm + offset; without a norm, x."""
    engine_module("decoder_layer", engine).normed(x, norm, offset, eps, y)


def added(
    x: np.ndarray, z: np.ndarray, norm: np.ndarray, offset: float, eps: float, factor: float,
    engine: str = "numba",
) -> None:  # fmt: skip
    """x[B, D] += factor · RMSNorm of z (without a norm, z), in place."""
    engine_module("decoder_layer", engine).added(x, z, norm, offset, eps, factor)


def gated(made: np.ndarray, out: np.ndarray, engine: str = "numba") -> None:
    """out[B, F] = silu(made[:, :F]) · made[:, F:]."""
    engine_module("decoder_layer", engine).gated(made, out)


def heads(
    made: np.ndarray, norms: tuple[np.ndarray, np.ndarray], numbers: tuple[float, float, float],
    cos: np.ndarray, sin: np.ndarray, cached: Cached, q: np.ndarray, engine: str = "numba",
) -> None:  # fmt: skip
    """float32 q[B, K, G, N] of made[B, (K·G + 2·K)·N], which are queries, keys and values; keys and
    values go to the cache. Queries and keys are normed, if there are norms, and rotated; numbers:
    what is added to the norms, epsilon, and the factor of the queries."""
    cache = cached.keys, cached.values, cached.at
    engine_module("decoder_layer", engine).heads(made, *norms, *numbers, cos, sin, *cache, q)


def attend(
    q: np.ndarray, cached: Cached, known: np.ndarray, weights: np.ndarray, out: np.ndarray,
    engine: str = "numba",
) -> None:  # fmt: skip
    """weights[B, K, G, S or more]: of the slots that each query sees, and 0 for those before;
    out[B, K, G, N]: the sum of the values at slots known[b] and later. All are float32. weights has
    the scores of the slots before known[b] already."""
    keys, values, _, first, last = cached
    engine_module("decoder_layer", engine).attend(q, keys, values, first, last, known, weights, out)
