"""The layers of a step that decodes one row on a CPU: one call each (kernels.decoder_layer).

Softmax attention without a cap and sinks and a gated MLP with SiLU, with RMSNorm before or after
them, are computed so where their matrices are `Packed` and no rule, mesh or named implementation
changes an operation. Other layers are composed of the operations, as in every other pass.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sabia.core.ops.base import Ops, Params
from sabia.core.ops.packed_torch import Packed
from sabia.core.spec.layers import Attention, GatedMlp, Layer
from sabia.kernels.decoder_layer.interface import (
    MATRICES,
    NORMS,
    Cached,
    LayerWeights,
    decoder_layer,
)
from sabia.kernels.row_products import torch_arrays
from sabia.kernels.row_products.torch_arrays import numbers

Tensor = torch.Tensor
_NONE = np.zeros(0, np.float32)


def decoded_row(ops: Ops, context: Any, x: Tensor) -> "DecodedRow | None":
    """See Ops.decoded_row."""
    changed = ops.rules or ops.sizes or ops.exact or any(ops.requested.values())
    if changed or x.numel() != x.shape[-1] or not torch_arrays.serves(x):
        return None
    return DecodedRow(context, x) if context.norm_kind == "rms" else None


class DecodedRow:
    """One pass over the layers."""

    def __init__(self, context: Any, x: Tensor) -> None:
        self._context, self._slot = context, int(context.slots)
        self._stream, self._row = x, numbers(x.view(-1))
        self._angles: dict[Any, tuple[np.ndarray, np.ndarray]] = {None: (_NONE, _NONE)}
        self._angles |= {
            rope: (cos.numpy().reshape(-1), sin.numpy().reshape(-1))
            for rope, (cos, sin) in context.angles.items()
        }

    def advance(
        self, index: int, layer: Layer, names: Mapping[str, str], params: Params, x: Tensor
    ) -> bool:
        """Compute a layer in place of x[1, 1, D]; False: it is none of those that can be."""
        first, part = params.get(names.get(MATRICES[0], "")), layer.mixer
        if type(first) is not Packed or not isinstance(part, Attention) or x.dtype != first.dtype:
            return False
        if first.layer is None:
            weights = {name: params[full] for name, full in names.items()}
            first.layer = _weights(part, layer, weights, self._context.eps)
        arrays, nbytes = first.layer
        cached = self._cached(index, part, x)
        if nbytes < torch_arrays.LEAST_BYTES or not arrays.matrices or cached is None:
            return False
        if x is not self._stream:
            self._stream, self._row = x, numbers(x.view(-1))
        cos, sin = self._angles[part.rope]
        decoder_layer(self._row, arrays, cos, sin, cached)
        return True

    def _cached(self, index: int, part: Attention, x: Tensor) -> Cached | None:
        """The row's keys and values; None where they have another dtype or another order."""
        cache, at = self._context.cache, self._slot
        keys, values = (cache.layers[index][name] for name in ("keys", "values"))
        if keys.dtype != x.dtype or not (keys.is_contiguous() and values.is_contiguous()):
            return None
        first, last = 0 if part.window is None else max(0, at - part.window + 1), at
        if index in cache.rings:
            if cache.slack:
                return None
            size = keys.shape[1]
            at, first, last = at % size, 0, min(at, size - 1)
        return Cached(numbers(keys)[0], numbers(values)[0], at, first, last)


def _weights(
    part: Attention, layer: Layer, weights: Mapping[str, Tensor], eps: float
) -> tuple[LayerWeights, int]:
    """The arrays of a layer and the bytes of its matrices; 0 if it is another one, or where its
    matrices are not `Packed` or its tensors of several dtypes."""
    mlp, first, none = layer.mlp, weights[MATRICES[0]], LayerWeights((), (), (0, 0, 0, 0, 0))
    if not isinstance(mlp, GatedMlp) or mlp.activation != "silu":
        return none, 0
    if part.softcap is not None or part.sinks:
        return none, 0
    matrices = [weights.get(name, first[:0]) for name in MATRICES]
    vectors = [weights.get(name, first[0, :0])
               for name in (*(f"{name}_bias" for name in MATRICES), *NORMS)]  # fmt: skip
    alike = all(x.dtype == first.dtype and x.is_contiguous() for x in (*matrices, *vectors))
    if not alike or any(type(x) is not Packed for x in matrices if len(x)):
        return none, 0
    factors = eps, layer.norms.offset, part.norm_offset, layer.residual_scale, part.scale
    arrays = [tuple(numbers(x) for x in some) for some in (matrices, vectors)]
    return LayerWeights(arrays[0], arrays[1], factors), sum(x.nbytes for x in matrices)
