"""The shards that one process of a torch mesh holds, and the sums of gradients over processes.

A gradient is summed over the axes whose processes saw other tokens and hold the same shard: data,
fsdp and expert where they do not split the tensor, context always. (A tensor split by fsdp was
summed by its reduce-scatter; one split by expert saw all tokens that were sent to its experts;
processes along tensor compute the same gradient.) Gradients are all-reduced in flat buckets of at
most BUCKET_BYTES.

`lazy`: for a checkpoint, the rows of a shard are copied to the host block by block.
"""

from collections.abc import Mapping

import numpy as np
import torch

from sabia.core.model.storage.lazy_array import LazyArray, batches_by_size
from sabia.core.numerics.floats import numpy_dtype
from sabia.core.ops.base import dtype_name
from sabia.core.ops.device_torch import host_array
from sabia.core.parallel.collectives_torch import Axes, Group, Groups, gathered, own_part
from sabia.core.parallel.mesh import TOKEN_AXES, Mesh, Split, owns, shard_slices, weight_split
from sabia.core.spec.tensors import TensorSpec


def lazy(tensor: torch.Tensor) -> LazyArray:
    """A tensor as an array whose rows are copied to the host when they are read."""
    tensor = tensor.detach()

    def fetch(start: int, stop: int) -> np.ndarray:
        return host_array(tensor[start:stop] if tensor.dim() else tensor)

    return LazyArray(tuple(tensor.shape), numpy_dtype(dtype_name(tensor)), fetch)


Tensor = torch.Tensor
BUCKET_BYTES = 64 << 20
Stages = tuple[int, ...]


class Shards:
    """The shards of process `rank`; `stages`: tensor → the pipeline stages that hold it."""

    def __init__(
        self, table: Mapping[str, TensorSpec], mesh: Mesh, rank: int, stages: Mapping[str, Stages]
    ) -> None:
        self.mesh, self.rank = mesh, rank
        self.shapes = {name: tensor.shape for name, tensor in table.items()}
        self.splits: dict[str, Split] = {n: weight_split(t, mesh) for n, t in table.items()}
        self.stages, self.stage = stages, mesh.coordinates(rank)["pipe"]

    def gradient_groups(self) -> list[Axes]:
        """The sets of axes that gradients are summed over."""
        return list(dict.fromkeys([self._summed(name) for name in self.splits]))

    def _summed(self, name: str) -> Axes:
        split = self.splits[name]
        return tuple(axis for axis in TOKEN_AXES if self.mesh.along(axis) > 1 and axis not in split)

    # -- places

    def here(self, name: str) -> bool:
        """Whether this process's stage holds the tensor."""
        return self.stage in self.stages[name]

    def location(self, name: str) -> dict[str, tuple[int, ...]]:
        """`offset` of this process's shard in the whole tensor, and its `global_shape`."""
        shape = self.shapes[name]
        cuts = shard_slices(shape, self.splits[name], self.mesh, self.rank)
        return {"offset": tuple(cut.start for cut in cuts), "global_shape": shape}

    def cut(self, name: str, whole: object) -> np.ndarray:
        """This process's shard of a whole array, which may be lazy."""
        whole = whole if isinstance(whole, np.ndarray) else np.asarray(whole)
        return whole[shard_slices(whole.shape, self.splits[name], self.mesh, self.rank)]

    def owns(self, name: str, whole: bool = False) -> bool:
        """Whether this process is the first that holds this shard (or, with `whole`, a copy)."""
        split = () if whole else self.splits[name]
        return owns(split, self.mesh, self.rank) and self.stage == self.stages[name][0]

    # -- exchanges

    def whole(self, name: str, shard: Tensor, groups: Groups, but: str = "") -> Tensor:
        """The whole tensor, on every process that has a shard; still split along axis `but`."""
        for dim, axis in enumerate(self.splits[name]):
            if axis not in (None, but):
                shard = gathered(shard, dim, groups.along(axis))
        return shard

    def own(self, name: str, whole: Tensor, groups: Groups, but: str = "") -> Tensor:
        """This process's shard of a whole tensor; the inverse of `whole`."""
        for dim, axis in enumerate(self.splits[name]):
            if axis not in (None, but):
                whole = own_part(whole, dim, groups.along(axis))
        return whole.contiguous()

    @torch.no_grad()
    def sum_gradients(self, gradients: Mapping[str, Tensor], groups: Groups) -> None:
        """Sum gradients, in place, over the processes that hold the same shards."""
        by_axes: dict[Axes, list[Tensor]] = {}
        for name, gradient in gradients.items():
            # gradients with the same group share flat buckets
            by_axes.setdefault(self._summed(name), []).append(gradient)
        for axes in (axes for axes in self.gradient_groups() if axes and axes in by_axes):
            for bucket in batches_by_size(by_axes[axes], lambda g: g.nbytes, BUCKET_BYTES):
                _all_reduce_flat(bucket, groups.along(*axes))

    def square_sum(self, gradients: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Σ g² over the shards that this process owns, so that no element counts twice."""
        mine = [gradient for name, gradient in gradients.items() if self.owns(name)]
        if not mine:
            return torch.zeros((), device=device)
        return torch.stack(torch._foreach_norm(mine)).square().sum()


def _all_reduce_flat(tensors: list[Tensor], group: Group) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    torch.distributed.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
