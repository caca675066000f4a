"""The training step in JAX: one jitted function over global arrays that are sharded over a mesh.

Parameters and optimizer state are sharded by `core.parallel.mesh`; a batch has the shape
[micro-batches, rows, tokens], rows sharded over data, fsdp and expert, tokens over context. The
sums that jit computes are global, so any mesh makes the same update as one device. Every process
passes all rows of a batch (`row_part` is the whole) and copies those that its devices need; a batch
is padded with rows without weight, so that shapes stay the same from step to step.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from sabia.core.errors import UsageError
from sabia.core.ops.base import Ops
from sabia.core.ops.precision import Precision, precision_at
from sabia.core.parallel.build_ops import build_ops
from sabia.core.parallel.mesh import ROW_AXES, Mesh, weight_split
from sabia.core.parallel.mesh_ops_jax import MeshOps, device_mesh
from sabia.core.parallel.world import World
from sabia.core.train.checkpoint.pieces import Piece
from sabia.core.train.checkpoint.pieces_jax import jax_pieces
from sabia.core.train.guards import NO_LIMITS
from sabia.core.train.optimizer.config import COUNT, state_parts, state_shapes
from sabia.core.train.optimizer.updates_jax import apply_jax, init_jax
from sabia.core.train.stepper import (
    Batch,
    Evaluation,
    ReadPiece,
    Setup,
    StepResult,
    balanced_bias,
    bias_names,
)

Array = jax.Array
Tree = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Parameters, optimizer state by name and part, and the number of updates."""

    params: Tree
    parts: dict[str, Tree]
    count: Array


class JaxStepper:
    """See `core.train.stepper.Stepper`."""

    fixed_shapes = True
    no_sharing = "programs of JAX have one shape"
    row_part = (0, 1)

    def __init__(self, setup: Setup, params: Mapping[str, np.ndarray], mesh: Mesh) -> None:
        if mesh.pipe > 1:
            raise UsageError(f"--mesh: pipe={mesh.pipe} (expected 1: pipelines run on torch only)")
        self.setup, self.spec, self.config, self.mesh = setup, setup.spec, setup.optimizer, mesh
        self.micro_batch, self.devices = setup.micro_batch, device_mesh(mesh, setup.world)
        self.table, self.rules = setup.table(), setup.rules()
        self._biases = bias_names(setup.spec) if setup.bias_rate else ()
        layout = self._layout()
        params_on_devices = {
            k: self._sharded(layout.params[k], v.shape, v.__getitem__) for k, v in params.items()
        }
        init = jax.jit(
            lambda: init_jax({k: t.shape for k, t in self.table.items()}, self.rules),
            out_shardings=layout.parts,
        )
        count = self._sharded(layout.count, (), lambda _: np.int32(0), np.int32)
        self._state, self._layouts = TrainState(params_on_devices, init(), count), layout
        self._jitted: dict[Any, Any] = {}

    # -- placing

    def _sharding(self, *split: object) -> NamedSharding:
        return NamedSharding(self.devices, PartitionSpec(*split))

    def _layout(self) -> Any:
        """The sharding of every array of a TrainState."""
        params: dict[str, Any] = {}
        parts: dict[str, Any] = {}
        replicated: Any = self._sharding()
        for name, tensor in self.table.items():
            split = self._sharding(*weight_split(tensor, self.mesh))
            params[name] = split
            kept = state_parts(self.rules[name], tensor.shape)
            parts[name] = {k: replicated if whole else split for k, (_, whole) in kept.items()}
        return TrainState(params, parts, replicated)

    @staticmethod
    def _sharded(
        sharding: Sharding, shape: tuple[int, ...], read: Callable[[Any], Any], kind: Any = None
    ) -> Array:
        kind = kind or np.float32

        def piece(index: Any) -> np.ndarray:
            return np.array(read(index), kind)  # a copy, because the source may change later

        return jax.make_array_from_callback(tuple(shape), sharding, piece)

    def _sharded_batch(self, batch: Batch) -> Tree:
        """[rows, …] on the host → [micro-batches, rows, …] sharded over the mesh."""
        rows, length = batch["input_ids"].shape  # [R, T]
        per_device = -(-rows // self.mesh.rows)  # rounded up
        count = -(-per_device // (self.micro_batch or per_device))  # micro-batches
        size = -(-per_device // count)
        return {
            key: self._spread(_padded(value, count * size * self.mesh.rows), count, length)
            for key, value in batch.items()
        }

    def _spread(self, value: np.ndarray, count: int, length: int) -> Array:
        value = value.reshape(count, -1, *value.shape[1:])
        over_tokens = value.ndim > 2 and value.shape[2] == length
        sharding = self._sharding(None, ROW_AXES, "context" if over_tokens else None)
        return jax.make_array_from_callback(value.shape, sharding, value.__getitem__)

    # -- the step

    @property
    def params(self) -> Tree:
        """Current parameters."""
        return self._state.params

    def step(
        self,
        batch: Batch,
        lr: float,
        extra_sums: np.ndarray | None = None,
        *,
        limits: tuple[float, float] = NO_LIMITS,
        number: int = 0,
    ) -> StepResult:
        """See Stepper.step."""
        settings = {"lr": np.float32(lr), "limits": np.array(limits, np.float32)}
        settings["number"] = np.int32(number)
        update = self._function("update", self._precision(number))
        self._state, sums = update(self._state, self._sharded_batch(batch), settings)
        fetched = _fetch(sums)
        updated = bool(fetched.pop("updated"))
        if extra_sums is not None:
            extra_sums = _sum_over_processes(extra_sums, self.setup.world)
        return StepResult.of_sums(fetched, updated=updated, extra_sums=extra_sums)

    def evaluate(self, batch: Batch) -> Evaluation:
        """See Stepper.evaluate."""
        measure = self._function("measure", self.setup.precision.precision)
        return Evaluation.of_sums(_fetch(measure(self._state.params, self._sharded_batch(batch))))

    def gradients(self, batch: Batch, number: int = 0) -> dict[str, np.ndarray]:
        """See Stepper.gradients."""
        gradients = self._function("gradients", self._precision(number))
        rows = self._sharded_batch(batch)
        gradient_sums, sums = gradients(self._state.params, rows, np.int32(number))
        return {k: np.asarray(g) / float(sums["weight"]) for k, g in gradient_sums.items()}

    def _precision(self, number: int) -> Precision:
        return precision_at(number, self.setup.precision)

    def _function(self, name: str, precision: Precision) -> Any:
        """The jitted function of that name in a precision, compiled at its first call."""
        if (name, precision) not in self._jitted:
            run = _Run(self, precision)
            whole = self._sharding()
            options: dict[str, Any] = {"out_shardings": whole} if name == "measure" else {}
            if name == "update":
                options = {"donate_argnums": 0, "out_shardings": (self._layouts, whole)}
            self._jitted[name, precision] = jax.jit(getattr(run, name), **options)
        return self._jitted[name, precision]

    def whole_params(self) -> Tree:
        """All parameters on this process's first device; those of one device until the next step
        only, which takes their memory."""
        if self.mesh.size == 1:
            return dict(self.params)
        device = jax.local_devices()[0]
        return {name: jax.device_put(array, device) for name, array in self.params.items()}

    # -- state

    def _arrays(self) -> Tree:
        """The state by checkpoint name."""
        shapes = {name: tensor.shape for name, tensor in self.table.items()}
        arrays: Tree = {}
        for key in state_shapes(shapes, self.rules):
            part, _, name = key.partition("/")
            arrays[key] = self.params[name] if part == "param" else self._state.parts[name][part]
        return arrays | {COUNT: self._state.count}

    def pieces(self) -> Iterator[Piece]:
        """See Stepper.pieces."""
        for name, array in self._arrays().items():
            yield from jax_pieces(name, array, np.int64 if name == COUNT else None)

    def load(self, read: ReadPiece) -> None:
        """See Stepper.load."""
        loaded = {}
        for name, array in self._arrays().items():
            kind = np.int32 if name == COUNT else np.float32
            loaded[name] = self._sharded(
                array.sharding, array.shape, partial(_read_piece, read, name, array.shape), kind
            )
        params = {k: loaded.pop(f"param/{k}") for k in self.params}
        parts = {
            name: {part: loaded[f"{part}/{name}"] for part in held}
            for name, held in self._state.parts.items()
        }
        self._state = TrainState(params, parts, loaded[COUNT])


class _Run:
    """The functions of a stepper that are jitted, for one precision."""

    def __init__(self, stepper: JaxStepper, precision: Precision) -> None:
        self.setup, self.rules, self.biases = stepper.setup, stepper.rules, stepper._biases
        self.bf16_weights = stepper.setup.bf16_weights(precision)
        mesh, setup = None, stepper.setup
        if stepper.mesh.size > 1:
            mesh = partial(MeshOps, stepper.table, stepper.mesh, stepper.devices)
        settings: Any = {"precision": precision, "seed": setup.seed, "adapters": setup.lora}
        self.ops = build_ops("jax", stepper.spec, **settings, mesh=mesh)

    def loss(self, params: Tree, micro: Tree, ops: Ops) -> Any:
        """(loss sum, all sums) of a micro-batch."""
        # fp32 master weights, BF16 for the computation
        rounded = self.bf16_weights
        params = {k: p.astype(jnp.bfloat16) if k in rounded else p for k, p in params.items()}
        loss, weight, extras = self.setup.loss(self.setup.spec, params, micro, ops)
        return loss, {"loss": loss, "weight": weight, **extras}

    def gradients(self, params: Tree, batch: Tree, number: Array) -> tuple[Tree, Tree]:
        """Gradients of the trained parameters and the loss's sums, over all micro-batches."""
        # differentiate only by what is trained (LoRA, --freeze)
        trained = {k: p for k, p in params.items() if self.rules[k].trained}
        fixed = {k: p for k, p in params.items() if k not in trained}

        def one(micro: Tree, part: Array) -> Any:
            ops = self.ops.at(number, part)
            return jax.grad(lambda p: self.loss(fixed | p, micro, ops), has_aux=True)(trained)

        return _accumulate(one, batch)

    def update(self, state: TrainState, batch: Tree, settings: Tree) -> tuple[TrainState, Tree]:
        """(state, sums) after a step; the state is unchanged if the step is refused."""
        gradients, sums = self.gradients(state.params, batch, settings["number"])
        # all sums are still to be divided by the global weight
        norm_sum = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))
        safe = jnp.maximum(sums["weight"], 1e-30)
        norm = norm_sum / safe
        clip = self.setup.optimizer.clip_norm
        # clip by the global norm: g · min(1, clip / ‖g‖)
        scale = jnp.where(norm > clip, clip / norm, 1.0) if clip else 1.0
        gradients = jax.tree.map(lambda g: g * (scale / safe), gradients)
        given = (state.params, gradients, state.parts, self.rules, state.count, settings["lr"])
        params, parts = apply_jax(*given)
        new = TrainState(self.balanced(params, sums), parts, state.count + 1)
        most_loss, most_norm = settings["limits"]
        within = (sums["loss"] / safe <= most_loss) & (norm <= most_norm)  # NaN is not
        updated = (sums["weight"] > 0) & within & jnp.isfinite(norm_sum + sums["loss"])
        # a refused step keeps parameters, optimizer state and count
        state = jax.tree.map(lambda a, b: jnp.where(updated, a, b), new, state)
        return state, sums | {"grad_norm": norm_sum, "updated": updated}

    def balanced(self, params: Tree, sums: Tree) -> Tree:
        """Parameters with the routers' biases adjusted by the expert loads of the step."""
        moved = dict(params)
        for row, name in enumerate(self.biases):
            if name is not None:
                load = sums["expert_load"][row]  # [E]
                moved[name] = balanced_bias(params[name], load, self.setup.bias_rate)
        return moved

    def measure(self, params: Tree, batch: Tree) -> Tree:
        """The sums without gradients."""
        return _accumulate(lambda micro, part: self.loss(params, micro, self.ops.at(0))[1], batch)


def _read_piece(
    read: ReadPiece, name: str, shape: tuple[int, ...], index: tuple[slice, ...]
) -> np.ndarray:
    ranges = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return read(name, tuple(r[0] for r in ranges), tuple(r[1] - r[0] for r in ranges))


def _sum_over_processes(extra_sums: np.ndarray, world: World) -> np.ndarray:
    """Numbers of this process, summed over all."""
    if world.size == 1:
        return np.asarray(extra_sums)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(np.asarray(extra_sums, np.float32))).sum(0)


def _accumulate(function: Callable[[Any, Any], Any], batch: Tree) -> Any:
    """Sum of function(micro-batch, its index); a single micro-batch needs no loop."""
    count = len(next(iter(batch.values())))
    first = {k: v[0] for k, v in batch.items()}
    if count == 1:
        return function(first, 0)
    shapes = jax.eval_shape(function, first, 0)
    nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def add(total: object, given: tuple[Tree, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(*given)), None

    return jax.lax.scan(add, nothing, (batch, jnp.arange(count)))[0]


def _padded(value: np.ndarray, rows: int) -> np.ndarray:
    missing = rows - len(value)
    if not missing:
        return np.ascontiguousarray(value)
    return np.concatenate([value, np.zeros((missing, *value.shape[1:]), value.dtype)])


def _fetch(sums: Mapping[str, Array]) -> dict[str, Any]:
    sums = jax.device_get(dict(sums))
    return {k: float(v) if np.ndim(v) == 0 else np.asarray(v) for k, v in sums.items()}
