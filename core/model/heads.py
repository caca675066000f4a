"""What is computed behind the last norm: an encoder's transform, and scores of a classifier.

A document's vector is a weighted sum of its tokens' last hidden states, the weights being part of
the batch: 1 at the first or the last token, or 1/n at each of n (`pool_weights`). So padding, its
side, and the pooling of a family are arithmetic that both backends do alike.
"""

from collections.abc import Sequence

import numpy as np

from sabia.core.model.block import stream_norm
from sabia.core.model.feed_forward import ACTIVATIONS
from sabia.core.model.ops import Array, Ops, Params, dtype_name
from sabia.core.spec.heads import Pooling
from sabia.core.spec.model import ModelSpec


def gathered(params: Params, ops: Ops, *names: str) -> dict[str, Array]:
    """Tensors that belong to no layer, by name, ready to be computed with; absent ones left out."""
    found = {name: params[name] for name in names if name in params}
    return dict(ops.gather(found, {name: name for name in found}))


def transformed(spec: ModelSpec, params: Params, x: Array, ops: Ops) -> Array:
    """x[..., D] through the transform in front of the head, or x where the model has none."""
    if spec.transform is None:
        return x
    w = gathered(params, ops, "transform", "transform_bias", "transform_norm")
    x = ops.linear(x, w["transform"], w.get("transform_bias"), name="transform")
    x = ACTIVATIONS[spec.transform.activation](ops, x)
    return stream_norm(spec.norm_kind, ops, x, w["transform_norm"], spec.norm_eps)


def class_logits(spec: ModelSpec, params: Params, hidden: Array, pool: Array, ops: Ops) -> Array:
    """Scores of the labels, fp32 [B, L], from hidden[B, T, D] and weights pool[B, T]."""
    pooled = (ops.cast(hidden, "float32") * pool[:, :, None]).sum(1)
    x = transformed(spec, params, ops.cast(pooled, dtype_name(hidden)), ops)
    w = gathered(params, ops, "classifier", "classifier_bias")
    scores = ops.linear(x, w["classifier"], w.get("classifier_bias"), name="classifier")
    return ops.cast(scores, "float32")


def pool_weights(lengths: Sequence[int] | np.ndarray, width: int, pooling: Pooling) -> np.ndarray:
    """Weights float32[B, width] of documents of `lengths` tokens that begin their rows."""
    size = np.asarray(lengths, np.int64)[:, None]
    column = np.arange(width)
    if pooling == "mean":
        return ((column < size) / np.maximum(size, 1)).astype(np.float32)
    return (column == (0 * size if pooling == "cls" else size - 1)).astype(np.float32)
