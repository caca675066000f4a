"""The published model that a bare parameter count is assumed to look like.

The nearest one, by the ratio of total and of active parameters, lends its layers, widths and heads:
1.6T/49B takes 61 layers of 7168. A dense count takes a dense model, a sparse one a mixture. An
assumption, so the caller says it.
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
    """A published model of `params`, of which a token visits `active`, and its configuration."""

    name: str
    params: float
    active: float
    config: Mapping[str, Any]
    source: str
    date: date

    @property
    def layers(self) -> int:
        """Its depth."""
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
    """The published shape nearest in log(params), log(active), of the same kind."""

    def distance(shape: Shape) -> float:
        return math.hypot(math.log(shape.params / params), math.log(shape.active / active))

    dense = active >= params
    alike = [shape for shape in load_shapes() if (shape.active == shape.params) == dense]
    return min(alike, key=distance)
