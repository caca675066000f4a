"""A layer of a decoder for one token of one row on a CPU: definitions.

A step of decoding one row multiplies one vector by every matrix; what lies between the products is
a few thousand numbers. Calling as many operations for these can take longer than reading the
weights (tests/bench/RESULTS.md), so a whole layer is one call here. Numbers are float32, or
bfloat16 as uint16 (their bits), all of a call alike; results are rounded where each operation by
itself rounds them, and computed in float32 between.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from sabia.kernels.runtime.dispatch import engine_module

# the order of the weights: shapes [out, in], and [out] or [in]
MATRICES = ("attn.q", "attn.k", "attn.v", "attn.gate", "attn.o", "mlp.gate", "mlp.up", "mlp.down")
NORMS = (
    "attn.norm", "attn.post_norm", "mlp.norm", "mlp.post_norm", "attn.q_norm", "attn.k_norm",
)  # fmt: skip


class LayerWeights(NamedTuple):
    """Of one layer; what it lacks is an empty array, a matrix with no rows.

    vectors: the biases of MATRICES, then NORMS: RMSNorm before and after each part, and of queries
    and keys, of each head [N] or of all. numbers: epsilon of the norms, what is added to the first
    four of them and to the others, the factor of what a part adds to the stream, and that of the
    scores of attention.
    """

    matrices: tuple[np.ndarray, ...]
    vectors: tuple[np.ndarray, ...]
    numbers: tuple[float, float, float, float, float]


class Cached(NamedTuple):
    """Keys and values [S, K, N] of a row: those of the token are written to slot `at`, and its
    query sees the slots from `first` to `last`."""

    keys: np.ndarray
    values: np.ndarray
    at: int
    first: int
    last: int


@functools.cache
def _engine(name: str) -> Any:
    return engine_module("decoder_layer", name)


def decoder_layer(
    x: np.ndarray, weights: LayerWeights, cos: np.ndarray, sin: np.ndarray, cached: Cached,
    engine: str = "numba",
) -> None:  # fmt: skip
    """The residual stream x[D] after a layer, in place: x + norm(attention(norm(x))), then the same
    with down · (silu(gate · y) · (up · y)).

    Softmax attention; with a matrix attn.gate its output is multiplied by the logistic function of
    gate · y. float32 cos and sin[R] are of the first R numbers of each head, whose pairs (i, i +
    R/2) are rotated; empty: none.
    """
    _engine(engine).decoder_layer(x, *weights, cos, sin, *cached)
