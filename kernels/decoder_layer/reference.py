"""The plain form of sabia.kernels.decoder_layer, in NumPy."""

from typing import Any

import numpy as np

from sabia.kernels.decoder_layer.interface import MATRICES, NORMS
from sabia.kernels.row_products.reference import narrow, wide


def _rounded(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    return wide(narrow(x, like))


def _norm(y: np.ndarray, norm: np.ndarray, offset: float, eps: float, like: Any) -> np.ndarray:
    """RMSNorm of each len(norm) numbers of float32 y."""
    if not len(norm):
        return y
    rows = y.reshape(-1, len(norm))
    inverse = 1 / np.sqrt((rows * rows).mean(-1, keepdims=True) + np.float32(eps))
    return _rounded(rows * inverse * (wide(norm) + np.float32(offset)), like).reshape(y.shape)


def normed(x: np.ndarray, norm: np.ndarray, offset: float, eps: float, y: np.ndarray) -> None:
    """See the interface."""
    y[:] = narrow(_norm(wide(x), norm, offset, eps, x), x)


def added(x: Any, z: Any, norm: np.ndarray, offset: float, eps: float, factor: float) -> None:
    """See the interface."""
    more = _rounded(_norm(wide(z), norm, offset, eps, x) * np.float32(factor), x)
    x[:] = narrow(wide(x) + more, x)


def gated(made: np.ndarray, out: np.ndarray) -> None:
    """See the interface."""
    gate, up = np.split(wide(made), 2, -1)
    out[:] = narrow(gate / (1 + np.exp(-gate)) * up, out)


def _rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, like: np.ndarray) -> np.ndarray:
    """float32 x[B, H, N] by cos and sin[B, R]."""
    size = cos.shape[1]
    part = x[..., :size]
    turned = np.concatenate((-part[..., size // 2 :], part[..., : size // 2]), -1)
    made = _rounded(part * cos[:, None] + turned * sin[:, None], like)
    return np.concatenate((made, x[..., size:]), -1)


def heads(
    made: np.ndarray, q_norm: np.ndarray, k_norm: np.ndarray, offset: float, eps: float,
    scale: float, cos: np.ndarray, sin: np.ndarray, keys: np.ndarray, values: np.ndarray,
    at: np.ndarray, q: np.ndarray,
) -> None:  # fmt: skip
    """See the interface."""
    rows, (_, _, groups, size) = np.arange(len(made)), keys.shape
    ends = np.cumsum([q[0].size, groups * size])
    mine, key, value = np.split(wide(made), ends, -1)
    mine, key = (_norm(x, norm, offset, eps, made).reshape(len(made), -1, size)
                 for x, norm in ((mine, q_norm), (key, k_norm)))  # fmt: skip
    keys[rows, at] = narrow(_rotated(key, cos, sin, made), keys)
    values[rows, at] = narrow(value.reshape(len(made), groups, size), values)
    q[:] = (_rotated(mine, cos, sin, made) * np.float32(scale)).reshape(q.shape)


def attend(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, first: np.ndarray, last: np.ndarray,
    known: np.ndarray, weights: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    """See the interface."""
    for b, (begin, end, given) in enumerate(zip(first, last + 1, known, strict=True)):
        new, row = slice(max(begin, given), end), weights[b]
        row[..., new] = np.einsum("kgn,skn->kgs", q[b], wide(keys[b, new]))
        row[..., :begin] = 0
        seen = row[..., begin:end]
        seen[:] = np.exp(seen - seen.max(-1, keepdims=True))
        seen /= seen.sum(-1, keepdims=True)
        out[b] = np.einsum("kgs,skn->kgn", row[..., new], wide(values[b, new]))


def decoder_layer(
    x: np.ndarray, matrices: Any, biases: Any, norms: Any, numbers: Any, cos: np.ndarray,
    sin: np.ndarray, keys: np.ndarray, values: np.ndarray, at: np.ndarray, first: np.ndarray,
    last: np.ndarray,
) -> None:  # fmt: skip
    """See the interface."""
    biases, norms = dict(zip(MATRICES, biases, strict=True)), dict(zip(NORMS, norms, strict=True))
    weights = dict(zip(MATRICES, matrices, strict=True))
    eps, offset, of_heads, factor, scale = numbers
    y, (_, _, groups, size) = np.empty_like(x), keys.shape

    def times(name: str, y: np.ndarray) -> np.ndarray:
        out = _rounded(wide(y) @ wide(weights[name]).T, x)
        return narrow(_rounded(out + wide(biases[name]), x) if len(biases[name]) else out, x)

    normed(x, norms["attn.norm"], offset, eps, y)
    made = np.concatenate([times(f"attn.{name}", y) for name in "qkv"], -1)
    q = np.empty((1, groups, len(weights["attn.q"]) // (groups * size), size), np.float32)
    of_q_and_k = norms["attn.q_norm"], norms["attn.k_norm"]
    heads(made, *of_q_and_k, of_heads, eps, scale, cos, sin, keys, values, at, q)
    parts, out = np.empty((*q.shape[:3], last[0] + 1), np.float32), np.empty_like(q)
    attend(q, keys, values, first, last, first, parts, out)
    mixed = _rounded(out.reshape(1, -1), x)
    if len(weights["attn.gate"]):
        share = 1 / (1 + np.exp(-wide(times("attn.gate", y))))
        mixed = _rounded(mixed * _rounded(share, x), x)
    added(x, times("attn.o", narrow(mixed, x)), norms["attn.post_norm"], offset, eps, factor)
    normed(x, norms["mlp.norm"], offset, eps, y)
    both = np.concatenate((times("mlp.gate", y), times("mlp.up", y)), -1)
    mid = np.empty((1, len(weights["mlp.gate"])), x.dtype)
    gated(both, mid)
    added(x, times("mlp.down", mid), norms["mlp.post_norm"], offset, eps, factor)
