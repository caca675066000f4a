"""ModelSpec: a model as frozen data, and its ordered table of tensors.

Two specs are equal when they compute the same function of equally named tensors; the original
`config` rides along for export and takes no part in comparison, so a spec can be a dictionary
key or a static argument of a compiled function.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from sabia.core.spec.layers import Layer
from sabia.core.spec.tensors import Row, TensorSpec, place


@dataclass(frozen=True)
class ModelSpec:
    """A decoder: embedding, layers, final norm, head.

    names: layer or model tensor name → file name, `{layer}` standing for the index.
    ignored: regular expressions of file names that carry nothing (old rotary buffers).
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm_eps: float
    tied: bool
    init_std: float
    max_positions: int
    config: Mapping[str, Any] = field(compare=False, repr=False)
    names: Mapping[str, str] = field(compare=False, repr=False)
    ignored: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors: embedding, layers in order, final norm, head unless tied."""
        return self._table

    def layer_names(self) -> tuple[Mapping[str, str], ...]:
        """For each layer, its tensors' short names → their full names."""
        return self._short_names

    @cached_property
    def _table(self) -> tuple[TensorSpec, ...]:
        return _tensors(self)

    @cached_property
    def _short_names(self) -> tuple[Mapping[str, str], ...]:
        return _layer_names(self)

    @property
    def head_name(self) -> str:
        """Name of the tensor that projects to the vocabulary."""
        return "embed" if self.tied else "head"


def _tensors(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    matrix = ((spec.vocab_size, spec.hidden_size), ("vocab", "embed"))
    first = Row("embed", *matrix, "embedding")
    last = [Row("final_norm", (spec.hidden_size,), ("embed",), "norm", "ones")]
    last += [] if spec.tied else [Row("head", *matrix, "head")]
    table = [place(first, "", spec.names["embed"], spec.init_std, None)]
    for index, layer in enumerate(spec.layers):
        for row in layer.rows(spec.hidden_size):
            table.append(_place_in_layer(spec, row, index))
    table += [place(row, "", spec.names[row.name], spec.init_std, None) for row in last]
    return tuple(table)


def _place_in_layer(spec: ModelSpec, row: Row, index: int) -> TensorSpec:
    # A sum of 2L branch outputs keeps unit growth when each is scaled by 1/sqrt(2L) (GPT-2).
    scale = 1 / math.sqrt(2 * len(spec.layers)) if row.residual_output else 1.0
    hf = spec.names[row.name].format(layer=index)
    return place(row, f"layers.{index}.", hf, spec.init_std * scale, index)


def _layer_names(spec: ModelSpec) -> tuple[Mapping[str, str], ...]:
    names: list[dict[str, str]] = [{} for _ in spec.layers]
    for tensor in spec.tensors():
        if tensor.layer is not None:
            names[tensor.layer][tensor.name.removeprefix(f"layers.{tensor.layer}.")] = tensor.name
    return tuple(MappingProxyType(row) for row in names)
