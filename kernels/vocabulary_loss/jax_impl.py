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
    chunks = Option("eager", "chunks of tokens, recomputed in the backward pass")
    return choose("linear_cross_entropy", [own, chunks, reference_option()], implementation)


def _reference(
    hidden: Array, weight: Array, targets: Array, softcap: float | None, chunk_bytes: int
) -> tuple[Array, Array]:
    z = (hidden @ weight.astype(hidden.dtype).T).astype(jnp.float32)
    z = z if softcap is None else jnp.tanh(z / softcap) * softcap
    lse = jax.nn.logsumexp(z, -1)
    picked = jnp.take_along_axis(z, jnp.maximum(targets, 0)[:, None], -1)[:, 0]
    return jnp.where(targets >= 0, lse - picked, 0.0), lse


def _losses(
    hidden: Array, weight: Array, targets: Array, softcap: float | None
) -> tuple[Array, Array]:
    scores = jax.lax.dot_general(hidden, weight.astype(hidden.dtype), (((1,), (1,)), ((), ())))
    scores = scores.astype(jnp.float32)  # [rows, V]
    scores = scores if softcap is None else jnp.tanh(scores / softcap) * softcap
    lse = jax.nn.logsumexp(scores, axis=-1)
    target_scores = jnp.take_along_axis(scores, jnp.maximum(targets, 0)[:, None], axis=-1)[:, 0]
    return jnp.where(targets >= 0, lse - target_scores, 0.0), lse


def _eager(
    hidden: Array, weight: Array, targets: Array, softcap: float | None, chunk_bytes: int
) -> tuple[Array, Array]:
    tokens, rows = hidden.shape[0], max(1, chunk_bytes // (4 * weight.shape[0]))
    if rows >= tokens:
        return _losses(hidden, weight, targets, softcap)
    chunks = -(-tokens // rows)
    padding = chunks * rows - tokens
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(chunks, rows, -1)
    targets = jnp.pad(targets, (0, padding)).reshape(chunks, rows)
    # the logits of a chunk exist only while it is computed
    one = jax.checkpoint(lambda part: _losses(part[0], weight, part[1], softcap))
    nll, lse = jax.lax.map(one, (hidden, targets))
    return nll.reshape(-1)[:tokens], lse.reshape(-1)[:tokens]


def _pallas(
    hidden: Array, weight: Array, targets: Array, softcap: float | None, chunk_bytes: int
) -> tuple[Array, Array]:
    from sabia.kernels.vocabulary_loss.pallas_impl import linear_cross_entropy

    return linear_cross_entropy(hidden, weight.astype(hidden.dtype), targets, softcap)


IMPLEMENTATIONS = {"reference": _reference, "eager": _eager, "pallas": _pallas}
