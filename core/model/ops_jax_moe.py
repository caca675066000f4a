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

    assignment_of_row[M] and its inverse row_of_assignment[M]; experts[M]: the expert of each row;
    counts[E]: rows of each expert.
    """

    assignment_of_row: Array
    row_of_assignment: Array
    experts: Array
    counts: Array


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _copy_to_rows(
    tokens: Array, assignment_of_row: Array, row_of_assignment: Array, per_token: int
) -> Array:
    """tokens[assignment_of_row // k]; a token's gradient is the sum over its k rows."""
    return tokens[assignment_of_row // per_token]


def _copy_to_rows_forward(
    tokens: Array, assignment_of_row: Array, row_of_assignment: Array, per_token: int
) -> tuple[Array, Array]:
    return _copy_to_rows(tokens, assignment_of_row, row_of_assignment, per_token), row_of_assignment


def _copy_to_rows_backward(
    per_token: int, row_of_assignment: Array, grad: Array
) -> tuple[Array, None, None]:
    return grad[row_of_assignment].reshape(-1, per_token, grad.shape[-1]).sum(1), None, None


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
    assignment_of_row = jnp.argsort(flat, stable=True)
    row_of_assignment = jnp.argsort(assignment_of_row)  # the inverse permutation
    plan = DispatchPlan(
        assignment_of_row,
        row_of_assignment,
        flat[assignment_of_row],
        jnp.bincount(flat, length=experts),
    )
    return _copy_to_rows(
        y.reshape(-1, y.shape[-1]),
        assignment_of_row,
        row_of_assignment,
        experts_of_tokens.shape[-1],
    ), plan


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
    per_token = _permute(rows, plan.row_of_assignment, plan.assignment_of_row).reshape(
        *gates.shape, rows.shape[-1]
    )
    return jnp.einsum("btkd,btk->btd", per_token, gates.astype(rows.dtype))


def weighted_bincount(indices: Array, weights: Array, count: int) -> Array:
    """See Ops.tally."""
    weights = jax.lax.stop_gradient(weights.astype(jnp.float32))

    def row(indices_of_row: Any, amounts: Any) -> Array:
        return jnp.zeros(count, jnp.float32).at[indices_of_row].add(amounts)

    return jax.vmap(row)(indices, weights)
