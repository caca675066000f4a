"""The operations of a JAX mesh: sharding constraints for the compiler, and explicit exchanges.

Arrays are global; `shard_map` is used where the partitioner would do needless work: the lookup and
the loss of a vocabulary that is split over `tensor`, and the mixture of experts; and around
kernels, which it cannot partition: attention by sabia.kernels, where available. With experts
the tokens of the devices along `expert` are gathered, each device takes the assignments to its own
experts, and the results are summed and scattered back: exact and with static shapes, but with rows
for the worst case (all tokens at one device's experts), which `ragged_dot` does not multiply.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from sabia.core.errors import UsageError
from sabia.core.ops.base import Stage
from sabia.core.ops.device_jax import JaxOps
from sabia.core.ops.experts_jax import DispatchPlan, biased, combine, dispatch
from sabia.core.ops.product import Matrix, check_sizes
from sabia.core.parallel.mesh import (
    RANK_ORDER,
    ROW_AXES,
    TOKEN_AXES,
    Mesh,
    activation_split,
    weight_split,
)
from sabia.core.parallel.world import World
from sabia.core.spec.tensors import TensorSpec
from sabia.kernels.attention.jax_impl import Mask

Array = jax.Array


def device_mesh(mesh: Mesh, world: World) -> JaxMesh:
    """The devices of JAX as a mesh. UsageError if there are too few."""
    devices = jax.devices()
    if mesh.size > len(devices) or (world.size > 1 and mesh.size != len(devices)):
        there = f"{len(devices)}, {devices[0].platform}"
        raise UsageError(f"--mesh: {mesh} needs {mesh.size} devices (there are {there})")
    return JaxMesh(np.array(devices[: mesh.size]).reshape(mesh.shape), RANK_ORDER)


class MeshOps(JaxOps):
    """The operations of one device, over the devices of a mesh."""

    def __init__(
        self,
        table: Mapping[str, TensorSpec],
        mesh: Mesh,
        devices: JaxMesh,
        stage: Stage | None = None,
    ) -> None:
        super().__init__(stage)
        self.mesh, self.devices = mesh, devices
        self.splits = {name: weight_split(tensor, mesh) for name, tensor in table.items()}
        self.split_tokens = any(mesh.along(axis) > 1 for axis in TOKEN_AXES)

    def _constrain(self, x: Array, spec: PartitionSpec) -> Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.devices, spec))

    def _mapped(
        self, function: Callable[..., Any], inside: object, outside: object
    ) -> Callable[..., Any]:
        return jax.shard_map(
            function, mesh=self.devices, in_specs=inside, out_specs=outside, check_vma=False
        )

    # -- layout

    def _gathered(self, name: str) -> PartitionSpec:
        """The split of a weight during its computation: not over fsdp."""
        split = self.splits.get(name, ())
        return PartitionSpec(*(None if axis == "fsdp" else axis for axis in split))

    def gather(self, weights: Mapping[str, Array], names: Mapping[str, str]) -> dict[str, Array]:
        """See Ops.gather; the gradient of the constraint scatters what it sums."""
        return {
            short: self._constrain(weight, self._gathered(names[short]))
            for short, weight in weights.items()
        }

    def shard(self, x: Array, axes: tuple[str | None, ...]) -> Array:
        """See Ops.shard."""
        check_sizes("shard", x, axes, self.sizes)
        split = activation_split(axes, self.mesh)
        return self._constrain(x, PartitionSpec(*(part or None for part in split)))

    def relayout(
        self, x: Array, now: tuple[str | None, ...], then: tuple[str | None, ...]
    ) -> Array:
        """See Ops.relayout; an axis that moves to another dimension is one all-to-all."""
        # moved: (mesh axis, the dimension that it splits now, the one that it is to split)
        before, behind = (activation_split(axes, self.mesh) for axes in (now, then))
        moved = [
            (axis, source, target)
            for source, axes in enumerate(before)
            for axis in axes
            for target, split in enumerate(behind)
            if axis in split and target != source
        ]
        if not moved:
            return self.shard(x, then)

        def exchange(x: Array) -> Array:
            for axis, source, target in moved:
                x = jax.lax.all_to_all(x, axis, target, source, tiled=True)
            return x

        inside, outside = (PartitionSpec(*(part or None for part in s)) for s in (before, behind))
        return self._mapped(exchange, (inside,), outside)(x)

    # -- vocabulary

    def embedding(self, table: Array, ids: Array) -> Array:
        """See Ops.embedding."""
        if self.splits["embed"][0] is None:
            return super().embedding(table, ids)
        ids_split = PartitionSpec(ROW_AXES, "context")

        def look_up(part: Array, ids: Array) -> Array:
            # each id is in the part of one device; the others add zeros: x[B, T, D]
            rows = ids - jax.lax.axis_index("tensor") * part.shape[0]
            own = (rows >= 0) & (rows < part.shape[0])
            x = JaxOps.embedding(self, part, jnp.where(own, rows, 0))
            return jax.lax.psum(jnp.where(own[..., None], x, 0), "tensor")

        split = (PartitionSpec("tensor"), ids_split)
        return self._mapped(look_up, split, ids_split)(table, ids)

    def linear_cross_entropy(
        self, hidden: Array, weight: Array, targets: Array, **settings: Any
    ) -> tuple[Array, Array]:
        """See Ops.linear_cross_entropy; every device computes those of its own tokens."""
        head = self.splits.get("head", self.splits["embed"])[0]
        tokens = PartitionSpec(ROW_AXES, "context")
        losses = partial(super().linear_cross_entropy, **settings)
        if head is not None:
            losses = partial(_split_losses, losses)
        mapped = self._mapped(losses, (tokens, PartitionSpec(head), tokens), (tokens, tokens))
        return mapped(hidden, weight, targets)

    # -- attention

    def attention(
        self, q: Array, k: Array, v: Array, mask: Mask, sinks: Array | None = None, **settings: Any
    ) -> Array:
        """See Ops.attention; kernels, which the compiler cannot partition, see this device's rows,
        heads and queries, and the keys of whole rows."""
        compute: Callable[..., Array] = partial(super().attention, **settings)
        if jax.default_backend() == "cpu" and self.requested["attention"] is None:
            return compute(q, k, v, mask, sinks=sinks)

        def attend(q: Array, k: Array, v: Array, mask: Mask, sinks: Array | None) -> Array:
            if self.mesh.context > 1:  # the position of this device's first query in the whole row
                start = jax.lax.axis_index("context") * q.shape[1]
                mask = replace(mask, start=start, offset=None)
            return compute(q, k, v, mask, sinks=sinks)

        queries = PartitionSpec(ROW_AXES, "context", "tensor")
        keys = PartitionSpec(ROW_AXES, None, "tensor")
        inside = (queries, keys, keys, _mask_split(mask), PartitionSpec("tensor"))
        return self._mapped(attend, inside, queries)(q, k, v, mask, sinks)

    # -- experts

    def dispatch(self, y: Array, chosen: Array, experts: int) -> tuple[Array, Any]:
        """See Ops.dispatch; rows[devices·M, D] and a plan, both split over devices."""
        if not self.split_tokens:
            return dispatch(y, chosen, experts)
        own = experts // self.mesh.expert  # experts of one device

        def send(y: Array, chosen: Array) -> tuple[Array, Any]:
            if self.mesh.expert == 1:
                return dispatch(y, chosen, experts)
            y, chosen = (_along_experts(x) for x in (y, chosen))
            # count experts from this device's first; those of other devices are one more, `own`
            chosen = chosen - jax.lax.axis_index("expert") * own
            chosen = jnp.where((chosen >= 0) & (chosen < own), chosen, own)
            rows, plan = dispatch(y, chosen, own + 1)
            plan = plan._replace(
                experts=jnp.minimum(plan.experts, own - 1), counts=plan.counts[:own]
            )
            return _own_rows(rows, plan), plan

        tokens, rows = PartitionSpec(ROW_AXES, "context"), PartitionSpec(TOKEN_AXES)
        return self._mapped(send, (tokens, tokens), (rows, rows))(y, chosen)

    def grouped(self, rows: Array, matrix: Matrix, plan: DispatchPlan) -> Array:
        """See JaxOps.grouped."""
        compute, on_tpu = super().grouped, jax.default_backend() == "tpu"
        kernel = on_tpu or self.requested["grouped_matmul"] is not None
        if not self.split_tokens and not kernel:
            return compute(rows, matrix, plan)
        # weight[E, out, in] is split as (expert, wide, narrow): a split `in` leaves partial sums
        layout = self._gathered(matrix.name)
        _, wide, narrow = (*layout, None, None, None)[:3]
        by_rows = PartitionSpec(TOKEN_AXES)

        def multiply(rows: Array, weight: Array, plan: DispatchPlan, bias: Array | None) -> Array:
            out = compute(rows, Matrix(matrix.name, weight), plan)
            out = out if narrow is None else jax.lax.psum(out, narrow)
            return biased(out, bias, plan)

        inside = (PartitionSpec(TOKEN_AXES, narrow), layout, by_rows, PartitionSpec("expert", wide))
        mapped = self._mapped(multiply, inside, PartitionSpec(TOKEN_AXES, wide))
        return mapped(rows, matrix.weight, plan, matrix.bias)

    def combine(self, rows: Array, plan: DispatchPlan, shares: Array) -> Array:
        """See Ops.combine."""
        if not self.split_tokens:
            return combine(rows, plan, shares)

        def add_up(rows: Array, plan: DispatchPlan, shares: Array) -> Array:
            if self.mesh.expert == 1:
                return combine(rows, plan, shares)
            # out[B · devices, T, D]: this device's experts for the tokens of all devices
            out = combine(_own_rows(rows, plan), plan, _along_experts(shares))
            return jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True)

        tokens, by_rows = PartitionSpec(ROW_AXES, "context"), PartitionSpec(TOKEN_AXES)
        return self._mapped(add_up, (by_rows, by_rows, tokens), tokens)(rows, plan, shares)


def _along_experts(x: Array) -> Array:
    """The rows of all devices along `expert`."""
    return jax.lax.all_gather(x, "expert", axis=0, tiled=True)


def _own_rows(rows: Array, plan: DispatchPlan) -> Array:
    """Rows of this device's experts; all other rows, which follow them in the order, are 0."""
    return jnp.where((jnp.arange(len(rows)) < plan.counts.sum())[:, None], rows, 0)


def _mask_split(mask: Any) -> Any:
    """The split of a kernel's mask: the queries' part over context, the keys' part whole."""
    rows = None if mask.first.shape[0] == 1 else ROW_AXES
    whole = PartitionSpec(rows)
    return replace(
        mask,
        first=PartitionSpec(rows, "context"),
        until=whole,
        runs=None if mask.runs is None else whole,
        start=PartitionSpec(),
        last=None if mask.last is None else PartitionSpec(rows, "context"),
    )


def _split_losses(
    losses: Callable[..., tuple[Array, Array]], hidden: Array, weight: Array, targets: Array
) -> tuple[Array, Array]:
    """(-log p, log-sum-exp) of this device's tokens with its part of the vocabulary.

    lse = log Σ exp(lse of each part); a target's score comes from the part that contains it.
    """
    rows = targets - jax.lax.axis_index("tensor") * weight.shape[0]
    own = (rows >= 0) & (rows < weight.shape[0])
    nll, lse = losses(hidden, weight, jnp.where(own, rows, -1))  # [B, T] each
    # subtract the largest lse, so that exp cannot overflow
    largest = jax.lax.pmax(jax.lax.stop_gradient(lse), "tensor")
    parts = jnp.stack((jnp.exp(lse - largest), jnp.where(own, lse - nll, 0.0)))
    total, score = jax.lax.psum(parts, "tensor")
    lse = largest + jnp.log(total)
    return jnp.where(targets >= 0, lse - score, 0.0), lse
