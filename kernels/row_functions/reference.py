"""The plain form of sabia.kernels.row_functions, in NumPy."""

from typing import Any

import numpy as np

from sabia.kernels.row_products.reference import narrow, wide


def rms_norm(
    x: np.ndarray, weight: np.ndarray, eps: float, y: np.ndarray, inverse: np.ndarray
) -> None:
    """See the interface."""
    h = wide(x)
    inverse[:] = 1 / np.sqrt((h * h).mean(-1) + eps)
    y[:] = narrow(h * inverse[:, None] * weight, y)


def rms_norm_gradient(
    grad: np.ndarray, x: np.ndarray, weight: np.ndarray, inverse: np.ndarray, dx: np.ndarray,
    dw: np.ndarray,
) -> None:  # fmt: skip
    """See the interface."""
    g, r = wide(grad), inverse[:, None]
    unit = wide(x) * r
    dw += (g * unit).sum(0)
    dx[:] = narrow(r * (g * weight - unit * (g * weight * unit).mean(-1, keepdims=True)), dx)


def _logistic(x: np.ndarray) -> Any:
    return 1 / (1 + np.exp(-x))


def silu_product(gate: np.ndarray, up: np.ndarray, out: np.ndarray) -> None:
    """See the interface."""
    x = wide(gate)
    out[:] = narrow(x * _logistic(x) * wide(up), out)


def silu_product_gradient(
    grad: np.ndarray, gate: np.ndarray, up: np.ndarray, d_gate: np.ndarray, d_up: np.ndarray
) -> None:
    """See the interface."""
    g, x, s = wide(grad), wide(gate), _logistic(wide(gate))
    d_gate[:] = narrow(g * wide(up) * s * (1 + x * (1 - s)), d_gate)
    d_up[:] = narrow(g * x * s, d_up)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, sign: float, y: np.ndarray) -> None:
    """See the interface."""
    first, second = np.split(wide(x), 2, -1)
    turned = np.concatenate((-second, first), -1)
    y[:] = narrow(wide(x) * cos + turned * sin * np.float32(sign), y)


def log_sums(scores: np.ndarray, cap: float, lse: np.ndarray) -> None:
    """See the interface."""
    z = wide(scores)
    z = np.tanh(z / cap) * cap if cap else z
    top = z.max(-1)
    lse[:] = top + np.log(np.exp(z - top[:, None]).sum(-1))


def softmax_gradient(scores: np.ndarray, targets: np.ndarray, cap: float, lse: np.ndarray) -> None:
    """See the interface."""
    log_sums(scores, cap, lse)
    z = wide(scores)
    share = np.tanh(z / cap) if cap else np.zeros(1, np.float32)
    dz = np.exp((share * cap if cap else z) - lse[:, None])
    dz[np.arange(len(dz)), np.maximum(targets, 0)] -= targets >= 0
    scores[:] = narrow(dz * (1 - share * share), scores)


def _visible(scores: np.ndarray, bias: np.ndarray, start: int, causal: bool) -> np.ndarray:
    """Which keys a query sees: [t, S] or [B, 1, t, S]."""
    rows = np.arange(start, start + scores.shape[2])
    visible = np.ones(scores.shape[2:], bool)
    if causal:
        visible = np.arange(scores.shape[3]) <= rows[:, None]
    return (visible & (bias[:, rows] == 0))[:, None] if len(bias) else visible


def attention_weights(
    scores: np.ndarray, bias: np.ndarray, start: int, causal: bool, scale: float,
    weights: np.ndarray, lse: np.ndarray,
) -> None:  # fmt: skip
    """See the interface."""
    visible = _visible(scores, bias, start, causal)
    z = np.where(visible, scores * np.float32(scale), np.float32(-np.inf))
    top = z.max(-1, initial=np.float32(-1e38))
    p = np.where(visible, np.exp(z - top[..., None]), np.float32(0))
    total = p.sum(-1)
    some = total > 0
    lse[:] = np.where(some, top + np.log(np.where(some, total, 1)), 0)
    weights[:] = narrow(p / np.where(some, total, 1)[..., None], weights)


def attention_gradient(
    scores: np.ndarray, products: np.ndarray, lse: np.ndarray, grad: np.ndarray, out: np.ndarray,
    bias: np.ndarray, start: int, causal: bool, scale: float, weights: np.ndarray,
    d_scores: np.ndarray,
) -> None:  # fmt: skip
    """See the interface."""
    rows, visible = slice(start, start + scores.shape[2]), _visible(scores, bias, start, causal)
    inner = (wide(grad) * wide(out)).sum(-1).transpose(0, 2, 1)[:, :, rows, None]
    p = np.exp(np.minimum(scores * np.float32(scale) - lse[:, :, rows, None], 0))
    p = np.where(visible, p, np.float32(0))
    weights[:] = narrow(p, weights)
    d_scores[:] = narrow((products - inner) * p * np.float32(scale), d_scores)
