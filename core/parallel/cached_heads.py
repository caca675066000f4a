"""The heads that one device of a mesh caches."""

from dataclasses import fields, replace
from typing import Any

from sabia.core.spec.layers import Layer
from sabia.core.spec.model import ModelSpec

_CACHED = {"kv_heads", "key_heads", "value_heads"}  # of which caches have arrays


def cached_part(spec: ModelSpec, ways: int) -> ModelSpec:
    """The model with one of `ways` equal parts of the heads that are cached."""
    layers = list[Layer]()
    for layer in spec.layers:
        mixer: Any = layer.mixer
        names = {field.name for field in fields(mixer)} & _CACHED
        parts = {name: getattr(mixer, name) // ways for name in names}
        layers.append(replace(layer, mixer=replace(mixer, **parts)))
    return replace(spec, layers=tuple(layers))
