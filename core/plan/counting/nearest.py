"""The published model that is nearest to given parameter counts.

Its depth, widths and heads are assumed where only counts are given: 1.6T/49B has 61 layers of 7168.
Distance is by the ratios of total and of active parameters. A dense count gets a dense model, a
sparse one an MoE model. The caller reports the assumption.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from sabia.core.plan.catalogue import check_entry, read_data

FILE = "shapes.toml"
_KEYS = {"name", "params", "active", "config", "source", "date"}


@dataclass(frozen=True)
class Shape:
    """A published model of `params` parameters, `active` of them active, and its configuration."""

    name: str
    params: float
    active: float
    config: Mapping[str, Any]
    source: str
    date: date

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.config["num_hidden_layers"]

    @property
    def hidden(self) -> int:
        """Width of its residual stream."""
        return self.config["hidden_size"]


def load_shapes() -> tuple[Shape, ...]:
    """All shapes on file."""
    rows = read_data(FILE)["shape"]
    for row in rows:
        check_entry(FILE, str(row.get("name")), row, _KEYS, set())
    return tuple(Shape(**row) for row in rows)


def nearest_shape(params: float, active: float) -> Shape:
    """The published model of the same kind nearest in log(params), log(active)."""

    def distance(shape: Shape) -> float:
        return math.hypot(math.log(shape.params / params), math.log(shape.active / active))

    dense = active >= params
    alike = [shape for shape in load_shapes() if (shape.active == shape.params) == dense]
    return min(alike, key=distance)
