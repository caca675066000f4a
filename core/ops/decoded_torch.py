"""The layers of a step of decoding on a CPU, in few calls each (kernels.decoder_layer).

Softmax attention without a cap and sinks and a gated MLP with SiLU, with RMSNorm before or after
them, are computed so where their matrices are `Packed` and no rule, mesh or named implementation
changes an operation: a layer of one row in one call, of several rows in one between two products.
Other layers are composed of the operations, as in every other pass.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sabia.core.ops.base import Ops, Params
from sabia.core.ops.packed_torch import Joined, Packed, joined
from sabia.core.ops.product import Matrix
from sabia.core.spec.layers import Attention, GatedMlp, Layer
from sabia.kernels.attention.torch_cached import SharedSlots
from sabia.kernels.decoder_layer.interface import (
    MATRICES,
    NORMS,
    Cached,
    LayerWeights,
    added,
    attend,
    decoder_layer,
    gated,
    heads,
    normed,
)
from sabia.kernels.row_products import torch_arrays
from sabia.kernels.runtime.torch_support import numbers

Tensor = torch.Tensor
_PRODUCTS = (("attn.q", "attn.k", "attn.v"), ("attn.o",), ("mlp.gate", "mlp.up"), ("mlp.down",))


class _Weights(NamedTuple):
    """Of a layer. nbytes: of its matrices. products: with each of _PRODUCTS; none if the layer
    cannot be computed so."""

    arrays: LayerWeights
    nbytes: int
    products: tuple[Joined, ...]


_OTHER = _Weights(LayerWeights((), (), (), (0, 0, 0, 0, 0)), 0, ())


def decoded_rows(ops: Ops, context: Any, x: Tensor) -> "DecodedRows | None":
    """See Ops.decoded_rows."""
    changed = ops.rules or ops.sizes or ops.exact or any(ops.requested.values())
    if changed or x.shape[1] != 1 or not torch_arrays.serves(x):
        return None
    return DecodedRows(context, x) if context.norm_kind == "rms" else None


class DecodedRows:
    """One pass over the layers, of one token of each row."""

    def __init__(self, context: Any, x: Tensor) -> None:
        rows = len(x)
        self._context, self._slots = context, context.slots.numpy().reshape(-1)
        self._stream, self._rows = x, numbers(x.view(rows, -1))
        none = np.zeros((rows, 0), np.float32)
        self._angles: dict[Any, tuple[np.ndarray, np.ndarray]] = {None: (none, none)}
        self._angles |= {
            rope: (cos.numpy().reshape(rows, -1), sin.numpy().reshape(rows, -1))
            for rope, (cos, sin) in context.angles.items()
        }
        self._arrays: dict[tuple[int, ...], tuple[Tensor, ...]] = {}

    def advance(
        self, index: int, layer: Layer, names: Mapping[str, str], params: Params, x: Tensor
    ) -> bool:
        """Compute a layer in place of x[B, 1, D]; False: it is none of those that can be."""
        first, part = params.get(names.get(MATRICES[0], "")), layer.mixer
        if type(first) is not Packed or not isinstance(part, Attention) or x.dtype != first.dtype:
            return False
        if first.layer is None:
            tensors = {name: params[full] for name, full in names.items()}
            first.layer = _weights(part, layer, tensors, names, self._context.eps)
        weights: _Weights = first.layer
        if not weights.products or (len(x) > 1 and part.output_gate):
            return False
        if len(x) == 1 and weights.nbytes < torch_arrays.LEAST_BYTES:
            return False
        if (cached := self._cached(index, part, x)) is None:
            return False
        if x is not self._stream:
            self._stream, self._rows = x, numbers(x.view(len(x), -1))
        cos, sin = self._angles[part.rope]
        if len(x) == 1:
            decoder_layer(self._rows, weights.arrays, cos, sin, cached)
            return True
        shared = () if index in self._context.cache.rings else self._context.cache.shared
        self._layer(weights, cos, sin, cached, shared)
        return True

    def _layer(
        self, weights: _Weights, cos: np.ndarray, sin: np.ndarray, cached: Cached,
        shared: Sequence[SharedSlots],
    ) -> None:  # fmt: skip
        """A layer of several rows."""
        eps, offset, of_heads, factor, scale = weights.arrays.numbers
        of_qkv, of_o, of_inner, of_down = weights.products
        of_norms = dict(zip(NORMS, weights.arrays.norms, strict=True))
        x, y = self._rows, torch.empty_like(self._stream[:, 0])

        def part(name: str, product: Joined) -> Tensor:
            normed(x, of_norms[f"{name}.norm"], offset, eps, numbers(y))
            return product.times(y)

        def add(name: str, made: Tensor) -> None:
            added(x, numbers(made), of_norms[f"{name}.post_norm"], offset, eps, factor)

        made = part("attn", of_qkv)
        q, parts, out = self._of_attention(made.shape[1], cached)
        norms = of_norms["attn.q_norm"], of_norms["attn.k_norm"]
        heads(numbers(made), norms, (of_heads, eps, scale), cos, sin, cached, q.numpy())
        known = np.zeros(len(x), np.int64)
        keys, values = (torch.from_numpy(x).view(y.dtype) for x in (cached.keys, cached.values))
        for one in shared:
            known[one.rows] = one.slots
            parts[one.rows, :, :, : one.slots] = one.times(q, one.read(keys).transpose(1, 2))
        attend(q.numpy(), cached, known, parts.numpy(), out.numpy())
        for one in shared:
            out[one.rows] += one.times(parts[..., : one.slots], one.read(values))
        add("attn", of_o.times(out.view(len(x), -1).to(y.dtype)))
        both = part("mlp", of_inner)
        inner = both.new_empty(len(x), both.shape[1] // 2)
        gated(numbers(both), numbers(inner))
        add("mlp", of_down.times(inner))

    def _of_attention(self, width: int, cached: Cached) -> tuple[Tensor, ...]:
        """float32 queries, weights and sums of attention, which layers share."""
        rows, slots, groups, size = cached.keys.shape
        if (made := self._arrays.get((width, slots, groups, size))) is None:
            shape = rows, groups, width // (groups * size) - 2
            slots = int(cached.last.max()) + 1
            made = tuple(torch.empty(*shape, last) for last in (size, slots, size))
            self._arrays[width, slots, groups, size] = made
        return made

    def _cached(self, index: int, part: Attention, x: Tensor) -> Cached | None:
        """The rows' keys and values; None where they have another dtype or another order."""
        cache, at = self._context.cache, self._slots
        keys, values = (cache.layers[index][name] for name in ("keys", "values"))
        if keys.dtype != x.dtype or not (keys.is_contiguous() and values.is_contiguous()):
            return None
        none = at * 0
        first, last = none if part.window is None else np.maximum(at - part.window + 1, 0), at
        if index in cache.rings:
            if cache.slack:
                return None
            size = keys.shape[1]
            at, first, last = at % size, none, np.minimum(at, size - 1)
        return Cached(numbers(keys), numbers(values), at, first, last)


def _weights(
    part: Attention, layer: Layer, weights: Mapping[str, Tensor], names: Mapping[str, str],
    eps: float,
) -> _Weights:  # fmt: skip
    """What is computed with; none if it is another layer, or where its matrices are not `Packed` or
    its tensors of several dtypes (norms may be float32, as those of a policy in training)."""
    mlp, first = layer.mlp, weights[MATRICES[0]]
    if not isinstance(mlp, GatedMlp) or mlp.activation != "silu":
        return _OTHER
    if part.softcap is not None or part.sinks:
        return _OTHER
    matrices = [weights.get(name, first[:0]) for name in MATRICES]
    biases = [weights.get(f"{name}_bias", first[0, :0]) for name in MATRICES]
    wide = next((weights[name] for name in NORMS if name in weights), first[0])
    norms = [weights.get(name, wide[:0]) for name in NORMS]
    alike = wide.dtype in (first.dtype, torch.float32) and all(
        x.dtype == like.dtype and x.is_contiguous()
        for some, like in ((matrices, first), (biases, first), (norms, wide))
        for x in some
    )
    if not alike or any(type(x) is not Packed for x in matrices if len(x)):
        return _OTHER
    factors = eps, layer.norms.offset, part.norm_offset, layer.residual_scale, part.scale
    arrays = [tuple(numbers(x) for x in some) for some in (matrices, biases, norms)]
    made = LayerWeights(arrays[0], arrays[1], arrays[2], factors)
    products = (
        joined([Matrix(names[n], weights[n], weights.get(f"{n}_bias")) for n in some])
        for some in _PRODUCTS
    )
    return _Weights(made, sum(x.nbytes for x in matrices), tuple(products))
