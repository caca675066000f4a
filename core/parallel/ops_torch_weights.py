"""Weights split over `fsdp`: gathered for a layer, let go after it, gathered again for gradients.

All shards of a layer travel in one buffer a dtype; a shard is cast to the dtype that it is
computed in before it travels. Gradients are summed in float32 whatever they were computed in and
scattered back in one buffer (ZeRO-3, arXiv 1910.02054 section 5.3). What autograd wants to keep of
a gathered weight is replaced by a note of where it lay, so that between forward and backward a
process holds shards only.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sabia.core.parallel.collectives_torch import all_parts, in_parts, sum_of_parts

Tensor = torch.Tensor


@dataclass(frozen=True)
class Layout:
    """How shards become whole: the dimension along which each is split, its dtype as a weight."""

    dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    group: Any

    def whole(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Gather; one buffer a dtype."""
        found: list[Any] = [None] * len(shards)
        size = dist.get_world_size(self.group)
        for dtype in dict.fromkeys(self.dtypes):
            picked = [i for i, kind in enumerate(self.dtypes) if kind == dtype]
            flat = torch.cat([shards[i].detach().reshape(-1).to(dtype) for i in picked])
            columns = all_parts(flat, self.group).split([shards[i].numel() for i in picked], 1)
            for i, column in zip(picked, columns, strict=True):
                parts = column.view(size, *shards[i].shape).unbind(0)
                found[i] = torch.cat(parts, self.dims[i])
        return found

    def own(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Sum over the group and keep this process's shards, float32."""
        size = dist.get_world_size(self.group)
        cut = [in_parts(grad, dim, self.group) for grad, dim in zip(grads, self.dims, strict=True)]
        buffer = torch.cat([parts.reshape(size, -1).float() for parts in cut], 1)
        flat = sum_of_parts(buffer, self.group)
        pieces = flat.split([parts[0].numel() for parts in cut])
        return [piece.view(parts.shape[1:]) for piece, parts in zip(pieces, cut, strict=True)]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layout: Layout, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.layout = layout
        return tuple(layout.whole(shards))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *ctx.layout.own(grads)


class _Layer:
    """The gathered weights of one layer, from their forward pass to their gradients."""

    def __init__(self) -> None:
        self.layouts: list[tuple[Layout, list[Tensor]]] = []
        self.held: list[Tensor] = []  # alive while the forward pass runs, so places are unique
        self.numbers: dict[int, int] = {}
        self.again: list[Tensor] = []
        self.kept = 0

    def note(self, layout: Layout, shards: list[Tensor], whole: Sequence[Tensor]) -> None:
        """These were gathered for the layer."""
        self.layouts.append((layout, shards))
        for tensor in whole:
            self.numbers[tensor.untyped_storage().data_ptr()] = len(self.held)
            self.held.append(tensor)

    def pack(self, x: Tensor) -> Any:
        """What autograd keeps instead of x."""
        number = self.numbers.get(x.untyped_storage().data_ptr()) if self.held else None
        if number is None:
            return x
        self.kept += 1
        return number, x.size(), x.stride(), x.storage_offset()

    def unpack(self, kept: Any) -> Tensor:
        """The tensor for which `pack` gave `kept`."""
        if isinstance(kept, Tensor):
            return kept
        if not self.again:
            with torch.no_grad():
                self.again = [x for layout, shards in self.layouts for x in layout.whole(shards)]
        number, *view = kept
        found = self.again[number].as_strided(*view)
        self.kept -= 1
        if not self.kept:
            self.again = []
        return found


class Weights:
    """Gathers shards; inside `released` it sees to it that nothing whole is kept for gradients."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self._layer: _Layer | None = None

    def gathered(
        self, shards: Sequence[Tensor], dims: Sequence[int], dtypes: Sequence[torch.dtype]
    ) -> list[Tensor]:
        """Whole weights of shards split along `dims`, in `dtypes`."""
        found: dict[int, Tensor] = {}
        for trained in (True, False):  # a shard without gradient must not ask for one
            picked = [i for i, shard in enumerate(shards) if shard.requires_grad is trained]
            if picked:
                found |= zip(picked, self._some(picked, shards, dims, dtypes), strict=True)
        return [found[i] for i in range(len(shards))]

    def _some(self, picked: list[int], shards: Any, dims: Any, dtypes: Any) -> Sequence[Tensor]:
        layout = Layout(
            tuple(dims[i] for i in picked), tuple(dtypes[i] for i in picked), self.group
        )
        mine = [shards[i] for i in picked]
        whole = _Gather.apply(layout, *mine)
        if self._layer is not None:
            self._layer.note(layout, mine, whole)
        return whole

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Around the forward pass of one layer."""
        layer = self._layer = _Layer()
        try:
            with torch.autograd.graph.saved_tensors_hooks(layer.pack, layer.unpack):
                yield
        finally:
            layer.held, self._layer = [], None
