"""The operations of a torch mesh: every process holds shards and computes what is local to it.

`MeshOps` replaces the layout operations of one device. `TensorParallel` is the rule for products:
from a tensor's axes (core.parallel.mesh) it reads how a product is split (Megatron-LM,
arXiv 1909.08053). Where `tensor` splits the outputs of a matrix (column-parallel), the input is
copied to the tensor-parallel region; where it splits the inputs (row-parallel), the output is
reduced from it. Behind the rule are local shards, gathered over fsdp and in the dtype of the
computation. Adapters come before it: their matrices carry axes like any others, and are gathered,
copied and reduced by name.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from sabia.core.ops.base import Remat, Stage
from sabia.core.ops.device_torch import TorchOps
from sabia.core.ops.exact_torch import Exact
from sabia.core.ops.experts_torch import biased
from sabia.core.ops.product import Multiply, Product, Rule, check_sizes
from sabia.core.parallel.collectives_torch import (
    OPS_GROUPS,
    Group,
    Groups,
    copy_to_region,
    exchange,
    gather,
    gathered,
    reduce_from_region,
    split,
)
from sabia.core.parallel.expert_exchange_torch import DispatchState, ExpertExchange
from sabia.core.parallel.gathered_weights_torch import WeightGatherer
from sabia.core.parallel.mesh import (
    ACTIVATIONS,
    RANK_ORDER,
    ROW_AXES,
    Split,
    activation_split,
    weight_split,
)
from sabia.core.spec.tensors import TensorSpec

Tensor = torch.Tensor
LogicalAxes = tuple[str | None, ...]
# axes that split a row or its dimensions
WITHIN_ROWS = {axis for split in ACTIVATIONS.values() for axis in split} - set(ROW_AXES)


class TensorParallel(Rule):
    """Copies inputs to, and reduces outputs from, the tensor-parallel region of `group`."""

    def __init__(self, splits: Mapping[str, Split], group: Group) -> None:
        self.splits, self.group = splits, group

    def apply(self, product: Product, proceed: Multiply) -> list[Tensor]:
        """See Rule.apply."""
        x, plan, copied = product.x, product.plan, None
        if isinstance(plan, DispatchState):
            if not len(x):  # no token has these experts, but autograd needs their gradients
                return [F.linear(x, m.weight[0].to(x.dtype)) for m in product.matrices]
            plan = plan.grouped
        results = []
        for matrix in product.matrices:
            outputs, inputs = self.splits.get(matrix.name, ())[-2:] or (None, None)
            if outputs == "tensor" and copied is None:  # once for all matrices
                copied = copy_to_region(x, self.group)
            # column-parallel: this process's columns of y = x Wᵀ
            source = copied if outputs == "tensor" else x
            # row-parallel: y = Σ over processes of x_i W_iᵀ, then the bias once
            part = matrix._replace(bias=None) if inputs == "tensor" else matrix
            (y,) = proceed(Product(source, (part,), plan))
            if inputs == "tensor":
                y = biased(reduce_from_region(y, self.group), matrix.bias, plan)
            results.append(y)
        return results


class MeshOps(TorchOps):
    """The operations of this process; `narrow`: tensors computed with in `dtype`."""

    def __init__(
        self,
        table: Mapping[str, TensorSpec],
        groups: Groups,
        narrow: frozenset[str] = frozenset(),
        dtype: torch.dtype = torch.float32,
        stage: Stage | None = None,
    ) -> None:
        super().__init__(stage)
        mesh = self.mesh = groups.mesh
        self.coordinates = groups.coordinates
        self.narrow, self.dtype = narrow, dtype
        self.splits: dict[str, Split] = {n: weight_split(t, mesh) for n, t in table.items()}
        # norms of one head: every process of `tensor` applies the whole weight to its own heads
        self.shared = {n for n, t in table.items() if t.axes == ("head_dim",)}
        self.vocabulary = next(
            (t.shape[0] for t in table.values() if t.axes == ("vocab", "embed")), 0
        )
        self.groups = {axis: groups.along(axis) for (axis,) in OPS_GROUPS}
        self.weights = WeightGatherer(self.groups["fsdp"])
        if mesh.expert > 1:
            exchange = ExpertExchange(self.groups["expert"], mesh.expert)
            self.dispatch, self.combine = exchange.dispatch, exchange.combine  # type: ignore

    def mesh_rules(self) -> tuple[Rule, ...]:
        """See Ops.mesh_rules."""
        if self.mesh.tensor == self.mesh.expert == 1:
            return ()
        return (TensorParallel(self.splits, self.groups["tensor"]),)

    def input_parts(self, name: str) -> int:
        """See Ops.input_parts."""
        return self.mesh.tensor if self.splits.get(name, ())[-1:] == ("tensor",) else 1

    def largest_input(self, name: str, largest: Tensor) -> Tensor:
        """See Ops.largest_input."""
        if self.input_parts(name) > 1:
            most, group = torch.distributed.ReduceOp.MAX, self.groups["tensor"]
            torch.distributed.all_reduce(largest, most, group=group)
        return largest

    # -- weights

    def gather(self, weights: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
        """See Ops.gather: whole over fsdp, still split over tensor and expert."""
        whole = dict(weights)
        split = {s: self.splits.get(names[s], ()) for s in weights}
        cut = [short for short, axes in split.items() if "fsdp" in axes]
        if cut:
            shards, dims = [weights[s] for s in cut], [split[s].index("fsdp") for s in cut]
            dtypes = [self._compute_dtype(names[s], weights[s]) for s in cut]
            whole |= zip(cut, self.weights.gathered(shards, dims, dtypes), strict=True)
        for short, weight in whole.items():
            name = names[short]
            if name in self.shared and self.mesh.tensor > 1:
                weight = copy_to_region(weight, self.groups["tensor"])
            if isinstance(weight, Tensor):  # stored ones are decoded for each product
                whole[short] = weight.to(self._compute_dtype(name, weight))
        return whole

    def _compute_dtype(self, name: str, weight: Tensor) -> torch.dtype:
        return self.dtype if name in self.narrow else weight.dtype

    def remat(self, function: Callable[..., Any], policy: Remat) -> Callable[..., Any]:
        """See Ops.remat; without it only gathered weights are recomputed (gathered again)."""
        if policy != "none" or self.mesh.fsdp == 1:
            return super().remat(function, policy)

        def run(*args: object) -> Any:
            with self.weights.released():
                return function(*args)

        return run

    # -- vocabulary

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        """See Ops.embedding."""
        if self.splits["embed"][0] is None:
            return super().embedding(table, ids)
        # each id is in the part of one process; the others add zeros: x[B, T, D]
        rows, own = self._own_ids(table, ids)
        x = super().embedding(table, torch.where(own, rows, 0))
        return reduce_from_region(x * own[..., None].to(x.dtype), self.groups["tensor"])

    def _own_ids(self, table: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(ids counted from this process's first row of the table, whether it has them)."""
        rows = ids - self.coordinates["tensor"] * table.shape[0]
        return rows, (rows >= 0) & (rows < table.shape[0])

    def linear_cross_entropy(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, **settings: Any
    ) -> tuple[Tensor, Tensor]:
        """See Ops.linear_cross_entropy: lse = log Σ exp(lse of each part of the vocabulary)."""
        group = self.groups["tensor"]
        if weight.shape[0] == self.vocabulary:
            return super().linear_cross_entropy(hidden, weight, targets, **settings)
        rows, own = self._own_ids(weight, targets)
        nll, lse = super().linear_cross_entropy(
            copy_to_region(hidden, group), weight, torch.where(own, rows, -1), **settings
        )
        # nll[B, T] = lse - score of the target, which one process has; lse[B, T] of this part.
        # lse of all parts = m + log Σ exp(lse_i - m), with m the largest: exp cannot overflow
        largest = lse.detach().clone()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
        parts = torch.stack(((lse - largest).exp(), torch.where(own, lse - nll, 0.0)))
        sums, score = reduce_from_region(parts, group).unbind(0)
        lse = largest + sums.log()
        return torch.where(targets >= 0, lse - score, 0.0), lse

    # -- tokens

    def relayout(self, x: Tensor, now: LogicalAxes, then: LogicalAxes) -> Tensor:
        """See Ops.relayout."""
        check_sizes("relayout", x, now, self.sizes)
        before, after = activation_split(now, self.mesh), activation_split(then, self.mesh)
        for axis in (name for name in RANK_ORDER if name in WITHIN_ROWS):
            source, target = _dimension(axis, before), _dimension(axis, after)
            # along `context` processes hold different tokens: their gradients are parts of a sum
            group, partial_grads = self.groups[axis], axis == "context"
            if source is None and target is not None:
                x = split(x, target, group, partial_grads=partial_grads)
            elif source is not None and target is None:
                x = gather(x, source, group, partial_grads=partial_grads)
            elif source is not None and target is not None and source != target:
                x = exchange(x, target, source, group)
        return x

    def whole_segments(self, segments: Tensor) -> Tensor:
        """See Ops.whole_segments."""
        if self.mesh.context == 1:
            return segments
        return gathered(segments, 1, self.groups["context"])

    def positions(self, length: int, like: Tensor) -> Tensor:
        """See Ops.positions: counted from the first token of the whole row."""
        return super().positions(length, like) + self.coordinates["context"] * length

    def attention_mask(
        self,
        like: Tensor,
        keys: int,
        *,
        segments: Tensor | None = None,
        slots: Tensor | None = None,
        **settings: Any,
    ) -> Any:
        """See Ops.attention_mask: own queries, keys of the whole row."""
        if self.mesh.context > 1 and slots is None:
            settings["start"] = self.coordinates["context"] * keys
            keys *= self.mesh.context
            segments = None if segments is None else self.whole_segments(segments)
        return super().attention_mask(like, keys, segments=segments, slots=slots, **settings)


class ExactMeshOps(Exact, MeshOps):
    """MeshOps whose results for a token do not depend on others; without context and tensor."""


def _dimension(axis: str, split: tuple[tuple[str, ...], ...]) -> int | None:
    return next((dim for dim, axes in enumerate(split) if axis in axes), None)
