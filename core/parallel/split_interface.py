"""What `core.parallel.split_model` makes, and the heads that one device of a mesh caches."""

from dataclasses import fields, replace
from typing import Any, Protocol

from sabia.core.ops.base import Ops
from sabia.core.spec.layers import Layer
from sabia.core.spec.model import ModelSpec

_CACHED = {"kv_heads", "key_heads", "value_heads"}  # of which caches have arrays


class SplitModel(Protocol):
    """What differs between a model on one device and one over a mesh."""

    ops: Ops
    cached: ModelSpec  # with the heads whose keys, values and states this process caches
    rows: int = 1  # of which the rows of a batch are a multiple
    part: tuple[int, int] = (0, 1)  # which part of the items this process has, and their number
    leads: bool  # among the processes that compute the same items

    def to_mesh(self, name: str, whole: object, dtype: str) -> Any:
        """What this process holds of a NumPy array of the model, or of an adapter of it."""

    def copied(self, whole: object, dtype: str) -> Any:
        """An array that every device has whole, from NumPy or as it is stored."""

    def agreed(self, value: object) -> Any:
        """The value that the leading process gives; every process of the same items calls it."""

    def whole_vocabulary(self, logits: object) -> Any:
        """Logits[..., V] of this process's part of the vocabulary."""
        return logits

    def of_cache(self, layers: object) -> Any:
        """In JAX the layers of a cache, each device with its heads; in torch they are already."""
        return layers

    def compiled(self, function: object) -> Any:
        """In JAX `jax.jit` of a function whose results every process reads; in torch the same."""
        return function


def cached_part(spec: ModelSpec, ways: int) -> ModelSpec:
    """The model with one of `ways` equal parts of the heads that are cached."""
    layers = list[Layer]()
    for layer in spec.layers:
        mixer: Any = layer.mixer
        names = {field.name for field in fields(mixer)} & _CACHED
        parts = {name: getattr(mixer, name) // ways for name in names}
        layers.append(replace(layer, mixer=replace(mixer, **parts)))
    return replace(spec, layers=tuple(layers))
