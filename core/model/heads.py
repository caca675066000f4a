"""Computations after the last norm: an encoder's head transform, and classifier scores.

A document's vector is a weighted sum of its tokens' last hidden states. The weights are part of the
batch: 1 at the first or the last token, or 1/n at each of n tokens (`pool_weights`). So padding,
its side, and the pooling of a family need no code of their own in the backends.
"""

from collections.abc import Sequence

import numpy as np

from sabia.core.model.block import stream_norm
from sabia.core.model.feed_forward import ACTIVATIONS
from sabia.core.ops.base import Array, Ops, Params, dtype_name
from sabia.core.spec.model import ModelSpec, Pooling


def gather_tensors(params: Params, ops: Ops, *names: str) -> dict[str, Array]:
    """Unsharded tensors that belong to no layer, by name; names that `params` lacks are skipped."""
    present = {name: params[name] for name in names if name in params}
    return dict(ops.gather(present, {name: name for name in present}))


def head_transform(spec: ModelSpec, params: Params, x: Array, ops: Ops) -> Array:
    """norm(activation(W x)) of x[..., D] before the head; x itself if the model has none."""
    if spec.transform is None:
        return x
    w = gather_tensors(params, ops, "transform", "transform_bias", "transform_norm")
    x = ops.linear(x, w["transform"], w.get("transform_bias"), name="transform")
    x = ACTIVATIONS[spec.transform.activation](ops, x)
    return stream_norm(spec.norm_kind, ops, x, w["transform_norm"], spec.norm_eps)


def class_logits(spec: ModelSpec, params: Params, hidden: Array, pool: Array, ops: Ops) -> Array:
    """Scores of the labels, fp32 [B, L], from hidden[B, T, D] and weights pool[B, T]."""
    pooled = (ops.cast(hidden, "float32") * pool[:, :, None]).sum(1)  # Σ_t pool_t h_t, fp32 [B, D]
    x = head_transform(spec, params, ops.cast(pooled, dtype_name(hidden)), ops)
    w = gather_tensors(params, ops, "classifier", "classifier_bias")
    scores = ops.linear(x, w["classifier"], w.get("classifier_bias"), name="classifier")  # [B, L]
    return ops.cast(scores, "float32")


def pool_weights(lengths: Sequence[int] | np.ndarray, width: int, pooling: Pooling) -> np.ndarray:
    """Pooling weights float32[B, width]; each document starts its row and has `lengths` tokens."""
    size = np.asarray(lengths, np.int64)[:, None]  # [B, 1]
    column = np.arange(width)
    if pooling == "mean":
        return ((column < size) / np.maximum(size, 1)).astype(np.float32)
    # 1 at the first token (cls) or at the last
    return (column == (0 * size if pooling == "cls" else size - 1)).astype(np.float32)
