"""Weights split over `fsdp`: gathered for a layer, freed after it, gathered again for gradients.

All shards of a layer are sent in one buffer per dtype; a shard is cast to the dtype of its
computation before it is sent. Gradients are summed in float32 whatever they were computed in and
scattered back in one buffer (ZeRO-3, arXiv 1910.02054 section 5.3). What autograd saves of a
gathered weight is replaced by its number and its view, so that between forward and backward a
process holds shards only.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sabia.core.ops.product import Array
from sabia.core.parallel.collectives_torch import Group, all_parts, in_parts, sum_of_parts
from sabia.kernels.runtime.torch_support import Context

Tensor = torch.Tensor


@dataclass(frozen=True)
class ShardLayout:
    """How shards become whole weights: the dimension that splits each, its dtype as a weight."""

    dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    group: Any

    def whole(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Gather; one buffer per dtype."""
        weights: list[Any] = [None] * len(shards)
        size = dist.get_world_size(self.group)
        for dtype in dict.fromkeys(self.dtypes):
            picked = [i for i, kind in enumerate(self.dtypes) if kind == dtype]
            # flat[sum of elements] → all_parts[size, sum of elements], one column block a shard
            flat = torch.cat([shards[i].detach().reshape(-1).to(dtype) for i in picked])
            columns = all_parts(flat, self.group).split([shards[i].numel() for i in picked], 1)
            for i, column in zip(picked, columns, strict=True):
                parts = column.view(size, *shards[i].shape).unbind(0)
                weights[i] = torch.cat(parts, self.dims[i])
        return weights

    def own(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Sum over the group and keep this process's shards, float32."""
        size = dist.get_world_size(self.group)
        # each gradient as [size, ...]: part i is summed at process i
        cut = [in_parts(grad, dim, self.group) for grad, dim in zip(grads, self.dims, strict=True)]
        buffer = torch.cat([parts.reshape(size, -1).float() for parts in cut], 1)  # [size, N/size]
        flat = sum_of_parts(buffer, self.group)
        pieces = flat.split([parts[0].numel() for parts in cut])
        return [piece.view(parts.shape[1:]) for piece, parts in zip(pieces, cut, strict=True)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, layout: ShardLayout, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.layout = layout
        return tuple(layout.whole(shards))

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Any, ...]:
        return None, *ctx.layout.own(grads)


class _Layer:
    """The gathered weights of one layer, from their forward pass to their gradients."""

    def __init__(self) -> None:
        self.layouts: list[tuple[ShardLayout, list[Tensor]]] = []
        self.whole: list[Tensor] = []  # alive while the forward pass runs: no address is reused
        self.numbers: dict[int, int] = {}  # address of a weight → its number
        self.gathered_again: list[Tensor] = []  # for the backward pass
        self.packed = 0

    def add(self, layout: ShardLayout, shards: list[Tensor], whole: Sequence[Tensor]) -> None:
        """Record weights that were gathered for the layer."""
        self.layouts.append((layout, shards))
        for tensor in whole:
            self.numbers[tensor.untyped_storage().data_ptr()] = len(self.whole)
            self.whole.append(tensor)

    def pack(self, x: Tensor) -> Any:
        """What autograd saves instead of x: x itself if it is not a view of a gathered weight."""
        number = self.numbers.get(x.untyped_storage().data_ptr()) if self.whole else None
        if number is None:
            return x
        self.packed += 1
        return number, x.size(), x.stride(), x.storage_offset()

    def unpack(self, saved: Array) -> Tensor:
        """The tensor for which `pack` returned `saved`."""
        if isinstance(saved, Tensor):
            return saved
        if not self.gathered_again:  # the first one that the backward pass of the layer needs
            with torch.no_grad():
                self.gathered_again = [
                    weight for layout, shards in self.layouts for weight in layout.whole(shards)
                ]
        number, *view = saved
        tensor = self.gathered_again[number].as_strided(*view)
        self.packed -= 1
        if not self.packed:  # the last one: the whole weights can be freed
            self.gathered_again = []
        return tensor


class WeightGatherer:
    """Gathers shards; inside `released` autograd saves no whole weight."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._layer: _Layer | None = None

    def gathered(
        self, shards: Sequence[Tensor], dims: Sequence[int], dtypes: Sequence[torch.dtype]
    ) -> list[Tensor]:
        """Whole weights of shards split along `dims`, in `dtypes`."""
        by_number: dict[int, Tensor] = {}
        for trained in (True, False):  # a shard without gradient must not ask for one
            picked = [i for i, shard in enumerate(shards) if shard.requires_grad is trained]
            if picked:
                own = [shards[i] for i in picked]
                layout = ShardLayout(
                    tuple(dims[i] for i in picked), tuple(dtypes[i] for i in picked), self.group
                )
                whole = _Gather.apply(layout, *own)
                if self._layer is not None:
                    self._layer.add(layout, own, whole)
                by_number |= zip(picked, whole, strict=True)
        return [by_number[i] for i in range(len(shards))]

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Enclose the forward pass of one layer."""
        layer = self._layer = _Layer()
        try:
            with torch.autograd.graph.saved_tensors_hooks(layer.pack, layer.unpack):
                yield
        finally:
            layer.whole, self._layer = [], None
