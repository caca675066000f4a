"""The training step in torch: autograd over the shared forward pass, one device per process.

Each process holds its shards of parameters and optimizer state (core.train.stepper_torch_shards)
and computes with operations wrapped for its rank in the mesh (ShardedLoss), so that the losses are
written once. After the backward pass, gradients are summed over the processes
that saw other tokens, and one small all-reduce sums loss, weight, extras, extra_sums and the
squared gradient norm: so every process makes the same decision whether to update, and N processes
make the same update as one.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sabia.core.errors import UsageError
from sabia.core.model.storage.safetensors_file import release_pages
from sabia.core.numerics.optimizers import OPTIMIZERS
from sabia.core.ops.base import Array, Stage, is_stored
from sabia.core.ops.device_torch import default_device
from sabia.core.ops.precision import Precision, precision_at
from sabia.core.parallel.build_ops import build_ops, load_ops
from sabia.core.parallel.collectives_torch import OPS_GROUPS, Groups
from sabia.core.parallel.mesh import Mesh, check_fits, stage_layers, stages_of
from sabia.core.spec.model import ModelSpec
from sabia.core.train.checkpoint.pieces import Piece
from sabia.core.train.guards import NO_LIMITS
from sabia.core.train.losses.computed_tokens import computed_tokens, no_sharing, whole_rows
from sabia.core.train.optimizer.config import COUNT, state_parts, state_shapes
from sabia.core.train.optimizer.updates_torch import apply_torch, init_torch
from sabia.core.train.stepper import (
    Batch,
    Evaluation,
    ReadPiece,
    Setup,
    StepResult,
    balanced_bias,
    bias_names,
)
from sabia.core.train.stepper_torch_shards import Shards, lazy
from sabia.kernels.runtime.torch_support import allow_compilations, keep_freed_memory

Tensor = torch.Tensor


class ShardedLoss:
    """`sums(params, micro-batch)` of this process's shards, tokens and stage of a pipeline."""

    def __init__(
        self, setup: Setup, precision: Precision, groups: Groups, stage: Stage | None
    ) -> None:
        self.setup, mesh = setup, groups.mesh
        self.bf16_weights = setup.bf16_weights(precision)
        sharded: Any = None
        if mesh.size > mesh.data * mesh.pipe:
            from sabia.core.parallel.mesh_ops_torch import ExactMeshOps, MeshOps

            # MeshOps casts each layer's weights when it gathers them
            of_mesh = ExactMeshOps if setup.exact else MeshOps
            sharded = partial(of_mesh, setup.table(), groups, self.bf16_weights, torch.bfloat16)
            self.bf16_weights = frozenset()
        settings: Any = {"precision": precision, "seed": setup.seed, "adapters": setup.lora}
        settings["exact"] = setup.exact
        self.ops = build_ops("torch", setup.spec, **settings, mesh=sharded, stage=stage)
        if setup.compiled and mesh.size > mesh.data:
            raise UsageError(f"--compile with --mesh {mesh} (expected a mesh along data alone)")
        self.sums = _compiled(self._sums, setup.spec) if setup.compiled else self._sums

    def _sums(self, params: Mapping[str, Tensor], micro: Mapping[str, Tensor]) -> Any:
        """Sums (loss, weight, extras); call `ops.at` before, which selects the random bits."""
        if self.bf16_weights:
            params = {k: p.bfloat16() if k in self.bf16_weights else p for k, p in params.items()}
        return self.setup.loss(self.setup.spec, params, micro, self.ops)


def _compiled(function: Callable[..., Any], spec: ModelSpec) -> Callable[..., Any]:
    """torch.compile; fp32 copies of saved tensors are recomputed in the backward pass."""
    import torch._functorch.config as settings

    allow_compilations()  # for the shapes of batches
    # cached by the spec before tracing, because the compiler cannot trace the lock of a cache
    _ = spec.tensors(), spec.layer_names(), spec.ropes, spec.windows
    compiled = torch.compile(function, fullgraph=True)  # part by part it would be eager in part

    def call(*args: object) -> Any:
        with settings.patch(ban_recompute_materialized_backward=False):
            return compiled(*args)

    return call


if TYPE_CHECKING:
    from sabia.core.parallel.pipe_torch import Pipeline, PipelineStage

Tensors = dict[str, Tensor]
ALIGNED = 64  # bytes, as torch allocates on a CPU
WITHOUT_TOKENS = (
    "source",
    "completion_at",
    "slot",
    "sides",
    "reference",
)  # arrays of a batch whose second axis is never that of tokens


class TorchStepper:
    """See `core.train.stepper.Stepper`."""

    def __init__(self, setup: Setup, params: Mapping[str, np.ndarray], mesh: Mesh) -> None:
        self.setup, self.spec, self.world, self.mesh = setup, setup.spec, setup.world, mesh
        self.micro_batch = setup.micro_batch
        # parts of a row along `context` must be of one size
        self.fixed_shapes = setup.compiled or mesh.context > 1
        check_fits(self.spec, mesh)
        rank = self.world.rank
        self.row_part = (mesh.row_part(rank), mesh.rows)
        self.table, self.rules = setup.table(), setup.rules()
        layers = stage_layers(self.spec, mesh.pipe)
        stages = stages_of(self.spec, self.table, layers)
        self.shards = Shards(self.table, mesh, rank, stages)
        self.groups = Groups(mesh, rank, (*OPS_GROUPS, *self.shards.gradient_groups()))
        self._codes = setup.base_names()
        self.params: dict[str, Any] = self._local_shards(params)
        self.device = next(iter(self.params.values())).device
        self._whole_rows = whole_rows(setup, mesh, self.device.type)
        self.no_sharing = self._whole_rows or no_sharing(setup)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.parts = init_torch(self.params, self.rules, self.shards.shapes)
        self.count = 0
        self._pipeline: Pipeline | None = None
        self._stage: PipelineStage | None = None
        if mesh.pipe > 1:
            from sabia.core.parallel import pipe_torch

            own, last = layers[self.shards.stage], self.shards.stage == mesh.pipe - 1
            self._stage = pipe_torch.PipelineStage(own, last)
            self._pipeline = pipe_torch.Pipeline(mesh, rank, self.device, self.spec.tied)
        self._losses: dict[Precision, ShardedLoss] = {}
        self._biases = bias_names(self.spec) if setup.bias_rate else ()

    def _local_shards(self, params: Mapping[str, np.ndarray]) -> dict[str, Array]:
        """This process's shards on its device, some as codes; read one by one, so that no copy
        remains."""
        shards: dict[str, Any] = {}
        for name in filter(self.shards.here, self.table):
            whole: Any = params[name]
            if name in self._codes and self.setup.lora is not None:
                from sabia.core.numerics.frozen_base import stored_base
                from sabia.core.ops.stored_torch import codes_on

                matrix = whole if is_stored(whole) else np.asarray(whole)
                stored = stored_base(matrix, self.setup.lora.base)
                shards[name] = codes_on(stored, default_device())
                release_pages(whole)
                continue
            array = self.shards.cut(name, whole)
            tensor = load_ops("torch").to_device({name: array}, "float32")[name]
            # memory-mapped arrays may be unaligned
            if tensor.data_ptr() % ALIGNED:  # products of unaligned matrices round differently
                tensor = tensor.clone()
            release_pages(whole)
            shards[name] = tensor.requires_grad_(self.rules[name].trained)
        return shards

    def _loss(self, number: int | None) -> ShardedLoss:
        """The loss in the precision of step `number` (None: of the run)."""
        schedule = self.setup.precision
        precision = schedule.precision if number is None else precision_at(number, schedule)
        if precision not in self._losses:
            loss = ShardedLoss(self.setup, precision, self.groups, self._stage)
            self._losses[precision] = loss
        return self._losses[precision]

    # -- the step

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
        sums = self._passes(batch, self._loss(number), number, train=True)
        gradients = self._reduced_gradients()
        if extra_sums is not None:
            own = torch.as_tensor(extra_sums, dtype=torch.float32, device=self.device)
            sums["extra_sums"] = own
        fetched = _fetch(self._global(sums, gradients))
        totals, loads = fetched.pop("extra_sums", None), fetched.get("expert_load")
        result = StepResult.of_sums(fetched, updated=False, extra_sums=totals)
        loss, norm = result.loss, result.grad_norm
        within = loss <= limits[0] and norm <= limits[1]  # False for NaN
        if result.weight > 0 and within and math.isfinite(loss + norm):
            clip = self.setup.optimizer.clip_norm
            scale = clip / norm if clip and norm > clip else 1.0  # g · min(1, clip / ‖g‖)
            self._update(gradients, lr, scale / result.weight)
            self._balance(loads)
            result = replace(result, updated=True)
        self._forget_gradients()
        return result

    def _reduced_gradients(self) -> Tensors:
        """Gradients of this process's shards over all tokens."""
        trained = (item for item in self.params.items() if self.rules[item[0]].trained)
        gradients = {name: _gradient(parameter) for name, parameter in trained}
        # all-reduce over the processes that hold the same shard
        self.shards.sum_gradients(gradients, self.groups)
        if self._pipeline is not None and self.spec.tied and "embed" in gradients:
            self._pipeline.sum_tied(gradients["embed"])
        return gradients

    def _passes(self, batch: Batch, loss: ShardedLoss, number: int, train: bool) -> Tensors:
        """Sums over the micro-batches; with `train`, gradients accumulate in `.grad`."""
        micro_batches = self._micro_batches(batch)
        sums: Tensors = {}

        def choose_random_bits(index: int) -> None:
            # a different number in every process
            loss.ops.at(number, index * self.world.size + self.world.rank)

        if self._pipeline is not None and self._stage is not None:

            def forward(index: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                choose_random_bits(index)
                return loss.sums(self.params, micro_batches[index])

            for stage_sums in self._pipeline.run(micro_batches, self._stage, forward, train):
                _add(sums, stage_sums)
            return sums
        for index, micro in enumerate(micro_batches):
            choose_random_bits(index)
            total, weight, extras = loss.sums(self.params, micro)
            if train:
                total.backward()
            _add(sums, {"loss": total, "weight": weight, **extras})
        return sums

    def _update(self, gradients: dict[str, Tensor], lr: float, scale: float = 1.0) -> None:
        changes: dict[str, Any] = {"scale": scale}
        if self.mesh.size > self.mesh.data * self.mesh.pipe:
            changes |= {"gather": self._whole_matrices, "own": self._own_matrices}
        given = (self.params, gradients, self.parts, self.rules, self.count, lr)
        apply_torch(*given, **changes)
        self.count += 1

    def _whole_matrices(self, name: str, shard: Tensor) -> Tensor:
        return self.shards.whole(name, shard, self.groups, self._kept_split(name))

    def _own_matrices(self, name: str, whole: Tensor) -> Tensor:
        return self.shards.own(name, whole, self.groups, self._kept_split(name))

    def _kept_split(self, name: str) -> str:
        """The axis over which an update needs no whole matrices, '' for none."""
        return "expert" if OPTIMIZERS[self.rules[name].kind].keeps_expert_shards else ""

    @torch.no_grad()
    def _balance(self, loads: np.ndarray | None) -> None:
        """Adjust the routers' biases by the expert loads of the step."""
        if loads is None:
            return
        for row, name in enumerate(self._biases):
            if name in self.params:
                bias = self.params[name]
                load = torch.as_tensor(loads[row], device=self.device)
                bias.copy_(balanced_bias(bias, load, self.setup.bias_rate))

    def _forget_gradients(self) -> None:
        for name, parameter in self.params.items():
            if self.rules[name].trained:
                parameter.grad = None

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Evaluation:
        """See Stepper.evaluate."""
        sums = self._passes(batch, self._loss(None), 0, train=False)
        return Evaluation.of_sums(_fetch(self._global(sums)))

    def gradients(self, batch: Batch, number: int = 0) -> dict[str, np.ndarray]:
        """See Stepper.gradients."""
        sums = self._passes(batch, self._loss(number), number, train=True)
        gradients = self._reduced_gradients()
        weight = _fetch(self._global(sums))["weight"]
        whole = self._whole(gradients)
        self._forget_gradients()
        return {name: gradient.cpu().numpy() / weight for name, gradient in whole.items()}

    def whole_params(self) -> dict[str, Array]:
        """All parameters, unsharded, on this process's device; every process calls it."""
        codes = {name: self.params[name] for name in self._codes}
        tensors = {k: p.detach() for k, p in self.params.items() if k not in codes}
        return {**self._whole(tensors), **codes}

    @torch.no_grad()
    def _whole(self, shards: Tensors) -> Tensors:
        """Whole tensors of all stages."""
        whole = {name: self.shards.whole(name, x, self.groups) for name, x in shards.items()}
        if self._pipeline is not None:
            joined = self._pipeline.joined({name: x.cpu() for name, x in whole.items()})
            whole = {name: x.to(self.device) for name, x in joined.items()}
        return whole

    def _micro_batches(self, batch: Batch) -> list[Tensors]:
        if not self._whole_rows:
            batch = computed_tokens(batch, not self.no_sharing)
        length = batch["input_ids"].shape[1] if self.mesh.context > 1 else 0
        own = {k: self._own_tokens(k, v, length) for k, v in batch.items()}
        arrays = {k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in own.items()}
        rows = len(next(iter(arrays.values())))
        size = self.micro_batch or rows
        if not self.micro_batch and self._pipeline is not None:
            size = max(1, rows // (self.setup.stage_micro_batches * self.mesh.pipe))

        def on_device(part: slice) -> Tensors:
            return {k: v[part].to(self.device, non_blocking=True) for k, v in arrays.items()}

        return [on_device(slice(start, start + size)) for start in range(0, rows, size)]

    def _own_tokens(self, name: str, array: np.ndarray, length: int) -> np.ndarray:
        """This process's tokens of each row; `length`: tokens in a row (0: it has all of them)."""
        split = length and name not in WITHOUT_TOKENS and array.ndim > 1
        if not split or array.shape[1] != length:
            return array
        part = length // self.mesh.context  # tokens per process
        start = self.groups.coordinates["context"] * part
        return array[:, start : start + part]

    @torch.no_grad()
    def _global(self, sums: Tensors, gradients: Tensors | None = None) -> Tensors:
        """The sums over all processes and, as `grad_norm`, the norm of all gradients."""
        if self.mesh.size == 1:
            if gradients:
                norms = torch.stack(torch._foreach_norm(list(gradients.values())))
                sums["grad_norm"] = torch.linalg.vector_norm(norms)
            return sums
        if self.groups.coordinates["tensor"]:  # saw the same tokens as the first process
            sums = {k: v if k == "extra_sums" else torch.zeros_like(v) for k, v in sums.items()}
        if gradients is not None:
            # squared: the parts of all processes add up; the root follows the all-reduce
            sums["grad_norm"] = self.shards.square_sum(gradients, self.device)
        flat = torch.cat([t.reshape(-1).float() for t in sums.values()])
        torch.distributed.all_reduce(flat)
        parts = flat.split([t.numel() for t in sums.values()])
        global_sums = {k: part.view(sums[k].shape) for k, part in zip(sums, parts, strict=True)}
        if gradients is not None:
            global_sums["grad_norm"] = global_sums["grad_norm"].sqrt()
        return global_sums

    # -- state

    def _held(self) -> Iterator[tuple[str, str, Tensor, bool]]:
        """(name in the state, tensor's name, the local array, whether it is the whole array)."""
        for key in state_shapes(self.shards.shapes, self.rules):
            part, _, name = key.partition("/")
            if name in self._codes:
                continue
            if part == "param" and name in self.params:
                yield key, name, self.params[name], False
            elif name in self.params:
                whole = state_parts(self.rules[name], self.shards.shapes[name])[part][1]
                yield key, name, self.parts[name][part], whole

    def pieces(self) -> Iterator[Piece]:
        """See Stepper.pieces; the first process that holds a shard writes it."""
        for key, name, tensor, whole in self._held():
            if self.shards.owns(name, whole):
                location = {} if whole else self.shards.location(name)
                yield Piece(key, lazy(tensor.detach()), **location)
        if self.world.leads:
            yield Piece(COUNT, np.array(self.count, np.int64))

    @torch.no_grad()
    def load(self, read: ReadPiece) -> None:
        """See Stepper.load."""
        for key, name, tensor, whole in self._held():
            offset = (0,) * tensor.dim() if whole else self.shards.location(name)["offset"]
            tensor.copy_(torch.from_numpy(np.array(read(key, offset, tuple(tensor.shape)))))
        self.count = int(read(COUNT, (), ()))


def _add(sums: dict[str, Tensor], new: Mapping[str, Tensor]) -> None:
    for key, value in new.items():
        value = torch.as_tensor(value).detach().float()
        sums[key] = sums[key] + value if key in sums else value


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _fetch(sums: Mapping[str, Tensor]) -> dict[str, Any]:
    """All sums as NumPy arrays or floats, by one copy from the device."""
    device = next(iter(sums.values())).device
    flat = torch.cat([value.to(device).reshape(-1) for value in sums.values()]).cpu()
    parts = zip(sums.items(), flat.split([x.numel() for x in sums.values()]), strict=True)
    return {k: part.view(x.shape).numpy() if x.dim() else float(part) for (k, x), part in parts}
