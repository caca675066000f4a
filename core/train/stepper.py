"""One training step behind one interface, whatever the backend.

A stepper holds parameters (fp32) and optimizer state on its devices. `step` cuts its batch into
micro-batches, adds up loss, weight and gradients over them and over all processes, divides by the
global weight once, clips by the global norm and updates. A batch without weight, or with a loss or
gradient that is not finite, updates nothing. Every process gives its own rows of the global batch.
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from sabia.core.errors import BadData
from sabia.core.model.lora import LoraConfig, init_lora, lora_tensors
from sabia.core.model.precision import Precision, PrecisionSchedule, precision_named
from sabia.core.parallel.mesh import Mesh
from sabia.core.parallel.world import World
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import TensorSpec
from sabia.core.train.checkpoint import Piece
from sabia.core.train.guards import INFINITE
from sabia.core.train.losses.next_token import Loss
from sabia.core.train.optimizer.config import OptimizerConfig, Rule, rules

Batch = Mapping[str, np.ndarray]
ReadPiece = Callable[[str, tuple[int, ...], tuple[int, ...]], np.ndarray]  # name, offset, shape


class LazyState(Mapping[str, np.ndarray]):
    """Named arrays that are fetched (from a device) or made only when asked for."""

    def __init__(self, names: list[str], fetch: Callable[[str], np.ndarray]) -> None:
        self._names, self._fetch = names, fetch

    def __getitem__(self, name: str) -> np.ndarray:
        return self._fetch(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Stepper(Protocol):
    """What `make_stepper` returns."""

    spec: ModelSpec
    row_part: tuple[int, int]  # which part of how many of a batch's rows this process gives
    fixed_shapes: bool  # batches of a new shape are costly (they are compiled for)
    micro_batch: int  # rows at a time on one device (0: all); may change between steps

    @property
    def params(self) -> dict[str, Any]:
        """Backend arrays, fp32, current."""

    def step(
        self,
        batch: Batch,
        lr: float,
        tallies: np.ndarray | None = None,
        *,
        limits: tuple[float, float] = INFINITE,
        number: int = 0,
    ) -> dict[str, Any]:
        """Update once from this process's rows; `number`: of the step, counted from 0.

        Returns loss (mean by global weight), weight, grad_norm (before clipping), updated (bool),
        the extras of the loss summed, and `tallies`, numbers of this process, summed over all.
        Nothing is updated where loss or grad_norm is above its limit.
        """

    def evaluate(self, batch: Batch) -> dict[str, Any]:
        """loss, weight and extras over all processes, without gradients."""

    def gradients(self, batch: Batch) -> dict[str, np.ndarray]:
        """Gradients of the mean loss, whole, by name; for comparisons."""

    def pieces(self) -> Iterator[Piece]:
        """This process's pieces of the state by the names of core.train.optimizer.config."""

    def state(self) -> Mapping[str, np.ndarray]:
        """The whole state, on a mesh that does not split it."""

    def load(self, read: ReadPiece) -> None:
        """Take over a state box by box; raises BadData when it is of another model."""


def make_stepper(
    backend: str,
    spec: ModelSpec,
    params: Mapping[str, np.ndarray],
    loss: Loss,
    optimizer: OptimizerConfig | None = None,
    *,
    precision: str | PrecisionSchedule = "fp32",
    mesh: Mesh | None = None,
    **settings: Any,
) -> Stepper:
    """A stepper for `torch` or `jax`, starting from `params` (NumPy, by the spec's names).

    precision: one of core.model.precision.PRECISIONS, or a schedule of them; parameters and
    optimizer state are fp32 in all. mesh: how the devices are used (None: all along `data`).
    settings: the other fields of `Setup`.
    """
    if isinstance(precision, str):
        precision = PrecisionSchedule(precision_named(precision), 1)
    setup = Setup(spec, loss, optimizer or OptimizerConfig(), precision, **settings)
    if setup.lora is not None:
        layers: list[Any] = [params, init_lora(spec, setup.lora, setup.seed)]
        params = ChainMap(*layers)
    if backend == "torch":
        from sabia.core.train.stepper_torch import TorchStepper

        return TorchStepper(setup, params, mesh or Mesh(data=setup.world.size))
    from sabia.core.model.backend import load_ops

    load_ops(backend)  # says what is missing, or that there is no such backend
    from sabia.core.train.stepper_jax import JaxStepper

    if mesh is None:
        import jax

        mesh = Mesh(data=jax.device_count())
    return JaxStepper(setup, params, mesh)


@dataclass(frozen=True)
class Setup:
    """What a stepper of either backend is made of; see `make_stepper`.

    micro_batch: rows at a time on one device (0: all). compiled: torch.compile (JAX always
    compiles). lora: train adapters, made from `seed` where the parameters have none, and nothing
    else. bias_rate: of core.train.balancing. seed: of adapters and of stochastic rounding. world:
    the processes that were joined (core.parallel.process_group).
    """

    spec: ModelSpec
    loss: Loss
    optimizer: OptimizerConfig
    precision: PrecisionSchedule
    micro_batch: int = 0
    compiled: bool = False
    lora: LoraConfig | None = None
    bias_rate: float = 0.0
    seed: int = 0
    world: World = field(default_factory=World)

    def table(self) -> dict[str, TensorSpec]:
        """All tensors by name, adapters behind the model's."""
        return {t.name: t for t in (*self.spec.tensors(), *self._adapters())}

    def rules(self) -> dict[str, Rule]:
        """How each tensor is updated."""
        return rules(self.spec, self.optimizer, self._adapters())

    def _adapters(self) -> tuple[TensorSpec, ...]:
        return () if self.lora is None else lora_tensors(self.spec, self.lora)

    def narrow(self, precision: Precision) -> frozenset[str]:
        """Tensors that are computed with in BF16; the others (norms, biases) stay fp32."""
        if precision.compute == "float32":
            return frozenset()
        return frozenset(name for name, t in self.table().items() if t.dtype_class == "weight")


def from_arrays(state: Mapping[str, np.ndarray]) -> ReadPiece:
    """A reader of pieces out of whole arrays."""

    def read(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        if name not in state:
            raise BadData(f"optimizer state: {name!r} is missing (another model's state?)")
        whole = np.asarray(state[name])
        place = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=False))
        if whole.ndim != len(shape) or whole[place].shape != tuple(shape):
            raise BadData(f"optimizer state: {name} is {whole.shape} (expected {tuple(shape)})")
        return whole[place]

    return read
