"""The optimizers in JAX: `core.train.optimizer.config` over traced arrays, for use inside jit."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from sabia.core.ops.device_jax import JaxOps
from sabia.core.train.optimizer.config import Rule, init_state, update

Array = jax.Array
States = dict[str, dict[str, Array]]

OPS = JaxOps()


def init_jax(shapes: Mapping[str, tuple[int, ...]], rules: Mapping[str, Rule]) -> States:
    """Name → part → zeros: the state before the first update; jit it with out_shardings."""
    return init_state(shapes, rules, lambda _name, size, _whole: jnp.zeros(size, jnp.float32))


def apply_jax(
    params: Mapping[str, Array],
    grads: Mapping[str, Array],
    state: Mapping[str, Mapping[str, Array]],
    rules: Mapping[str, Rule],
    count: object,
    lr: object,
) -> tuple[dict[str, Array], States]:
    """Parameters and state after an update; `count` is the number of updates made before.

    Frozen tensors need no gradient. Arrays are global: the compiler shards the computation.
    """
    new: dict[str, Array] = {}
    parts: States = {}
    with jax.default_matmul_precision("float32"):  # a TPU's default is bfloat16
        for name, p in params.items():
            arguments = (p, grads.get(name), state[name], count, lr)
            new[name], parts[name] = update(rules[name], OPS, *arguments)
    return new, parts
