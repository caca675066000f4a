"""Make the stepper of a backend; each backend is imported only when it is asked for."""

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import numpy as np

from sabia.core.errors import UsageError
from sabia.core.model.init import init_tensor
from sabia.core.model.lora import init_lora
from sabia.core.ops.precision import PrecisionSchedule, precision_named
from sabia.core.parallel.build_ops import operations_class
from sabia.core.parallel.mesh import Mesh
from sabia.core.spec.model import ModelSpec
from sabia.core.train.losses.next_token import Loss
from sabia.core.train.optimizer.config import OptimizerConfig
from sabia.core.train.stepper import Setup, Stepper


def check_base(backend: str, setup: Setup, mesh: Mesh | None) -> None:
    """Raise UsageError where the matrices beside adapters cannot be held as codes."""
    if setup.lora is None or not setup.lora.base:
        return
    flag, name = f"--lora-base: {setup.lora.base} with", setup.precision.precision.name
    if backend != "torch":
        raise UsageError(f"{flag} --backend {backend} (expected torch)")
    if name not in ("fp32", "bf16"):
        raise UsageError(f"{flag} --precision {name} (expected fp32 or bf16)")
    if setup.compiled:
        raise UsageError(f"{flag} --compile (expected neither or one of them)")
    if mesh is not None and mesh.size > mesh.data:
        raise UsageError(f"{flag} --mesh {mesh} (expected a mesh along data alone)")


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
    adapters = {} if setup.lora is None else init_lora(spec, setup.lora, setup.seed)
    heads = {tensor.name: init_tensor(tensor, setup.seed) for tensor in setup.heads}
    layers: list[Any] = [heads, params, adapters]
    params = ChainMap(*layers)
    operations_class(backend)  # raises where the backend is unknown or not installed
    check_base(backend, setup, mesh)
    if backend == "torch":
        from sabia.core.train.stepper_torch import TorchStepper

        return TorchStepper(setup, params, mesh or Mesh(data=setup.world.size))
    from sabia.core.train.stepper_jax import JaxStepper

    if mesh is None:
        import jax

        mesh = Mesh(data=jax.device_count())
    return JaxStepper(setup, params, mesh)
