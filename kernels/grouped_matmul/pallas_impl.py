"""Grouped matrix products as Pallas kernels for TPU: rows by matrices, and the matrices' gradients.

A step visits a pair (block of rows, group); pairs are listed in order by arithmetic on the counts,
so a block shared by several groups stays in on-chip memory while each of them fills its own rows,
and so does a matrix's gradient while its rows are summed. Rows beyond the counts are one more
group, whose rows are filled with 0, and an empty group has one pair without rows: no result is left
unwritten. The contracted axis is held whole. Unlike megablox it takes any number of rows (padded
here). Block sizes are untuned. Compiled for v5e with libtpu, never run on a TPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sabia.kernels.runtime.dispatch import pallas_interpret
from sabia.kernels.runtime.pallas_product import NN, NT, TN, prefetching_call, product

Array = jax.Array
ROWS, INTERPRETED_ROWS = 128, 16
BUDGET = 24 << 20  # bytes of operands on the core, double-buffered
LIMIT = 64 << 20


def _rows_of_group(
    group: jax.Array | int, block: jax.Array | int, bounds: jax.Array, rows: int
) -> Array:
    """bool[rows, 1]: which rows of the block belong to the group."""
    row = block * rows + jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return (row >= bounds[group]) & (row < bounds[group + 1])  # [rows, 1]


def _rows_kernel(groups, blocks, bounds, x, weight, out, *, dims, last):
    t = pl.program_id(1)
    group, block = groups[t], blocks[t]

    @pl.when((t == 0) | (blocks[jnp.maximum(t - 1, 0)] != block))
    def _begin() -> None:
        out[...] = jnp.zeros_like(out)

    @pl.when(group < last)
    def _fill() -> None:
        out_block = product(x[...], weight[...], dims).astype(out.dtype)  # [rows, columns]
        out[...] = jnp.where(_rows_of_group(group, block, bounds, x.shape[0]), out_block, out[...])


def _matrices_kernel(groups, blocks, bounds, grad, x, dw, acc, *, last):
    t, end = pl.program_id(2), pl.num_programs(2) - 1
    group, block = groups[t], blocks[t]
    target = jnp.minimum(group, last - 1)

    def differs(other: object) -> Any:
        return jnp.minimum(groups[other], last - 1) != target

    @pl.when((t == 0) | differs(jnp.maximum(t - 1, 0)))
    def _begin() -> None:
        acc[...] = jnp.zeros_like(acc)

    @pl.when(group < last)
    def _add() -> None:
        # [rows, f]: other groups' rows are 0
        in_group = _rows_of_group(group, block, bounds, x.shape[0])
        own = jnp.where(in_group, grad[...], 0).astype(grad.dtype)
        acc[...] += product(own, x[...], TN)  # [f, d]: dW += grad^T x

    @pl.when((t == end) | differs(jnp.minimum(t + 1, end)))
    def _end() -> None:
        dw[...] = acc[...].astype(dw.dtype)


def _pairs(counts: Array, total: int, rows: int) -> tuple[Array, Array, Array]:
    """(group[n], block[n], bounds[E + 2]): the pairs in order; group E is the rest."""
    groups, blocks = counts.shape[0], total // rows
    ends = jnp.concatenate((jnp.cumsum(counts), jnp.full(1, total))).astype(jnp.int32)
    bounds = jnp.concatenate((jnp.zeros(1, jnp.int32), ends))  # [E + 2]
    low, high = bounds[:-1] // rows, -(-ends // rows)  # [E + 1]: blocks of each group
    # [E + 1]: pairs of each group, 1 for an empty group so that its result is written
    steps = jnp.maximum(jnp.where(ends > bounds[:-1], high - low, 1), 1)
    upto = jnp.cumsum(steps)  # [E + 1]: number of pairs up to each group
    t = jnp.arange(blocks + groups, dtype=jnp.int32)  # [n]: a group boundary adds at most one pair
    group = jnp.minimum(jnp.searchsorted(upto, t, side="right"), groups).astype(jnp.int32)  # [n]
    block = low[group] + t - (upto - steps)[group]  # [n]
    return group, jnp.minimum(block, blocks - 1).astype(jnp.int32), bounds


def _columns(count: int, other: int, itemsize: int, rows: int) -> int:
    """Columns of a block beside `other` contracted ones."""
    for size in (512, 256):
        if size <= count and 2 * (rows + size) * other * itemsize <= BUDGET:
            return size
    return min(128, count)


def _rows(x: Array, weight: Array, pairs: Any, rows: int, across: bool) -> Array:
    """x[M, D] by weight[E, F, D]; `across`: x[M, F] by the same, to [M, D]."""
    last, width = weight.shape[0], weight.shape[2 if across else 1]
    columns = _columns(width, x.shape[1], x.dtype.itemsize, rows)
    shape = (None, x.shape[1], columns) if across else (None, columns, x.shape[1])

    def matrix(f, t, groups, blocks, bounds):
        group = jnp.minimum(groups[t], last - 1)
        return (group, 0, f) if across else (group, f, 0)

    return prefetching_call(
        functools.partial(_rows_kernel, dims=NN if across else NT, last=last),
        (pl.cdiv(width, columns), pairs[0].shape[0]),
        limit=LIMIT,
        in_specs=[
            pl.BlockSpec((rows, x.shape[1]), lambda f, t, g, blocks, _: (blocks[t], 0)),
            pl.BlockSpec(shape, matrix),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda f, t, g, blocks, _: (blocks[t], f)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], width), x.dtype),
    )(*pairs, x, weight)


def _matrices(grad: Array, x: Array, pairs: Any, rows: int, last: int) -> Array:
    f_size, d_size = min(512, grad.shape[1]), min(512, x.shape[1])
    return prefetching_call(
        functools.partial(_matrices_kernel, last=last),
        (pl.cdiv(grad.shape[1], f_size), pl.cdiv(x.shape[1], d_size), pairs[0].shape[0]),
        limit=LIMIT,
        in_specs=[
            pl.BlockSpec((rows, f_size), lambda f, d, t, g, blocks, _: (blocks[t], f)),
            pl.BlockSpec((rows, d_size), lambda f, d, t, g, blocks, _: (blocks[t], d)),
        ],
        out_specs=pl.BlockSpec(
            (None, f_size, d_size), lambda f, d, t, g, *_: (jnp.minimum(g[t], last - 1), f, d)
        ),
        out_shape=jax.ShapeDtypeStruct((last, grad.shape[1], x.shape[1]), x.dtype),
        scratch_shapes=[pltpu.VMEM((f_size, d_size), jnp.float32)],
    )(*pairs, grad, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x: Array, weight: Array, counts: Array, rows: int) -> Array:
    return _rows(x, weight, _pairs(counts, x.shape[0], rows), rows, across=False)


def _product_forward(x: Array, weight: Array, counts: Array, rows: int) -> tuple[Array, Any]:
    return _product(x, weight, counts, rows), (x, weight, counts)


def _product_backward(rows: int, saved: Any, grad: Array) -> tuple[Array, Array, None]:
    x, weight, counts = saved
    pairs = _pairs(counts, x.shape[0], rows)
    dx = _rows(grad, weight, pairs, rows, across=True)  # [M, D]: dx = grad W
    return dx, _matrices(grad, x, pairs, rows, weight.shape[0]), None


_product.defvjp(_product_forward, _product_backward)


def grouped_matmul(x: Array, weight: Array, counts: Array) -> Array:
    """See sabia.kernels.grouped_matmul.interface.grouped_matmul."""
    rows = INTERPRETED_ROWS if pallas_interpret() else ROWS
    count = x.shape[0]
    x = jnp.pad(x, ((0, -count % rows), (0, 0)))
    return _product(x, weight, counts, rows)[:count]
