"""Dispatch, grouped products and combination of experts in JAX, all shapes static.

Token–expert assignments are sorted by expert, M = B·T·k rows; `jax.lax.ragged_dot` multiplies each
expert's rows by its matrix, on TPU a kernel of sabia.kernels. Gradients of both permutations are
gathers, no scattered sums.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sabia.core.model.kernel_choice import kernels_of, raises_missing_backend
from sabia.kernels.grouped_matmul.interface import grouped_matmul as grouped_matmul_kernel

Array = jax.Array
KERNELS = kernels_of("jax")
_kernel = raises_missing_backend(grouped_matmul_kernel)

# rows[M, in] · weight[E, out, in] by groups of rows, contracting the last axes.
_DIMENSIONS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(0,),
)


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


def grouped_matmul(
    rows: Array, weight: Array, plan: DispatchPlan, bias: Array | None = None, *, name: str = ""
) -> Array:
    """See Ops.grouped_matmul."""
    weight = weight.astype(rows.dtype)
    if KERNELS.use("grouped_matmul", jax.default_backend()):
        implementation = KERNELS.requested["grouped_matmul"]
        out = _kernel(rows, weight, plan.counts, implementation=implementation)
    else:
        out = jax.lax.ragged_dot_general(rows, weight, plan.counts, _DIMENSIONS)
    return biased(out, plan, bias)


def biased(rows: Array, plan: DispatchPlan, bias: Array | None) -> Array:
    """See Ops.biased."""
    return rows if bias is None else rows + bias.astype(rows.dtype)[plan.experts]


def combine(rows: Array, plan: DispatchPlan, gates: Array) -> Array:
    """See Ops.combine."""
    per_token = _permute(rows, plan.inverse, plan.order).reshape(*gates.shape, rows.shape[-1])
    return jnp.einsum("btkd,btk->btd", per_token, gates.astype(rows.dtype))


def weighted_bincount(indices: Array, weights: Array, count: int) -> Array:
    """See Ops.tally."""
    weights = jax.lax.stop_gradient(weights.astype(jnp.float32))

    def row(indices_of_row: Any, amounts: Any) -> Array:
        return jnp.zeros(count, jnp.float32).at[indices_of_row].add(amounts)

    return jax.vmap(row)(indices, weights)
