"""What processes of a torch mesh say to each other: groups along axes, exchanges with gradients.

Two kinds of replication decide a gradient's way back. Along `tensor` every process does the same
computation outside of split products, so the gradient of what is replicated is whole and equal
everywhere. Along `context` processes hold different tokens, so the gradient of what one gathered
is a part, and all parts are summed. Hence the pairs (forward / backward):
  enter      nothing / all-reduce        in front of a product whose outputs are split (tensor)
  leave      all-reduce / nothing        behind a product whose inputs are split (tensor)
  gather     all-gather / reduce-scatter (context), or / own part (tensor)
  split      own part / zero-padded (context), or / all-gather (tensor)
  exchange   all-to-all / all-to-all     one dimension is split instead of another
  send_rows  all-to-all with counts      rows to their experts and back
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from sabia.core.parallel.mesh import RANK_ORDER, Mesh

Tensor = torch.Tensor
Axes = tuple[str, ...]
Change = Callable[[Tensor], Tensor]
# torch 2.13 renames these two
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Groups:
    """This process's groups along sets of axes; all processes make the same ones in one order."""

    def __init__(self, mesh: Mesh, rank: int, wanted: Iterable[Axes]) -> None:
        self.mesh, self.rank, self.place = mesh, rank, mesh.coordinates(rank)
        self._groups: dict[Axes, Any] = {}
        for axes in wanted:
            axes = self._large(axes)
            if axes and axes not in self._groups:
                self._groups[axes] = _joined(mesh, rank, axes)

    def _large(self, axes: Axes) -> Axes:
        return tuple(axis for axis in RANK_ORDER if axis in axes and self.mesh.along(axis) > 1)

    def along(self, *axes: str) -> Any:
        """The group along `axes`; None where this process is alone there."""
        large = self._large(axes)
        return self._groups[large] if large else None


def _joined(mesh: Mesh, rank: int, axes: Axes) -> Any:
    peers = mesh.peers(axes)
    if len(peers) == 1:
        return dist.group.WORLD
    made = [(ranks, dist.new_group(ranks)) for ranks in peers]
    return next(group for ranks, group in made if rank in ranks)


def all_parts(x: Tensor, group: Any) -> Tensor:
    """x[...] of every process, [processes, ...]."""
    found = x.new_empty((dist.get_world_size(group), *x.shape))
    _all_gather(found.view(-1), x.contiguous().view(-1), group=group)
    return found


def sum_of_parts(parts: Tensor, group: Any) -> Tensor:
    """parts[processes, ...]: this process's of the sum over all processes."""
    found = torch.empty_like(parts[0])
    _reduce_scatter(found.view(-1), parts.view(-1), group=group)
    return found


def in_parts(x: Tensor, dim: int, group: Any) -> Tensor:
    """x cut along `dim`, [processes, ...], contiguous (a stack keeps odd strides of its parts)."""
    return torch.stack(x.chunk(dist.get_world_size(group), dim)).contiguous()


def gathered(x: Tensor, dim: int, group: Any) -> Tensor:
    """The parts of all processes joined along `dim`."""
    parts = all_parts(x, group)
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)


def scattered(x: Tensor, dim: int, group: Any) -> Tensor:
    """This process's part along `dim` of the sum of all x."""
    return sum_of_parts(in_parts(x, dim, group), group)


def own_part(x: Tensor, dim: int, group: Any) -> Tensor:
    """This process's part of x along `dim`."""
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def exchanged(x: Tensor, cut: int, join: int, group: Any) -> Tensor:
    """x whole along `cut` and split along `join` → split along `cut` and whole along `join`."""
    parts = in_parts(x, cut, group)
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return torch.cat(found.unbind(0), join)


def summed(x: Tensor, group: Any) -> Tensor:
    """The sum of all x, a new tensor."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class _Pair(torch.autograd.Function):
    """there(x), whose gradient is back(the gradient of what came out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Change, back: Change) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _rows_sent(x: Tensor, leaving: list[int], coming: list[int], group: Any) -> Tensor:
    found = x.new_empty((sum(coming), *x.shape[1:]))
    dist.all_to_all_single(found, x.contiguous(), coming, leaving, group=group)
    return found


def enter(x: Tensor, group: Any) -> Tensor:
    """x; its gradients are summed over the group."""
    return _Pair.apply(x, lambda x: x.view_as(x), partial(summed, group=group))


def leave(x: Tensor, group: Any) -> Tensor:
    """The sum of all x; each keeps its gradient."""
    return _Pair.apply(x, partial(summed, group=group), lambda grad: grad)


def gather(x: Tensor, dim: int, group: Any, *, parts: bool) -> Tensor:
    """The parts of all joined along `dim`; `parts`: gradients differ and are summed."""
    place: Any = {"dim": dim, "group": group}
    back = partial(scattered if parts else own_part, **place)
    return _Pair.apply(x, partial(gathered, **place), back)


def split(x: Tensor, dim: int, group: Any, *, parts: bool) -> Tensor:
    """This process's part of a replicated x; `parts`: as in `gather`."""
    own = partial(own_part, dim=dim, group=group)
    if parts:
        return own(x).contiguous()
    back = partial(gathered, dim=dim, group=group)
    return _Pair.apply(x, lambda x: own(x).contiguous(), back)


def exchange(x: Tensor, cut: int, join: int, group: Any) -> Tensor:
    """x split along `cut` instead of along `join`."""
    there = partial(exchanged, cut=cut, join=join, group=group)
    return _Pair.apply(x, there, partial(exchanged, cut=join, join=cut, group=group))


def send_rows(x: Tensor, leaving: list[int], coming: list[int], group: Any) -> Tensor:
    """leaving[i] rows of x, in order, go to process i; coming[i] rows of process i come back."""
    there = partial(_rows_sent, leaving=leaving, coming=coming, group=group)
    back = partial(_rows_sent, leaving=coming, coming=leaving, group=group)
    return _Pair.apply(x, there, back)
