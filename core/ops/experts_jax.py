"""Dispatch, grouped products and combination of experts in JAX, all shapes static.

Token–expert assignments are sorted by expert, M = B·T·k rows; sabia.kernels.grouped_matmul
multiplies each expert's rows by its matrix. Gradients of both permutations are
gathers, no scattered sums.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sabia.core.ops.kernel_choice import raises_missing_backend, requested_kernels
from sabia.kernels.grouped_matmul.interface import grouped_matmul as grouped_matmul_kernel

Array = jax.Array
REQUESTED = requested_kernels("jax")
_kernel = raises_missing_backend(grouped_matmul_kernel)


class DispatchPlan(NamedTuple):
    """The order of rows. Assignment token·k + i is that of a token to its i-th expert.

    order[M]: the assignment of each row, and its inverse[M]; experts[M]: the expert of each row;
    counts[E]: rows of each expert.
    """

    order: Array
    inverse: Array
    experts: Array
    counts: Array


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _copy_to_rows(tokens: Array, order: Array, inverse: Array, per_token: int) -> Array:
    """tokens[order // k]; a token's gradient is the sum over its k rows."""
    return tokens[order // per_token]


def _copy_to_rows_forward(
    tokens: Array, order: Array, inverse: Array, per_token: int
) -> tuple[Array, Array]:
    return _copy_to_rows(tokens, order, inverse, per_token), inverse


def _copy_to_rows_backward(per_token: int, inverse: Array, grad: Array) -> tuple[Array, None, None]:
    return grad[inverse].reshape(-1, per_token, grad.shape[-1]).sum(1), None, None


_copy_to_rows.defvjp(_copy_to_rows_forward, _copy_to_rows_backward)


@jax.custom_vjp
def _permute(x: Array, forth: Array, back: Array) -> Array:
    """x[forth]; `back` is the inverse permutation."""
    return x[forth]


def _permute_forward(x: Array, forth: Array, back: Array) -> tuple[Array, Array]:
    return x[forth], back


def _permute_backward(back: Array, grad: Array) -> tuple[Array, None, None]:
    return grad[back], None, None


_permute.defvjp(_permute_forward, _permute_backward)


def dispatch(y: Array, experts_of_tokens: Array, experts: int) -> tuple[Array, DispatchPlan]:
    """See Ops.dispatch."""
    flat = experts_of_tokens.reshape(-1)  # [M]
    # stable: the rows of an expert keep the order of the tokens
    order = jnp.argsort(flat, stable=True)
    inverse = jnp.argsort(order)  # the inverse permutation
    plan = DispatchPlan(order, inverse, flat[order], jnp.bincount(flat, length=experts))
    tokens = y.reshape(-1, y.shape[-1])
    return _copy_to_rows(tokens, order, inverse, experts_of_tokens.shape[-1]), plan


def grouped(rows: Array, weight: Array, plan: DispatchPlan) -> Array:
    """rows[M, in] of each expert times weight[E, out, in]ᵀ, in rows' dtype."""
    implementation = REQUESTED["grouped_matmul"]
    return _kernel(rows, weight, plan.counts, full=True, implementation=implementation)


def biased(rows: Array, bias: Array | None, plan: DispatchPlan | None) -> Array:
    """rows + bias[out] or, with a plan, rows[M, out] + bias[e, out] of each row's expert."""
    if bias is None:
        return rows
    bias = bias.astype(rows.dtype)
    return rows + (bias if plan is None else bias[plan.experts])


def combine(rows: Array, plan: DispatchPlan, gates: Array) -> Array:
    """See Ops.combine."""
    per_token = _permute(rows, plan.inverse, plan.order).reshape(*gates.shape, rows.shape[-1])
    return jnp.einsum("btkd,btk->btd", per_token, gates.astype(rows.dtype))


def weighted_bincount(indices: Array, weights: Array, count: int) -> Array:
    """See Ops.weighted_bincount."""
    weights = jax.lax.stop_gradient(weights.astype(jnp.float32))

    def row(indices_of_row: object, amounts: object) -> Array:
        return jnp.zeros(count, jnp.float32).at[indices_of_row].add(amounts)

    return jax.vmap(row)(indices, weights)
