"""Products of one row at a time on a CPU: definitions.

A step of decoding reads all weights and all keys and values once, and computes little with each
number, so it is as fast as memory is read. These loops read it in its order: MKL's product of a
matrix and a vector reads eight rows of the matrix at once, at half the speed on the processors that
were measured, and `scaled_dot_product_attention` computes with three or four queries of a group as
with a matrix. Numbers are float32, or bfloat16 as uint16 (their bits); sums are float32.
"""

import numpy as np

from sabia.kernels.runtime.dispatch import engine_module


def matrix_vector(
    weight: np.ndarray, x: np.ndarray, out: np.ndarray, engine: str = "numba"
) -> None:
    """out[O] = weight[O, I] · x[I]; x and out are float32."""
    engine_module("row_products", engine).matrix_vector(weight, x, out)


def scores(
    q: np.ndarray, keys: np.ndarray, first: np.ndarray, out: np.ndarray, engine: str = "numba"
) -> None:
    """out[B, K, G, S] = q[B, K, G, N] · keys[B, S or more, K, N] of the slots from first[B] on, and
    what it was before them; q and out are float32."""
    engine_module("row_products", engine).scores(q, keys, first, out)


def weighted_sums(
    weights: np.ndarray, values: np.ndarray, first: np.ndarray, out: np.ndarray,
    engine: str = "numba",
) -> None:  # fmt: skip
    """out[B, K, G, N] = Σ over s ≥ first[B] of weights[B, K, G, S] · values[B, S or more, K, N];
    weights and out are float32."""
    engine_module("row_products", engine).weighted_sums(weights, values, first, out)


def attention(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, first: np.ndarray, last: np.ndarray,
    out: np.ndarray, lse: np.ndarray, engine: str = "numba",
) -> None:  # fmt: skip
    """Softmax attention of each query over the keys first[B, T]..last[B, T] (none: 0).

    out[B, T, H, M], lse[B, T, H] of float32 q[B, T, H, N], times the scale, keys[B, S or more, K,
    N] and values[B, S or more, K, M]. The bits of a query's result depend on the query and its keys
    alone: sums are in the order of the keys, counted from the first.
    """
    engine_module("row_products", engine).attention(q, keys, values, first, last, out, lse)
