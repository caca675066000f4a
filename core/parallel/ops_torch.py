"""The operations of a torch mesh: every process holds shards and computes what is local to it.

`MeshOps` wraps the operations of one device. It reads from a tensor's axes
(core.parallel.sharding_rules) how a product is split (Megatron-LM, arXiv 1909.08053). Where
`tensor` splits the outputs of a matrix (column-parallel), the input is copied to the
tensor-parallel region; where it splits the inputs (row-parallel), the output is reduced from it.
`base` sees local shards, gathered over fsdp and in the dtype of the computation. Number formats
(core.model.precision) therefore go inside: wrap(base) first. Adapters go outside: their matrices
carry axes like any others, and are gathered, copied and reduced by name.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from sabia.core.model.ops import Remat, WrappedOps
from sabia.core.parallel import collectives_torch as c
from sabia.core.parallel.ops_torch_experts import ExpertParallelDispatcher
from sabia.core.parallel.ops_torch_weights import WeightGatherer
from sabia.core.parallel.sharding_rules import Split, activation_split, weight_split
from sabia.core.spec.tensors import TensorSpec

Tensor = torch.Tensor
LogicalAxes = tuple[str | None, ...]
OPS_GROUPS = (("fsdp",), ("expert",), ("context",), ("tensor",))


class MeshOps(WrappedOps):
    """`base` over the devices of a mesh; `narrow`: tensors computed with in `dtype`."""

    def __init__(
        self,
        base: Any,
        table: Mapping[str, TensorSpec],
        groups: c.Groups,
        narrow: frozenset[str] = frozenset(),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(base)
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
        self.experts = ExpertParallelDispatcher(base, self.groups["expert"], mesh.expert)
        self.dispatch, self.combine = self.experts.dispatch, self.experts.combine
        # the newest input of a tensor-parallel region, and its copy in the region
        self._copied: tuple[Any, Any] = (None, None)

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
                weight = c.copy_to_region(weight, self.groups["tensor"])
            whole[short] = weight.to(self._compute_dtype(name, weight))
        return whole

    def _compute_dtype(self, name: str, weight: Tensor) -> torch.dtype:
        return self.dtype if name in self.narrow else weight.dtype

    def remat(self, function: Callable[..., Any], policy: Remat) -> Callable[..., Any]:
        """See Ops.remat; without it only gathered weights are recomputed (gathered again)."""
        if policy != "none":

            def run_again(*args: Any) -> Any:
                # the second run must not reuse a copy that the first one recorded
                self._copied = (None, None)
                return function(*args)

            return self.base.remat(run_again, policy)
        if self.mesh.fsdp == 1:
            return function

        def run(*args: Any) -> Any:
            with self.weights.released():
                return function(*args)

        return run

    # -- products

    def _split(self, name: str) -> Split:
        return self.splits.get(name, ())[-2:] or (None, None)

    def _copy_to_region(self, x: Tensor) -> Tensor:
        """x, its gradients summed over tensor: once for all products that read the same x."""
        if self._copied[0] is not x:
            self._copied = (x, c.copy_to_region(x, self.groups["tensor"]))
        return self._copied[1]

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, name: str = ""
    ) -> Tensor:
        """See Ops.linear."""
        outputs, inputs = self._split(name)
        if inputs == "tensor":  # row-parallel: y = Σ over processes of x_i W_iᵀ, then the bias once
            x = c.reduce_from_region(self.base.linear(x, weight, name=name), self.groups["tensor"])
            return x if bias is None else x + bias.to(x.dtype)
        if outputs == "tensor":  # column-parallel: this process's columns of y = x Wᵀ
            x = self._copy_to_region(x)
        return self.base.linear(x, weight, bias, name=name)

    def grouped_matmul(
        self, rows: Tensor, weight: Tensor, plan: Any, bias: Tensor | None = None, *, name: str = ""
    ) -> Tensor:
        """See Ops.grouped_matmul."""
        outputs, inputs = self._split(name)
        if outputs == "tensor":
            rows = self._copy_to_region(rows)
        rows = self.experts.grouped_matmul(rows, weight, plan, name=name)
        if inputs == "tensor":
            rows = c.reduce_from_region(rows, self.groups["tensor"])
        return self.base.biased(rows, plan, bias)

    # -- vocabulary

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        """See Ops.embedding."""
        if self.splits["embed"][0] is None:
            return self.base.embedding(table, ids)
        # each id is in the part of one process; the others add zeros: x[B, T, D]
        rows, own = self._own_ids(table, ids)
        x = self.base.embedding(table, torch.where(own, rows, 0))
        return c.reduce_from_region(x * own[..., None].to(x.dtype), self.groups["tensor"])

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
            return self.base.linear_cross_entropy(hidden, weight, targets, **settings)
        rows, own = self._own_ids(weight, targets)
        nll, lse = self.base.linear_cross_entropy(
            c.copy_to_region(hidden, group), weight, torch.where(own, rows, -1), **settings
        )
        # nll[B, T] = lse - score of the target, which one process has; lse[B, T] of this part.
        # lse of all parts = m + log Σ exp(lse_i - m), with m the largest: exp cannot overflow
        largest = lse.detach().clone()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
        parts = torch.stack(((lse - largest).exp(), torch.where(own, lse - nll, 0.0)))
        sums, score = c.reduce_from_region(parts, group).unbind(0)
        lse = largest + sums.log()
        return torch.where(targets >= 0, lse - score, 0.0), lse

    # -- tokens

    def relayout(self, x: Tensor, now: LogicalAxes, then: LogicalAxes) -> Tensor:
        """See Ops.relayout."""
        before, after = activation_split(now, self.mesh), activation_split(then, self.mesh)
        for axis in ("context", "tensor"):
            source, target = _dimension(axis, before), _dimension(axis, after)
            # along `context` processes hold different tokens: their gradients are parts of a sum
            group, partial_grads = self.groups[axis], axis == "context"
            if source is None and target is not None:
                x = c.split(x, target, group, partial_grads=partial_grads)
            elif source is not None and target is None:
                x = c.gather(x, source, group, partial_grads=partial_grads)
            elif source is not None and target is not None and source != target:
                x = c.exchange(x, target, source, group)
        return x

    def whole_segments(self, segments: Tensor) -> Tensor:
        """See Ops.whole_segments."""
        if self.mesh.context == 1:
            return segments
        return c.gathered(segments, 1, self.groups["context"])

    def positions(self, length: int, like: Tensor) -> Tensor:
        """See Ops.positions: counted from the first token of the whole row."""
        return self.base.positions(length, like) + self.coordinates["context"] * length

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
        return self.base.attention_mask(like, keys, segments=segments, slots=slots, **settings)


def _dimension(axis: str, split: tuple[tuple[str, ...], ...]) -> int | None:
    return next((dim for dim, axes in enumerate(split) if axis in axes), None)
