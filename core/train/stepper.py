"""One training step behind one interface, whatever the backend.

A stepper holds parameters (fp32) and optimizer state on its devices. `step` cuts its batch into
micro-batches, adds up loss, weight and gradients over them and over all processes, divides by the
global weight once, clips by the global norm and updates. A batch without weight, or with a loss or
gradient that is not finite, updates nothing. Every process gives its own rows of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from sabia.core.errors import BadData, UsageError
from sabia.core.parallel.launch import World
from sabia.core.parallel.mesh import Mesh
from sabia.core.spec.model import ModelSpec
from sabia.core.train.losses import Loss
from sabia.core.train.optimizer import OptimizerConfig

PRECISIONS = ("fp32", "bf16")
Batch = Mapping[str, np.ndarray]
ReadPiece = Callable[[str, tuple[int, ...], tuple[int, ...]], np.ndarray]  # name, offset, shape


class LazyState(Mapping[str, np.ndarray]):
    """Named arrays that are fetched from the device only when asked for."""

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
    params: dict[str, Any]  # backend arrays, fp32, current
    fixed_shapes: bool  # batches of a new shape are costly (they are compiled for)
    micro_batch: int  # rows at a time on one device (0: all); may change between steps

    def step(self, batch: Batch, lr: float, tallies: np.ndarray | None = None) -> dict[str, Any]:
        """Update once from this process's rows.

        Returns loss (mean by global weight), weight, grad_norm (before clipping), updated (bool),
        the extras of the loss summed, and `tallies`, numbers of this process, summed over all.
        """

    def evaluate(self, batch: Batch) -> dict[str, Any]:
        """loss, weight and extras over all processes, without gradients."""

    def state(self) -> Mapping[str, np.ndarray]:
        """Parameters and optimizer state by the names of core.train.optimizer."""

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Take over a state; raises BadData when it is of another model."""


def make_stepper(
    backend: str,
    spec: ModelSpec,
    params: Mapping[str, np.ndarray],
    loss: Loss,
    optimizer: OptimizerConfig | None = None,
    *,
    precision: str = "fp32",
    micro_batch: int = 0,
    compiled: bool = False,
    world: World | None = None,
    devices: int = 0,
    mesh: Mesh | None = None,
) -> Stepper:
    """A stepper for `torch` or `jax`, starting from `params` (NumPy, by the spec's names).

    precision: fp32, or bf16 compute with fp32 masters. micro_batch: rows at a time on one device
    (0: all). compiled: torch.compile (JAX always compiles). world: the processes that were joined
    (core.parallel.launch). devices: how many this JAX process uses (0: all; torch uses one).
    """
    if precision not in PRECISIONS:
        raise UsageError(f"--precision: {precision!r} (expected {' or '.join(PRECISIONS)})")
    config, world = optimizer or OptimizerConfig(), world or World()
    if backend == "torch":
        from sabia.core.train.stepper_torch import TorchStepper

        return TorchStepper(spec, params, loss, config, precision, micro_batch, compiled, world)
    from sabia.core.model.backend import load_ops

    load_ops(backend)  # says what is missing, or that there is no such backend
    from sabia.core.train.stepper_jax import JaxStepper

    if mesh is None:
        import jax

        mesh = Mesh(data=devices or jax.device_count())
    return JaxStepper(
        spec,
        params,
        loss,
        config,
        precision=precision,
        micro_batch=micro_batch,
        mesh=mesh,
        world=world,
    )


def weight_names(spec: ModelSpec) -> frozenset[str]:
    """Tensors that follow the compute dtype; the others (norms, biases) stay fp32."""
    return frozenset(t.name for t in spec.tensors() if t.dtype_class == "weight")


def from_arrays(state: Mapping[str, np.ndarray]) -> ReadPiece:
    """A reader of pieces out of whole arrays."""

    def read(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        if name not in state:
            raise BadData(f"optimizer state: {name!r} is missing (another model's state?)")
        place = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        return np.asarray(state[name][place])

    return read
