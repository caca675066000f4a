"""The optimizers in JAX: `core.train.optimizer.updates` over traced arrays, for use inside jit."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from sabia.core.train.optimizer.config import Rule, init_state
from sabia.core.train.optimizer.updates import update

Array = jax.Array
States = dict[str, dict[str, Array]]

ARRAY_FUNCTIONS = SimpleNamespace(
    sqrt=jnp.sqrt,
    sign=jnp.sign,
    floor=jnp.maximum,
    mean=lambda x, axes: jnp.mean(x, axes, keepdims=True),
    argsort=jnp.argsort,
    take=jnp.take_along_axis,
    eigenvectors=lambda x: jnp.linalg.eigh(x)[1][..., ::-1],
    orthonormal=lambda x: jnp.linalg.qr(x)[0],
    expm1=jnp.expm1,
    cond=jax.lax.cond,
    repeat=lambda times, function, x: jax.lax.fori_loop(0, times, lambda _, y: function(y), x),
)


def init_jax(shapes: Mapping[str, tuple[int, ...]], rules: Mapping[str, Rule]) -> States:
    """Name → part → zeros: the state before the first update; jit it with out_shardings."""
    return init_state(shapes, rules, lambda _name, size, _whole: jnp.zeros(size, jnp.float32))


def apply_jax(
    params: Mapping[str, Array],
    grads: Mapping[str, Array],
    state: Mapping[str, Mapping[str, Array]],
    rules: Mapping[str, Rule],
    count: Any,
    lr: Any,
) -> tuple[dict[str, Array], States]:
    """Parameters and state after an update; `count` is the number of updates made before.

    Frozen tensors need no gradient. Arrays are global: the compiler shards the computation.
    """
    new: dict[str, Array] = {}
    parts: States = {}
    with jax.default_matmul_precision("float32"):  # a TPU's default is bfloat16
        for name, p in params.items():
            arguments = (p, grads.get(name), state[name], count, lr)
            new[name], parts[name] = update(rules[name], ARRAY_FUNCTIONS, *arguments)
    return new, parts
