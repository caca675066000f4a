"""The parameters of a model as a `flax.nnx.State`, and back.

The path of a parameter is its name in `ModelSpec.tensors()`, split at the dots, with layers as
numbers: `layers.0.attn.q` is `state["layers"][0]["attn"]["q"]`. Names and bits are the same in both
forms. flax is imported here only.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from sabia.core.errors import UsageError
from sabia.core.ops.base import Array

Path = tuple[str | int, ...]


def state_of(params: Mapping[str, Any]) -> nnx.State[Any, Any]:
    """A State of `nnx.Param` with JAX arrays of the same dtypes; params: name → array.

    Raises UsageError for a dtype that JAX does not hold (float64, unless x64 is enabled).
    """
    flat: dict[Any, Any] = {}
    for name, array in params.items():
        value = jnp.asarray(array)
        if value.dtype != array.dtype:
            raise UsageError(f"nnx: {name} is {array.dtype} (expected a dtype that JAX keeps)")
        flat[_path(name, params)] = nnx.Param(value)
    return nnx.State.from_flat_path(flat)


def params_of(state: nnx.State[Any, Any]) -> dict[str, Array]:
    """name → JAX array of a State made by `state_of`, in any nesting; the inverse of it."""
    return {".".join(map(str, path)): leaf[...] for path, leaf in state.flat_state()}


def host_params(state: nnx.State[Any, Any]) -> dict[str, np.ndarray]:
    """`params_of` as NumPy arrays, which `core.model.storage.hub.save_model` writes."""
    return {name: np.asarray(array) for name, array in params_of(state).items()}


def _path(name: str, params: Mapping[str, Any]) -> Path:
    """The parts of a name; an adapter `q.lora_a` of a parameter `q` lies beside it."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        if ".".join(parts[:count]) in params:
            parts = [*parts[: count - 1], ".".join(parts[count - 1 :])]
            break
    return tuple(int(part) if part.isdecimal() else part for part in parts)
