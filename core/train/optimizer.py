"""The meaning of the optimizer's settings, one for both backends, and the names of its state.

AdamW (Loshchilov and Hutter, arXiv 1711.05101): with g the gradient of the mean loss, clipped by
its global norm, and t counted from 1,
  m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g²,
  p = p - lr (m/(1 - b1^t) / (sqrt(v/(1 - b2^t)) + eps) + weight_decay p),
the decay only for tensors that the model's table marks (matrices, not norms and biases). The state
is fp32: param/NAME, m/NAME, v/NAME, and `count`, the number of updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from sabia.core.errors import BadData, UsageError
from sabia.core.spec.model import ModelSpec

PARTS = ("param", "m", "v")
COUNT = "count"


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW; `clip_norm` bounds the global norm of the gradient (0: no clipping)."""

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise UsageError(f"betas: {self.beta1}, {self.beta2} (expected 0 to below 1)")
        if self.eps <= 0 or self.weight_decay < 0 or self.clip_norm < 0:
            raise UsageError(
                f"optimizer: eps {self.eps}, weight decay {self.weight_decay}, clip norm "
                f"{self.clip_norm} (expected eps above 0, the others 0 or more)"
            )


def decays(spec: ModelSpec) -> dict[str, bool]:
    """Which tensors decay, by name."""
    return {tensor.name: tensor.decay for tensor in spec.tensors()}


def state_names(names: Iterable[str]) -> list[str]:
    """All names of the state of parameters `names`, in the order of checkpoints."""
    names = list(names)
    return [f"{part}/{name}" for part in PARTS for name in names] + [COUNT]


def check_state(state: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise BadData unless the state has exactly these parameters, in these shapes."""
    wanted = set(state_names(shapes))
    if wanted != set(state):
        odd = sorted(wanted ^ set(state))[0]
        raise BadData(f"optimizer state: {odd!r} is missing or unknown (another model's state?)")
    for name, shape in shapes.items():
        for part in PARTS:
            found = state[f"{part}/{name}"].shape
            if found != shape:
                raise BadData(f"optimizer state: {part}/{name} is {found} (expected {shape})")
