"""The training step in JAX: one jitted function, optax's AdamW, batches sharded over `data`.

Parameters and optimizer state are replicated on a mesh of one axis; a batch is laid out as
[micro-batches, rows, ...] with its rows over the devices of all processes, and the sums that jit
computes are global, so N devices make the update of one. Rows are padded with rows without weight
to a multiple of the devices, so shapes stay the same from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sabia.core.errors import UsageError
from sabia.core.model.backend import load_ops
from sabia.core.parallel.launch import World
from sabia.core.spec.model import ModelSpec
from sabia.core.train.losses import Loss
from sabia.core.train.optimizer import COUNT, OptimizerConfig, check_state, decays, state_names
from sabia.core.train.stepper import Batch, LazyState, weight_names

Array = jax.Array


@struct.dataclass
class TrainState:
    """Parameters and the optimizer's moments; one pytree that a step takes and gives back."""

    params: dict[str, Array]
    moments: optax.ScaleByAdamState


class JaxStepper:
    """See `core.train.stepper.Stepper`."""

    fixed_shapes = True

    def __init__(
        self,
        spec: ModelSpec,
        params: Mapping[str, np.ndarray],
        loss: Loss,
        config: OptimizerConfig,
        precision: str,
        micro_batch: int,
        world: World,
        devices: int,
    ) -> None:
        self.spec, self.config, self.world = spec, config, world
        self.micro_batch = micro_batch
        self.mesh = _mesh(world, devices)
        self.local = len(self.mesh.local_devices)
        self._adam = optax.scale_by_adam(config.beta1, config.beta2, config.eps)
        self._loss = _bind(spec, loss, precision)
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        put = partial(jax.device_put, device=everywhere)
        held = {k: put(np.asarray(v, np.float32)) for k, v in params.items()}
        moments = jax.jit(self._adam.init, out_shardings=everywhere)(held)
        self._state = TrainState(held, moments)
        self._put = put
        self._step = jax.jit(self._update, donate_argnums=0, out_shardings=everywhere)
        self._evaluate = jax.jit(self._measure, out_shardings=everywhere)

    @property
    def params(self) -> dict[str, Array]:
        """Current parameters."""
        return self._state.params

    def step(self, batch: Batch, lr: float, tallies: np.ndarray | None = None) -> dict[str, Any]:
        """See Stepper.step."""
        mine = np.zeros((self.local, 0 if tallies is None else len(tallies)), np.float32)
        mine[:1] = 0 if tallies is None else tallies
        counted = self._global(mine, PartitionSpec("data"))
        self._state, sums = self._step(self._state, self._lay_out(batch), np.float32(lr), counted)
        found = _fetch(sums)
        found["updated"] = bool(found["updated"])
        if tallies is None:
            del found["tallies"]
        return _means(found, ("loss", "grad_norm"))

    def evaluate(self, batch: Batch) -> dict[str, Any]:
        """See Stepper.evaluate."""
        return _means(_fetch(self._evaluate(self._state.params, self._lay_out(batch))), ("loss",))

    def _lay_out(self, batch: Batch) -> dict[str, Array]:
        """[rows, ...] of this process → [micro-batches, rows, ...] over the mesh."""
        rows = len(next(iter(batch.values())))
        per_device = -(-rows // self.local)
        size = min(self.micro_batch or per_device, per_device)
        count = -(-per_device // size)
        whole = count * size * self.local
        return {
            key: self._global(
                _padded(value, whole).reshape(count, -1, *value.shape[1:]),
                PartitionSpec(None, "data"),
            )
            for key, value in batch.items()
        }

    def _global(self, value: np.ndarray, spec: PartitionSpec) -> Array:
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_process_local_data(sharding, value)

    def _sums(self, params: Any, micro: Any) -> Any:
        loss, weight, extras = self._loss(params, micro)
        return loss, {"loss": loss, "weight": weight, **extras}

    def _update(
        self, state: TrainState, batch: dict[str, Array], lr: Array, tallies: Array
    ) -> tuple[TrainState, dict[str, Array]]:
        gradient = jax.grad(self._sums, has_aux=True)
        gradients, sums = _accumulate(partial(gradient, state.params), batch)
        norm_sum = optax.tree.norm(gradients)
        weight = sums["weight"]
        safe = jnp.maximum(weight, 1e-30)
        norm = norm_sum / safe
        clip = self.config.clip_norm
        scale = jnp.where(norm > clip, clip / norm, 1.0) if clip else 1.0
        gradients = jax.tree.map(lambda g: g * (scale / safe), gradients)
        updates, moments = self._adam.update(gradients, state.moments)
        marked, decay = decays(self.spec), self.config.weight_decay
        params = {
            k: p - lr * (updates[k] + (decay * p if marked[k] else 0.0))
            for k, p in state.params.items()
        }
        updated = (weight > 0) & jnp.isfinite(norm_sum + sums["loss"])
        new = TrainState(params, moments)
        state = jax.tree.map(lambda a, b: jnp.where(updated, a, b), new, state)
        sums |= {"grad_norm": norm_sum, "updated": updated, "tallies": tallies.sum(0)}
        return state, sums

    def _measure(self, params: Any, batch: dict[str, Array]) -> dict[str, Array]:
        return _accumulate(lambda micro: self._sums(params, micro)[1], batch)

    def state(self) -> Mapping[str, np.ndarray]:
        """See Stepper.state."""
        return LazyState(state_names(self.params), self._fetch_state)

    def _fetch_state(self, name: str) -> np.ndarray:
        moments = self._state.moments
        if name == COUNT:
            return np.array(int(moments.count), np.int64)
        part, _, key = name.partition("/")
        return np.asarray({"param": self.params, "m": moments.mu, "v": moments.nu}[part][key])

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """See Stepper.load."""
        names = list(self.params)
        check_state(state, {k: tuple(p.shape) for k, p in self.params.items()})
        param, m, v = (
            {k: self._put(np.array(state[f"{part}/{k}"])) for k in names}
            for part in ("param", "m", "v")
        )
        count = self._put(np.array(state[COUNT], np.int32))
        self._state = TrainState(param, optax.ScaleByAdamState(count, m, v))


def _mesh(world: World, devices: int) -> Mesh:
    found = jax.devices()
    if world.size == 1:
        if devices > len(found):
            raise UsageError(
                f"--mesh: data={devices} with {len(found)} {found[0].platform} devices"
            )
        found = found[: devices or len(found)]
    return Mesh(np.array(found), ("data",))


def _bind(spec: ModelSpec, loss: Loss, precision: str) -> Callable[..., Any]:
    ops = load_ops("jax")
    narrow = weight_names(spec) if precision == "bf16" else frozenset()

    def bound(params: dict[str, Array], batch: dict[str, Array]) -> Any:
        if narrow:
            params = {k: p.astype(jnp.bfloat16) if k in narrow else p for k, p in params.items()}
        return loss(spec, params, batch, ops)

    return bound


def _accumulate(function: Callable[[Any], Any], batch: dict[str, Array]) -> Any:
    """Sum of function(micro-batch) over the first axis; one micro-batch costs no loop."""
    first = {k: v[0] for k, v in batch.items()}
    if len(next(iter(batch.values()))) == 1:
        return function(first)
    shapes = jax.eval_shape(function, first)
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def add(total: Any, micro: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(micro)), None

    return jax.lax.scan(add, nothing, batch)[0]


def _padded(value: np.ndarray, rows: int) -> np.ndarray:
    missing = rows - len(value)
    if not missing:
        return np.ascontiguousarray(value)
    return np.concatenate([value, np.zeros((missing, *value.shape[1:]), value.dtype)])


def _fetch(sums: Mapping[str, Array]) -> dict[str, Any]:
    found = jax.device_get(dict(sums))
    return {k: float(v) if np.ndim(v) == 0 else np.asarray(v) for k, v in found.items()}


def _means(found: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    weight = max(found["weight"], 1e-30)
    return found | {name: found[name] / weight for name in names}
