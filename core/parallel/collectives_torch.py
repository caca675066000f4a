"""Collectives of a torch mesh: process groups along its axes, exchanges with gradients.

Two kinds of replication decide how a gradient goes back. Along `tensor` every process does the same
computation outside of split products, so the gradient of what is replicated is complete and equal
everywhere. Along `context` processes hold different tokens, so the gradient of what one gathered
is partial, and all parts are summed. Hence the pairs (forward / backward); the first two are f and
g of Megatron-LM (arXiv 1909.08053, section 3):
  copy_to_region      nothing / all-reduce        before a product whose outputs are split (tensor)
  reduce_from_region  all-reduce / nothing        after a product whose inputs are split (tensor)
  gather              all-gather / reduce-scatter (context), or / own part (tensor)
  split               own part / zero-padded (context), or / all-gather (tensor)
  exchange            all-to-all / all-to-all     one dimension is split instead of another
  send_rows           all-to-all with counts      rows to their experts and back
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from sabia.core.parallel.mesh import RANK_ORDER, Mesh
from sabia.kernels.runtime.torch_support import Context

Tensor = torch.Tensor
Axes = tuple[str, ...]
Group = dist.ProcessGroup | None
Change = Callable[[Tensor], Tensor]
# the axes along which operations of a mesh communicate
OPS_GROUPS: tuple[Axes, ...] = (("fsdp",), ("expert",), ("context",), ("tensor",))
# torch 2.13 renames these two
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Groups:
    """This process's groups along sets of axes; all processes make the same ones in one order."""

    def __init__(self, mesh: Mesh, rank: int, axes_sets: Iterable[Axes]) -> None:
        self.mesh, self.rank, self.coordinates = mesh, rank, mesh.coordinates(rank)
        self._groups: dict[Axes, Any] = {}
        for axes in axes_sets:
            axes = self._split_axes(axes)
            if axes and axes not in self._groups:
                peers = mesh.peers(axes)
                whole_world = len(peers) == 1
                self._groups[axes] = dist.group.WORLD if whole_world else own_group(peers, rank)

    def _split_axes(self, axes: Axes) -> Axes:
        """The axes with more than one device, in the order of ranks."""
        return tuple(axis for axis in RANK_ORDER if axis in axes and self.mesh.along(axis) > 1)

    def along(self, *axes: str) -> Any:
        """The group along `axes`; None where this process is alone there."""
        split = self._split_axes(axes)
        return self._groups[split] if split else None


def own_group(peers: list[list[int]], rank: int) -> Any:
    """A new group of each list of ranks; returns this process's, None where it is in none."""
    # new_group is collective: every process creates all groups, also those of others
    groups = [(ranks, dist.new_group(ranks)) for ranks in peers]
    return next((group for ranks, group in groups if rank in ranks), None)


def all_parts(x: Tensor, group: Group) -> Tensor:
    """x[...] of every process, [processes, ...]."""
    parts = x.new_empty((dist.get_world_size(group), *x.shape))
    _all_gather(parts.view(-1), x.contiguous().view(-1), group=group)
    return parts


def sum_of_parts(parts: Tensor, group: Group) -> Tensor:
    """parts[processes, ...]: this process's part of the sum over all processes."""
    own = torch.empty_like(parts[0])
    _reduce_scatter(own.view(-1), parts.view(-1), group=group)
    return own


def in_parts(x: Tensor, dim: int, group: Group) -> Tensor:
    """x cut along `dim`, [processes, ...], contiguous (a stack keeps odd strides of its parts)."""
    return torch.stack(x.chunk(dist.get_world_size(group), dim)).contiguous()


def gathered(x: Tensor, dim: int, group: Group) -> Tensor:
    """The parts of all processes joined along `dim`."""
    parts = all_parts(x, group)
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)


def scattered(x: Tensor, dim: int, group: Group) -> Tensor:
    """This process's part along `dim` of the sum of all x."""
    return sum_of_parts(in_parts(x, dim, group), group)


def own_part(x: Tensor, dim: int, group: Group) -> Tensor:
    """This process's part of x along `dim`."""
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def exchanged(x: Tensor, cut: int, join: int, group: Group) -> Tensor:
    """x whole along `cut` and split along `join` → split along `cut` and whole along `join`."""
    parts = in_parts(x, cut, group)  # [processes, ...]: part i is for process i
    received = torch.empty_like(parts)  # part i is from process i
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(0), join)


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum of all x, a new tensor."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class _Pair(torch.autograd.Function):
    """forward_change(x); the gradient of x is backward_change(the gradient of the output)."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, forward_change: Change, backward_change: Change) -> Tensor:
        ctx.backward_change = backward_change
        return forward_change(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_change(grad), None, None


def copy_to_region(x: Tensor, group: Group) -> Tensor:
    """x, where the tensor-parallel region begins; its gradients are summed over the group."""
    # a view: autograd would not record an output that is the input itself
    return _Pair.apply(x, lambda x: x.view_as(x), partial(summed, group=group))


def reduce_from_region(x: Tensor, group: Group) -> Tensor:
    """The sum of all x, where the tensor-parallel region ends; each keeps its gradient."""
    return _Pair.apply(x, partial(summed, group=group), lambda grad: grad)


def gather(x: Tensor, dim: int, group: Group, *, partial_grads: bool) -> Tensor:
    """The parts of all joined along `dim`; `partial_grads`: gradients differ and are summed."""
    backward = scattered if partial_grads else own_part
    return _Pair.apply(
        x, partial(gathered, dim=dim, group=group), partial(backward, dim=dim, group=group)
    )


def split(x: Tensor, dim: int, group: Group, *, partial_grads: bool) -> Tensor:
    """This process's part of a replicated x; `partial_grads`: as in `gather`."""
    own = partial(own_part, dim=dim, group=group)
    if partial_grads:  # autograd pads the gradient with zeros; whoever gathered x sums them
        return own(x).contiguous()
    backward = partial(gathered, dim=dim, group=group)
    return _Pair.apply(x, lambda x: own(x).contiguous(), backward)


def exchange(x: Tensor, cut: int, join: int, group: Group) -> Tensor:
    """x split along `cut` instead of along `join`."""
    forward = partial(exchanged, cut=cut, join=join, group=group)
    return _Pair.apply(x, forward, partial(exchanged, cut=join, join=cut, group=group))


def send_rows(x: Tensor, send_counts: list[int], recv_counts: list[int], group: Group) -> Tensor:
    """Send the next send_counts[i] rows of x to process i; recv_counts[i] rows of it arrive."""

    def sent(x: Tensor, send: list[int], recv: list[int]) -> Tensor:
        received = x.new_empty((sum(recv), *x.shape[1:]))
        dist.all_to_all_single(received, x.contiguous(), recv, send, group=group)
        return received

    forward = partial(sent, send=send_counts, recv=recv_counts)
    return _Pair.apply(x, forward, partial(sent, send=recv_counts, recv=send_counts))
