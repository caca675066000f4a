"""The plain form of sabia.kernels.decoder_layer, in NumPy."""

from typing import Any

import numpy as np

from sabia.kernels.decoder_layer.interface import MATRICES, NORMS


def _wide(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def _bits(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 numbers, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def decoder_layer(
    x: np.ndarray, matrices: Any, vectors: Any, numbers: Any, cos: np.ndarray, sin: np.ndarray,
    keys: np.ndarray, values: np.ndarray, at: int, first: int, last: int,
) -> None:  # fmt: skip
    """See the interface."""
    biases = dict(zip(MATRICES, vectors, strict=False))
    norms = dict(zip(NORMS, vectors[len(MATRICES) :], strict=True))
    weights = dict(zip(MATRICES, matrices, strict=True))
    eps, offset, of_heads, factor, scale = map(np.float32, numbers)

    def rounded(y: np.ndarray) -> np.ndarray:
        return _wide(_bits(y)) if x.dtype == np.uint16 else y

    def normed(y: np.ndarray, name: str, more: Any) -> np.ndarray:
        if not len(weight := _wide(norms[name])):
            return y
        rows = y.reshape(-1, len(weight))
        inverse = 1 / np.sqrt((rows * rows).mean(-1, keepdims=True) + eps)
        return rounded(rows * inverse * (weight + more)).reshape(-1)

    def times(name: str, y: np.ndarray) -> np.ndarray:
        out = rounded(_wide(weights[name]) @ y)
        return rounded(out + _wide(biases[name])) if len(biases[name]) else out

    def heads(name: str, y: np.ndarray) -> np.ndarray:
        made = normed(times(f"attn.{name}", y), f"attn.{name}_norm", of_heads)
        made = made.reshape(-1, keys.shape[2]).copy()
        if size := len(cos):
            part = made[:, :size]
            turned = np.concatenate((-part[:, size // 2 :], part[:, : size // 2]), 1)
            made[:, :size] = rounded(part * cos + turned * sin)
        return made

    def add(name: str, y: np.ndarray) -> None:
        y = rounded(normed(y, f"{name}.post_norm", offset) * factor) + _wide(x)
        x[:] = _bits(y) if x.dtype == np.uint16 else y

    y = normed(_wide(x), "attn.norm", offset)
    q, k = heads("q", y), heads("k", y)
    v = times("attn.v", y).reshape(k.shape)
    for cache, new in ((keys, k), (values, v)):
        cache[at] = _bits(new) if x.dtype == np.uint16 else new
    group = len(q) // len(k)
    seen, of_seen = (_wide(c[first : last + 1]).repeat(group, 1) for c in (keys, values))
    scores = np.einsum("hn,shn->hs", q * scale, seen)
    parts = np.exp(scores - scores.max(-1, keepdims=True))
    parts /= parts.sum(-1, keepdims=True)
    out = rounded(np.einsum("hs,shn->hn", parts, of_seen).reshape(-1))
    if len(weights["attn.gate"]):
        out = rounded(out * rounded(1 / (1 + np.exp(-times("attn.gate", y)))))
    add("attn", times("attn.o", out))
    y = normed(_wide(x), "mlp.norm", offset)
    gate, up = times("mlp.gate", y), times("mlp.up", y)
    add("mlp", times("mlp.down", rounded(gate / (1 + np.exp(-gate)) * up)))
