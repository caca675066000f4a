"""The vocabulary loss in JAX: the plain expression."""

import jax
import jax.numpy as jnp

from sabia.kernels.runtime.dispatch import (
    Choice,
    Option,
    choose,
    jax_platform,
    pallas_obstacle,
    reference_option,
)

Array = jax.Array


def choose_linear_cross_entropy(hidden: Array, implementation: str | None) -> Choice:
    """See vocabulary_loss.choose_linear_cross_entropy."""
    reason, on_tpu = "products and softmax in one TPU kernel", jax_platform() == "tpu"
    own = Option("pallas", reason, pallas_obstacle(), automatic=on_tpu)
    return choose("linear_cross_entropy", [own, reference_option()], implementation)


def _reference(
    hidden: Array, weight: Array, targets: Array, softcap: float | None, chunk_bytes: int
) -> tuple[Array, Array]:
    z = (hidden @ weight.astype(hidden.dtype).T).astype(jnp.float32)
    z = z if softcap is None else jnp.tanh(z / softcap) * softcap
    lse = jax.nn.logsumexp(z, -1)
    picked = jnp.take_along_axis(z, jnp.maximum(targets, 0)[:, None], -1)[:, 0]
    return jnp.where(targets >= 0, lse - picked, 0.0), lse


def _pallas(
    hidden: Array, weight: Array, targets: Array, softcap: float | None, chunk_bytes: int
) -> tuple[Array, Array]:
    from sabia.kernels.vocabulary_loss.pallas_impl import linear_cross_entropy

    return linear_cross_entropy(hidden, weight.astype(hidden.dtype), targets, softcap)


IMPLEMENTATIONS = {"reference": _reference, "pallas": _pallas}
