"""Depth and width to assume where only parameter counts are known.

The nearest published model, by the ratio of total and of active parameters, lends its layers
and hidden size: 1.6T/49B takes 61 layers of 7168. An assumption, so the caller says it.
"""

import math
from dataclasses import dataclass

from sabia.core.plan.catalogue import read_data


@dataclass(frozen=True)
class Shape:
    """Layers and hidden size of a published model of `params`, `active` parameters."""

    name: str
    params: float
    active: float
    layers: int
    hidden: int


def load_shapes() -> tuple[Shape, ...]:
    """All shapes on file."""
    return tuple(Shape(**row) for row in read_data("shapes.toml")["shape"])


def nearest_shape(params: float, active: float) -> Shape:
    """The published shape nearest in log(params), log(active)."""

    def distance(shape: Shape) -> float:
        return math.hypot(math.log(shape.params / params), math.log(shape.active / active))

    return min(load_shapes(), key=distance)
