"""RMSNorm in JAX: the plain expression, which XLA fuses."""

from typing import Any

import jax
import jax.numpy as jnp

from sabia.kernels.runtime.dispatch import Choice, Option, choose, pallas_obstacle

Array = jax.Array


def choose_rms_norm(
    x: Array, weight: Array, residual: Array | None, implementation: str | None
) -> Choice:
    """See rms_norm.choose_rms_norm."""
    plain = Option("reference", "XLA fuses the plain expression with its neighbours")
    own = Option("pallas", "one TPU kernel", pallas_obstacle(), automatic=False)
    return choose("rms_norm", [plain, own], implementation)


def _reference(x: Array, weight: Array, eps: float, residual: Array | None, plus_one: bool) -> Any:
    h = x if residual is None else x + residual.astype(x.dtype)
    wide, factor = h.astype(jnp.float32), weight.astype(jnp.float32) + plus_one
    r = jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + eps)
    y = (wide * r * factor).astype(x.dtype)
    return y if residual is None else (y, h)


def _pallas(x: Array, weight: Array, eps: float, residual: Array | None, plus_one: bool) -> Any:
    from sabia.kernels.rms_norm.pallas_impl import rms_norm

    return rms_norm(x, weight, eps, residual, plus_one)


IMPLEMENTATIONS = {"reference": _reference, "pallas": _pallas}
