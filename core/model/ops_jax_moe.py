"""Dispatch, grouped products and combination of experts in JAX, all shapes static.

Copies of tokens are sorted by expert, M = B·T·k rows; `jax.lax.ragged_dot` multiplies each
expert's rows by its matrix, on TPU a kernel of sabia.kernels. Gradients of both permutations are
gathers, no scattered sums.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sabia.core.model.kernel_choice import kernels_of, obeyed
from sabia.kernels.grouped_matmul.interface import grouped_matmul as grouped_matmul_kernel

Array = jax.Array
KERNELS = kernels_of("jax")
_kernel = obeyed(grouped_matmul_kernel)

# rows[M, in] · weight[E, out, in] by groups of rows, contracting the last axes.
_DIMENSIONS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=(0,),
    rhs_group_dimensions=(0,),
)


class Plan(NamedTuple):
    """Where copies went. A copy is numbered token·k + place of its expert in the token's choice.

    order[M]: the copy in each row; places[M]: the row of each copy; experts[M]: the expert of
    each row; counts[E]: rows of each expert.
    """

    order: Array
    places: Array
    experts: Array
    counts: Array


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _send(tokens: Array, order: Array, places: Array, copies: int) -> Array:
    """tokens[order // k]; the gradient of a token is the sum of its copies'."""
    return tokens[order // copies]


def _send_forward(tokens: Array, order: Array, places: Array, copies: int) -> tuple[Array, Array]:
    return _send(tokens, order, places, copies), places


def _send_backward(copies: int, places: Array, grad: Array) -> tuple[Array, None, None]:
    return grad[places].reshape(-1, copies, grad.shape[-1]).sum(1), None, None


_send.defvjp(_send_forward, _send_backward)


@jax.custom_vjp
def _permute(x: Array, forth: Array, back: Array) -> Array:
    """x[forth]; back is the inverse permutation."""
    return x[forth]


def _permute_forward(x: Array, forth: Array, back: Array) -> tuple[Array, Array]:
    return x[forth], back


def _permute_backward(back: Array, grad: Array) -> tuple[Array, None, None]:
    return grad[back], None, None


_permute.defvjp(_permute_forward, _permute_backward)


def dispatch(y: Array, chosen: Array, experts: int) -> tuple[Array, Plan]:
    """See Ops.dispatch."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    places = jnp.argsort(order)
    plan = Plan(order, places, flat[order], jnp.bincount(flat, length=experts))
    return _send(y.reshape(-1, y.shape[-1]), order, places, chosen.shape[-1]), plan


def grouped_matmul(
    rows: Array, weight: Array, plan: Plan, bias: Array | None = None, *, name: str = ""
) -> Array:
    """See Ops.grouped_matmul."""
    weight = weight.astype(rows.dtype)
    if KERNELS.serve("grouped_matmul", jax.default_backend()):
        named = KERNELS.asked["grouped_matmul"]
        out = _kernel(rows, weight, plan.counts, implementation=named)
    else:
        out = jax.lax.ragged_dot_general(rows, weight, plan.counts, _DIMENSIONS)
    return biased(out, plan, bias)


def biased(rows: Array, plan: Plan, bias: Array | None) -> Array:
    """See Ops.biased."""
    return rows if bias is None else rows + bias.astype(rows.dtype)[plan.experts]


def combine(rows: Array, plan: Plan, shares: Array) -> Array:
    """See Ops.combine."""
    copies = _permute(rows, plan.places, plan.order).reshape(*shares.shape, rows.shape[-1])
    return jnp.einsum("btkd,btk->btd", copies, shares.astype(rows.dtype))


def tally(indices: Array, weights: Array, count: int) -> Array:
    """See Ops.tally."""
    weights = jax.lax.stop_gradient(weights.astype(jnp.float32))

    def row(places: Any, amounts: Any) -> Array:
        return jnp.zeros(count, jnp.float32).at[places].add(amounts)

    return jax.vmap(row)(indices, weights)
