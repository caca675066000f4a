"""One training step behind one interface for both backends.

A stepper holds parameters (fp32) and optimizer state on its devices. `step` splits its batch into
micro-batches, sums loss, weight and gradients over them and over all processes, divides once by
the global weight, clips by the global norm and updates. A batch without weight, or whose loss or
gradient is not finite, updates nothing. Every process passes its own rows of the global batch.

Experts are balanced without an auxiliary loss: after a step, the bias on the router score of an
expert whose load was below the mean of its layer is raised by `rate`, that of one above the mean is
lowered (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al. 2024, arXiv 2408.15664, algorithm
1). The bias changes which experts are selected, never their gates, and has no gradient: its tensors
are those with `trained` False. `state_bytes` counts what a run holds besides activations, before it
starts.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

from sabia.core.model.lora import LoraConfig, base_names, lora_tensors
from sabia.core.ops.base import Array
from sabia.core.ops.precision import Precision, PrecisionSchedule
from sabia.core.parallel.mesh import Mesh
from sabia.core.parallel.world import World
from sabia.core.spec.layers import Experts
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import TensorSpec
from sabia.core.train.checkpoint.pieces import Piece
from sabia.core.train.guards import NO_LIMITS
from sabia.core.train.losses.next_token import Loss
from sabia.core.train.optimizer.config import OptimizerConfig, Rule, rules, state_shapes

Batch = Mapping[str, np.ndarray]
LEAST_WEIGHT = 1e-30  # what a batch without weight is divided by
ReadPiece = Callable[[str, tuple[int, ...], tuple[int, ...]], np.ndarray]  # name, offset, shape

FP32 = 4  # bytes


@dataclass(frozen=True)
class Evaluation:
    """Sums over the tokens of all processes: loss is the mean by `weight`; extras: the sums that
    the loss returns besides, by name."""

    loss: float
    weight: float
    extras: Mapping[str, Any]

    @classmethod
    def of_sums(cls, sums: dict[str, Any], **more: Any) -> Self:
        """From the sums of loss and weight, and extras; of a step also the norm of the summed
        gradient, and its other fields."""
        loss, weight = sums.pop("loss"), sums.pop("weight")
        divisor = max(weight, LEAST_WEIGHT)
        if "grad_norm" in sums:
            more["grad_norm"] = sums.pop("grad_norm") / divisor
        return cls(loss / divisor, weight, sums, **more)


@dataclass(frozen=True)
class StepResult(Evaluation):
    """A step: grad_norm before clipping; whether it updated the parameters; extra_sums, numbers of
    each process summed over all."""

    grad_norm: float
    updated: bool
    extra_sums: np.ndarray | None = None


class Stepper(Protocol):
    """What `stepper_factory.make_stepper` returns."""

    spec: ModelSpec
    mesh: Mesh
    row_part: tuple[int, int]  # (index, count): which part of a batch's rows this process passes
    fixed_shapes: bool  # rows have one length: the step is compiled for it, or processes divide it
    micro_batch: int  # rows at a time on one device (0: all); may change between steps
    no_sharing: str  # why prompts are computed with each answer, '' where documents share them

    @property
    def params(self) -> dict[str, Array]:
        """Backend arrays, fp32, current."""

    def step(
        self,
        batch: Batch,
        lr: float,
        extra_sums: np.ndarray | None = None,
        *,
        limits: tuple[float, float] = NO_LIMITS,
        number: int = 0,
    ) -> StepResult:
        """Update once from this process's rows; `number`: index of the step, from 0.

        extra_sums: numbers of this process. Nothing is updated if loss or grad_norm exceeds its
        limit.
        """

    def evaluate(self, batch: Batch) -> Evaluation:
        """The loss over all processes, without gradients."""

    def gradients(self, batch: Batch) -> dict[str, np.ndarray]:
        """Unsharded gradients of the mean loss, by name; for comparisons."""

    def pieces(self) -> Iterator[Piece]:
        """This process's pieces of the state by the names of core.train.optimizer.config."""

    def whole_params(self) -> dict[str, Array]:
        """All parameters, unsharded, on this process's device, current until the next step; every
        process calls it."""

    def load(self, read: ReadPiece) -> None:
        """Load a state piece by piece; raises BadData if it belongs to another model."""


@dataclass(frozen=True)
class Setup:
    """The settings of a stepper, the same for both backends; see `make_stepper`.

    micro_batch: rows at a time on one device (0: all). compiled: use torch.compile (JAX always
    compiles). lora: train only adapters, initialised from `seed` if the parameters have none; with
    a `base` on torch, fp32 or bf16, uncompiled, with a mesh along data alone.
    bias_rate: see balanced_bias. heads: tensors besides those of the model, which the loss
    uses and trains. seed: of adapters, heads and stochastic rounding. world: the processes of the
    run (core.parallel.process_group). exact: with core.ops.exact_torch.
    """

    spec: ModelSpec
    loss: Loss
    optimizer: OptimizerConfig
    precision: PrecisionSchedule
    micro_batch: int = 0
    stage_micro_batches: int = 4
    compiled: bool = False
    lora: LoraConfig | None = None
    bias_rate: float = 0.0
    heads: tuple[TensorSpec, ...] = ()
    seed: int = 0
    world: World = field(default_factory=World)
    exact: bool = False

    def table(self) -> dict[str, TensorSpec]:
        """All tensors by name, the adapters after the model's tensors."""
        return {t.name: t for t in (*self.spec.tensors(), *self._adapters(), *self.heads)}

    def rules(self) -> dict[str, Rule]:
        """How each tensor is updated."""
        return rules(self.spec, self.optimizer, self._adapters(), self.heads)

    def _adapters(self) -> tuple[TensorSpec, ...]:
        return () if self.lora is None else lora_tensors(self.spec, self.lora)

    def bf16_weights(self, precision: Precision) -> frozenset[str]:
        """Tensors that the computation reads in BF16; the others (norms, biases) stay fp32.

        So does the embedding, whose rows are rounded when they are read: its gradient is a sum over
        all tokens of an id, which in BF16 stops growing after some hundred.
        """
        if precision.compute == "float32":
            return frozenset()
        weights = {name for name, t in self.table().items() if t.dtype_class == "weight"}
        return frozenset(weights - self.base_names() - {"embed"})

    def base_names(self) -> frozenset[str]:
        """Tensors that are held as codes."""
        return base_names(self.spec, self.lora)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of all devices together.

    held: parameters, gradients of those that are trained, optimizer state. checkpoint: the same
    without gradients and codes of a frozen base. adapters: their parameters. read: parameters that
    the computation reads in its own precision, not in codes; a number, no bytes.
    """

    held: int
    checkpoint: int
    adapters: int
    read: int


def state_bytes(
    spec: ModelSpec, optimizer: OptimizerConfig, lora: LoraConfig | None = None,
    heads: tuple[TensorSpec, ...] = (),
) -> StateBytes:  # fmt: skip
    """That of a run of `make_stepper` with these settings."""
    adapters = () if lora is None else lora_tensors(spec, lora)
    shapes = {t.name: t.shape for t in (*spec.tensors(), *adapters, *heads)}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    how, codes = rules(spec, optimizer, adapters, heads), base_names(spec, lora)
    state = state_shapes(shapes, how).items()
    kept = sum(FP32 * math.prod(x) for key, x in state if key.split("/", 1)[1] not in codes)
    gradients = sum(FP32 * sizes[name] for name, rule in how.items() if rule.trained)
    of_codes = sum(sizes[name] for name in codes)
    base = 0.0
    if lora and codes:
        from sabia.core.numerics.frozen_base import BYTES_PER_PARAMETER

        base = of_codes * BYTES_PER_PARAMETER[lora.base]
    return StateBytes(
        kept + gradients + round(base), kept, FP32 * sum(sizes[t.name] for t in adapters),
        sum(sizes.values()) - of_codes,
    )  # fmt: skip


def bias_names(spec: ModelSpec) -> tuple[str | None, ...]:
    """For each row of a loss's `expert_load`, the name of the bias (None: the layer has none)."""
    biases: list[str | None] = []
    for names, layer in zip(spec.layer_names(), spec.layers, strict=True):
        if isinstance(layer.mlp, Experts):
            biases.append(names["mlp.correction"] if layer.mlp.router.expert_bias else None)
    return tuple(biases)


def balanced_bias(bias: Array, load: Array, rate: float) -> Any:
    """bias[E] + rate · sign(mean load - load[E]); for arrays of NumPy, torch or JAX.

    load: assignments of each expert in the whole (global) batch of the step.
    """
    step, mean = bias * 0 + rate, load.mean()  # in the bias's dtype
    return bias + (load < mean) * step - (load > mean) * step
