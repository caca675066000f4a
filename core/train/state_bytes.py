"""What a run holds besides activations, counted before it starts."""

import math
from dataclasses import dataclass

from sabia.core.model.lora import LoraConfig, base_names, lora_tensors
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import TensorSpec
from sabia.core.train.optimizer.config import OptimizerConfig, rules, state_shapes

FP32 = 4


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
