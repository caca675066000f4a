"""Functions of the rows of a training step on a CPU: definitions.

Composed of torch's operations, a norm, a rotation or a softmax reads and writes its numbers three
to nine times, which takes a quarter of a step in BF16. These loops read them once (twice where a
row is needed as a whole). Numbers are float32, or bfloat16 as uint16 (their bits), all arrays of a
call alike where nothing else is said; everything is computed in float32 and rounded once.
"""

import numpy as np

from sabia.kernels.runtime.dispatch import engine_module


def rms_norm(
    x: np.ndarray, weight: np.ndarray, eps: float, y: np.ndarray, inverse: np.ndarray,
    engine: str = "numba",
) -> None:  # fmt: skip
    """y[R, D] = x · r · weight with r = inverse[R] = 1 / sqrt(mean(x²) + eps); float32 weight."""
    engine_module("row_functions", engine).rms_norm(x, weight, eps, y, inverse)


def rms_norm_gradient(
    grad: np.ndarray, x: np.ndarray, weight: np.ndarray, inverse: np.ndarray, dx: np.ndarray,
    dw: np.ndarray, engine: str = "numba",
) -> None:  # fmt: skip
    """dx[R, D] and float32 dw[D] (added to what it holds) of `rms_norm`."""
    engine_module("row_functions", engine).rms_norm_gradient(grad, x, weight, inverse, dx, dw)


def silu_product(gate: np.ndarray, up: np.ndarray, out: np.ndarray, engine: str = "numba") -> None:
    """out[N] = gate · s(gate) · up, s the logistic function."""
    engine_module("row_functions", engine).silu_product(gate, up, out)


def silu_product_gradient(
    grad: np.ndarray, gate: np.ndarray, up: np.ndarray, d_gate: np.ndarray, d_up: np.ndarray,
    engine: str = "numba",
) -> None:  # fmt: skip
    """d_gate[N] and d_up[N] of `silu_product`."""
    engine_module("row_functions", engine).silu_product_gradient(grad, gate, up, d_gate, d_up)


def rotate(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, sign: float, y: np.ndarray,
    engine: str = "numba",
) -> None:  # fmt: skip
    """y[B, T, H, N]: pairs (i, i + N/2) of x rotated by the angles of float32 cos and sin[B or 1,
    T, 1, N], backwards with sign -1."""
    engine_module("row_functions", engine).rotate(x, cos, sin, sign, y)


def log_sums(scores: np.ndarray, cap: float, lse: np.ndarray, engine: str = "numba") -> None:
    """float32 lse[R] = log Σ over V of e^z with z = scores[R, V], or cap · tanh(scores / cap) where
    cap is not 0."""
    engine_module("row_functions", engine).log_sums(scores, cap, lse)


def softmax_gradient(
    scores: np.ndarray, targets: np.ndarray, cap: float, lse: np.ndarray, engine: str = "numba"
) -> None:
    """scores[R, V] ← (e^(z - lse) - onehot(target)) · dz/dscores, with the z and lse[R] of
    `log_sums`, which is computed; int64 targets[R], below 0 for none."""
    engine_module("row_functions", engine).softmax_gradient(scores, targets, cap, lse)


def attention_weights(
    scores: np.ndarray, bias: np.ndarray, start: int, causal: bool, scale: float,
    weights: np.ndarray, lse: np.ndarray, engine: str = "numba",
) -> None:  # fmt: skip
    """The weights of attention = softmax(scale · scores) and their float32 lse[B, H, t], for
    queries that begin at `start`; float32 scores, which are overwritten, and weights are
    [B, H, t, S]. Hidden keys are those of `attention_gradient`; without any other, all are 0."""
    given = scores, bias, start, causal, scale
    engine_module("row_functions", engine).attention_weights(*given, weights, lse)


def attention_gradient(
    scores: np.ndarray, products: np.ndarray, lse: np.ndarray, grad: np.ndarray, out: np.ndarray,
    bias: np.ndarray, start: int, causal: bool, scale: float, weights: np.ndarray,
    d_scores: np.ndarray, engine: str = "numba",
) -> None:  # fmt: skip
    """The weights of attention and the gradients of its scores, from float32 scores = q · k and
    products = grad · v, for queries that begin at `start`; all four are [B, H, t, S]:
    weights = p = e^(scale · scores - lse), d_scores = scale · p · (products - grad · out). Both are
    0 for hidden keys: later than the query if `causal`, and those where float32 bias[B, T, S], if
    not empty, is not 0. Of all queries there are float32 lse[B, H, T], grad and out[B, T, H, N]."""
    given = scores, products, lse, grad, out, bias, start, causal, scale
    engine_module("row_functions", engine).attention_gradient(*given, weights, d_scores)
