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
from dataclasses import replace
from typing import Any

import torch

from sabia.core.model.ops import Remat, WrappedOps
from sabia.core.parallel import collectives_torch as c
from sabia.core.parallel.ops_torch_experts import Exchange
from sabia.core.parallel.ops_torch_weights import Weights
from sabia.core.parallel.sharding_rules import Split, activation_split, weight_split
from sabia.core.spec.tensors import TensorSpec

Tensor = torch.Tensor
Layout = tuple[str | None, ...]
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
        self.place = groups.place
        self.narrow, self.dtype = narrow, dtype
        self.splits: dict[str, Split] = {n: weight_split(t, mesh) for n, t in table.items()}
        self.shared = {n for n, t in table.items() if t.axes == ("head_dim",)}
        self.vocabulary = next(
            (t.shape[0] for t in table.values() if t.axes == ("vocab", "embed")), 0
        )
        self.groups = {axis: groups.along(axis) for (axis,) in OPS_GROUPS}
        self.weights = Weights(self.groups["fsdp"])
        self.exchange = Exchange(base, self.groups["expert"], mesh.expert)
        self.dispatch, self.combine = self.exchange.dispatch, self.exchange.combine
        self._entered: tuple[Any, Any] = (None, None)

    # -- weights

    def gather(self, weights: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
        """See Ops.gather: whole over fsdp, still split over tensor and expert."""
        found = dict(weights)
        split = {s: self.splits.get(names[s], ()) for s in weights}
        cut = [short for short, axes in split.items() if "fsdp" in axes]
        if cut:
            shards, dims = [weights[s] for s in cut], [split[s].index("fsdp") for s in cut]
            dtypes = [self._computed(names[s], weights[s]) for s in cut]
            found |= zip(cut, self.weights.gathered(shards, dims, dtypes), strict=True)
        for short, weight in found.items():
            found[short] = self._prepared(names[short], weight)
        return found

    def _computed(self, name: str, weight: Tensor) -> torch.dtype:
        return self.dtype if name in self.narrow else weight.dtype

    def _prepared(self, name: str, weight: Tensor) -> Tensor:
        if name in self.shared and self.mesh.tensor > 1:  # each process uses it for its own heads
            weight = c.enter(weight, self.groups["tensor"])
        return weight.to(self._computed(name, weight))

    def remat(self, function: Callable[..., Any], policy: Remat) -> Callable[..., Any]:
        """See Ops.remat; without it gathered weights alone are made again."""
        if policy != "none":
            return self.base.remat(self._fresh(function), policy)
        if self.mesh.fsdp == 1:
            return function

        def run(*args: Any) -> Any:
            with self.weights.released():
                return function(*args)

        return run

    def _fresh(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which may run twice, not reusing what entered in its first run."""

        def run(*args: Any) -> Any:
            self._entered = (None, None)
            return function(*args)

        return run

    # -- products

    def _split(self, name: str) -> Split:
        return self.splits.get(name, ())[-2:] or (None, None)

    def _enter(self, x: Tensor) -> Tensor:
        """x, its gradients summed over tensor: once for all products that read the same x."""
        if self._entered[0] is not x:
            self._entered = (x, c.enter(x, self.groups["tensor"]))
        return self._entered[1]

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, name: str = ""
    ) -> Tensor:
        """See Ops.linear."""
        outputs, inputs = self._split(name)
        if inputs == "tensor":
            x = c.leave(self.base.linear(x, weight, name=name), self.groups["tensor"])
            return x if bias is None else x + bias.to(x.dtype)
        if outputs == "tensor":
            x = self._enter(x)
        return self.base.linear(x, weight, bias, name=name)

    def grouped_matmul(
        self, rows: Tensor, weight: Tensor, plan: Any, bias: Tensor | None = None, *, name: str = ""
    ) -> Tensor:
        """See Ops.grouped_matmul."""
        outputs, inputs = self._split(name)
        if outputs == "tensor":
            rows = self._enter(rows)
        rows = self.exchange.grouped_matmul(rows, weight, plan, name=name)
        if inputs == "tensor":
            rows = c.leave(rows, self.groups["tensor"])
        return self.base.biased(rows, plan, bias)

    # -- vocabulary

    def embedding(self, table: Tensor, ids: Tensor) -> Tensor:
        """See Ops.embedding."""
        if self.splits["embed"][0] is None:
            return self.base.embedding(table, ids)
        place, here = self._own_ids(table, ids)
        found = self.base.embedding(table, torch.where(here, place, 0))
        return c.leave(found * here[..., None].to(found.dtype), self.groups["tensor"])

    def _own_ids(self, table: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids counted from this process's first, and which of them it has."""
        place = ids - self.place["tensor"] * table.shape[0]
        return place, (place >= 0) & (place < table.shape[0])

    def linear_cross_entropy(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, **settings: Any
    ) -> tuple[Tensor, Tensor]:
        """See Ops.linear_cross_entropy: lse = log Σ exp(lse of each part of the vocabulary)."""
        group = self.groups["tensor"]
        if weight.shape[0] == self.vocabulary:
            return self.base.linear_cross_entropy(hidden, weight, targets, **settings)
        place, here = self._own_ids(weight, targets)
        nll, lse = self.base.linear_cross_entropy(
            c.enter(hidden, group), weight, torch.where(here, place, -1), **settings
        )
        largest = lse.detach().clone()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
        parts = torch.stack(((lse - largest).exp(), torch.where(here, lse - nll, 0.0)))
        sums, picked = c.leave(parts, group).unbind(0)
        lse = largest + sums.log()
        return torch.where(targets >= 0, lse - picked, 0.0), lse

    # -- tokens

    def relayout(self, x: Tensor, now: Layout, then: Layout) -> Tensor:
        """See Ops.relayout."""
        before, after = activation_split(now, self.mesh), activation_split(then, self.mesh)
        for axis in ("context", "tensor"):
            x = self._moved(x, axis, _dimension(axis, before), _dimension(axis, after))
        return x

    def _moved(self, x: Tensor, axis: str, now: int | None, then: int | None) -> Tensor:
        group, parts = self.groups[axis], axis == "context"
        if now == then:
            return x
        if now is None:
            return c.split(x, then, group, parts=parts)  # type: ignore[arg-type]  # not None, too
        if then is None:
            return c.gather(x, now, group, parts=parts)
        return c.exchange(x, then, now, group)

    def whole_segments(self, segments: Tensor) -> Tensor:
        """See Ops.whole_segments."""
        if self.mesh.context == 1:
            return segments
        return c.gathered(segments, 1, self.groups["context"])

    def positions(self, length: int, like: Tensor) -> Tensor:
        """See Ops.positions: counted from the first token of the whole row."""
        return self.base.positions(length, like) + self.place["context"] * length

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
        if self.mesh.context == 1 or slots is not None:
            return self.base.attention_mask(like, keys, segments=segments, slots=slots, **settings)
        slots, whole = self.positions(keys, like), keys * self.mesh.context
        mask = self.base.attention_mask(like, whole, slots=slots, **settings)
        if segments is None:
            return mask
        other = segments[:, :, None] != self.whole_segments(segments)[:, None, :]
        return replace(mask, bias=mask.bias.masked_fill(other[:, None], float("-inf")))


def _dimension(axis: str, split: tuple[tuple[str, ...], ...]) -> int | None:
    return next((dim for dim, axes in enumerate(split) if axis in axes), None)
