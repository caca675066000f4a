"""Attention over packed documents as Pallas kernels for TPU: sinks, cap, window, both gradients.

Scores are stored transposed, [keys, queries], so that the values of a query (interval, maximum,
sum, lse, delta) lie along the lanes and no vector needs a transpose. The innermost grid axis runs
over blocks of keys; the range of blocks that the intervals of a block of queries allow comes
as prefetched scalars, blocks outside are neither fetched nor computed (their index repeats the
last one). The start of the queries is data: unlike splash attention this supports context
parallelism with a traced rank, and lengths that are no multiple of a block (padded here).

Equations and names as in triton_impl; block sizes are untuned. Compiled for v5e with libtpu,
never run on a TPU.
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
HIDDEN = -1e30  # finite: a row whose first blocks are masked has no -inf - -inf
BLOCK = 512
INTERPRETED_BLOCK = 16


def _scores(k: Array, q: Array, scale: float, cap: float | None) -> Array:
    s = product(k, q, NT) * scale  # [keys, queries]: transposed
    return s if cap is None else jnp.tanh(s / cap) * cap


def _visible(shape: tuple[int, int], key: Array, query: Array, first: Array) -> Array:
    keys = key + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    positions = query + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return (keys >= first) & (keys <= positions)


def _forward_kernel(
    low, high, start, q, k, v, first, sink, out, lse, acc, largest, total, *, scale, cap
):  # fmt: skip
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    rows, keys = q.shape[0], k.shape[0]
    block = low[b, i] + j

    @pl.when(j == 0)
    def _begin() -> None:
        acc[...] = jnp.zeros_like(acc)
        # FlashAttention-2, arXiv 2307.08691, algorithm 1; a sink is one more score: m = z, l = 1
        largest[...] = jnp.full_like(largest, HIDDEN) if sink is None else (
            jnp.broadcast_to(sink[...], largest.shape)
        )  # fmt: skip
        total[...] = jnp.full_like(total, 0.0 if sink is None else 1.0)

    @pl.when(block < high[b, i])
    def _visit() -> None:
        s = _scores(k[...], q[...], scale, cap)  # [keys, rows]
        visible = _visible((keys, rows), block * keys, start[0] + i * rows, first[...])
        s = jnp.where(visible, s, HIDDEN)
        # [1, rows]: m' = max(m, max s)
        new = jnp.maximum(largest[...], jnp.max(s, 0, keepdims=True))
        p = jnp.where(visible, jnp.exp(s - new), 0.0)  # exp(s - m')
        shrink = jnp.exp(largest[...] - new)  # exp(m - m')
        # l' = l exp(m - m') + sum p
        total[...] = total[...] * shrink + jnp.sum(p, 0, keepdims=True)
        acc[...] = acc[...] * shrink + product(v[...], p.astype(v.dtype), TN)  # [M, rows]: O^T
        largest[...] = new

    @pl.when(j == pl.num_programs(3) - 1)
    def _end() -> None:
        sums = jnp.where(total[...] > 0, total[...], 1.0)
        out[...] = (acc[...] / sums).astype(out.dtype)
        lse[...] = largest[...] + jnp.log(sums)  # m + log l


def _queries_kernel(
    low, high, start, q, k, v, first, grad, lse, delta, dq, acc, *, scale, cap
):  # fmt: skip
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    rows, keys = q.shape[0], k.shape[0]
    block = low[b, i] + j

    @pl.when(j == 0)
    def _begin() -> None:
        acc[...] = jnp.zeros_like(acc)

    @pl.when(block < high[b, i])
    def _visit() -> None:
        s = _scores(k[...], q[...], scale, cap)
        visible = _visible((keys, rows), block * keys, start[0] + i * rows, first[...])
        p = jnp.where(visible, jnp.exp(s - lse[...]), 0.0)
        # dS = P * (dO V^T - D), arXiv 2307.08691, algorithm 2, transposed
        ds = p * (product(v[...], grad[...], NT) - delta[...])
        ds = ds if cap is None else ds * (1.0 - (s / cap) ** 2)
        acc[...] += product(k[...], ds.astype(k.dtype), TN)  # [N, rows]: dQ^T += K^T dS^T

    @pl.when(j == pl.num_programs(3) - 1)
    def _end() -> None:
        dq[...] = (acc[...] * scale).astype(dq.dtype)


def _keys_kernel(
    low, high, start, q, k, v, first, grad, lse, delta, dk, dv, acc_k, acc_v, *, scale, cap
):  # fmt: skip
    b, j, g, i = (pl.program_id(axis) for axis in (0, 2, 3, 4))
    rows, keys = q.shape[0], k.shape[0]
    block = low[b, j] + i

    @pl.when((g == 0) & (i == 0))
    def _begin() -> None:
        acc_k[...] = jnp.zeros_like(acc_k)
        acc_v[...] = jnp.zeros_like(acc_v)

    @pl.when(block < high[b, j])
    def _visit() -> None:
        s = _scores(k[...], q[...], scale, cap)
        visible = _visible((keys, rows), j * keys, start[0] + block * rows, first[...])
        p = jnp.where(visible, jnp.exp(s - lse[...]), 0.0)
        acc_v[...] += product(p.astype(grad.dtype), grad[...], NN)  # [keys, M]: dV += P^T dO
        # dS = P * (dO V^T - D), arXiv 2307.08691, algorithm 2, transposed
        ds = p * (product(v[...], grad[...], NT) - delta[...])
        ds = ds if cap is None else ds * (1.0 - (s / cap) ** 2)
        acc_k[...] += product(ds.astype(q.dtype), q[...], NN)  # [keys, N]: dK += dS^T Q

    @pl.when((g == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _end() -> None:
        dk[...] = (acc_k[...] * scale).astype(dk.dtype)
        dv[...] = acc_v[...].astype(dv.dtype)


def _key_ranges(
    first: Array, start: Array, keys: int, rows: int, columns: int
) -> tuple[Array, Array]:
    """[low, high) in blocks of keys for each block of queries: int32[B, T / rows] each."""
    positions = start + jnp.arange(first.shape[1], dtype=jnp.int32)
    # [B, T / rows, rows]
    reach = jnp.where(first < keys, positions + 1, 0).reshape(first.shape[0], -1, rows)
    low = jnp.min(first.reshape(first.shape[0], -1, rows), -1) // columns
    return jnp.minimum(low, -(-keys // columns) - 1), -(-jnp.max(reach, -1) // columns)


def _query_ranges(
    until: Array, start: Array, length: int, rows: int, columns: int
) -> tuple[Array, Array]:
    """[low, high) in blocks of queries for each block of keys: int32[B, S / columns] each."""
    begin = jnp.arange(until.shape[1] // columns, dtype=jnp.int32) * columns  # [S / columns]
    low = jnp.clip(begin - start, 0, length - 1) // rows
    # [B, S / columns]
    high = jnp.minimum(jnp.max(until.reshape(until.shape[0], -1, columns), -1) - start, length)
    return jnp.broadcast_to(low, high.shape), -(-high // rows)


def _within(low: jax.Array, high: jax.Array, b: object, i: object, step: jax.Array) -> Any:
    """The block of a step; after the range the last one again, which needs no fetch."""
    return jnp.maximum(jnp.minimum(low[b, i] + step, high[b, i] - 1), 0)


def _query_specs(rows: int, columns: int, group: int, size: int, size_v: int) -> dict[str, object]:
    """Blocks of the kernels whose programs own queries: grid (batch, head, queries, keys)."""

    def query_block(b, h, i, j, *_):
        return b, h, i, 0

    def key_block(b, h, i, j, low, high, start):
        return b, jax.lax.div(h, group), _within(low, high, b, i, j), 0

    def across(b, h, i, j, *_):
        return b, h, 0, i

    return {
        "q": pl.BlockSpec((None, None, rows, size), query_block),
        "k": pl.BlockSpec((None, None, columns, size), key_block),
        "v": pl.BlockSpec((None, None, columns, size_v), key_block),
        "first": pl.BlockSpec((None, 1, rows), lambda b, h, i, j, *_: (b, 0, i)),
        "sink": pl.BlockSpec((None, 1, 1), lambda b, h, i, j, *_: (h, 0, 0)),
        "grad": pl.BlockSpec((None, None, rows, size_v), query_block),
        "row": pl.BlockSpec((None, None, 1, rows), across),
        "out": pl.BlockSpec((None, None, size_v, rows), across),
        "dq": pl.BlockSpec((None, None, size, rows), across),
    }


def _key_specs(rows: int, columns: int, group: int, size: int, size_v: int) -> dict[str, object]:
    """Blocks of the kernel whose programs own keys: grid (batch, group, keys, head, queries)."""

    def key_block(b, h, j, g, i, *_):
        return b, h, j, 0

    def query_block(b, h, j, g, i, low, high, start):
        return b, h * group + g, _within(low, high, b, j, i), 0

    def across(b, h, j, g, i, low, high, start):
        return b, h * group + g, 0, _within(low, high, b, j, i)

    return {
        "q": pl.BlockSpec((None, None, rows, size), query_block),
        "k": pl.BlockSpec((None, None, columns, size), key_block),
        "v": pl.BlockSpec((None, None, columns, size_v), key_block),
        "first": pl.BlockSpec(
            (None, 1, rows), lambda b, h, j, g, i, low, high, _: (b, 0, _within(low, high, b, j, i))
        ),
        "grad": pl.BlockSpec((None, None, rows, size_v), query_block),
        "row": pl.BlockSpec((None, None, 1, rows), across),
    }


def _blocks(q: Array, k: Array) -> tuple[int, int]:
    """(rows, columns): lanes are 128 wide, so lengths are padded to that at least."""
    if pallas_interpret():
        return INTERPRETED_BLOCK, INTERPRETED_BLOCK
    lengths = (q.shape[2], k.shape[2])
    rows, columns = (min(BLOCK, pl.next_power_of_2(max(128, n))) for n in lengths)
    return rows, columns


def _padded(x: Array, axis: int, multiple: int, value: int = 0) -> Array:
    spare = -x.shape[axis] % multiple
    if not spare:
        return x
    widths = [(0, spare if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def _run_forward(
    q: Array, k: Array, v: Array, first: Array, start: Array, sinks: Array | None,
    scale: float, cap: float | None, blocks: tuple[int, int],
) -> tuple[Array, Array]:  # fmt: skip
    rows, columns = blocks
    batch, heads, length, size = q.shape
    size_v, group = v.shape[-1], heads // k.shape[1]
    spec = _query_specs(rows, columns, group, size, size_v)
    low, high = _key_ranges(first[:, 0], start, k.shape[2], rows, columns)
    kernel: Any = functools.partial(_forward_kernel, scale=scale, cap=cap)
    inputs = [q, k, v, first]
    if sinks is not None:
        inputs.append(sinks.astype(jnp.float32)[:, None, None])
    else:
        with_sink = kernel
        kernel = lambda *refs: with_sink(*refs[:7], None, *refs[7:])  # noqa: E731
    run = prefetching_call(
        kernel, (batch, heads, length // rows, k.shape[2] // columns),
        in_specs=[spec[name] for name in ("q", "k", "v", "first", "sink")[: len(inputs)]],
        out_specs=[spec["out"], spec["row"]],
        out_shape=[jax.ShapeDtypeStruct((batch, heads, size_v, length), q.dtype),
                   jax.ShapeDtypeStruct((batch, heads, 1, length), jnp.float32)],
        scratch_shapes=[pltpu.VMEM((size_v, rows), jnp.float32),
                        pltpu.VMEM((1, rows), jnp.float32), pltpu.VMEM((1, rows), jnp.float32)],
    )  # fmt: skip
    out, lse = run(low, high, start[None], *inputs)
    return out.swapaxes(2, 3), lse


def _run_backward(
    q: Array, k: Array, v: Array, first: Array, until: Array, start: Array, grad: Array,
    lse: Array, delta: Array, scale: float, cap: float | None, blocks: tuple[int, int],
) -> tuple[Array, Array, Array]:  # fmt: skip
    rows, columns = blocks
    batch, heads, length, size = q.shape
    keys, groups, size_v, group = k.shape[2], k.shape[1], v.shape[-1], heads // k.shape[1]
    names = ("q", "k", "v", "first", "grad", "row", "row")
    inputs = (q, k, v, first, grad, lse, delta)
    spec = _query_specs(rows, columns, group, size, size_v)
    dq = prefetching_call(
        functools.partial(_queries_kernel, scale=scale, cap=cap),
        (batch, heads, length // rows, keys // columns),
        in_specs=[spec[name] for name in names],
        out_specs=spec["dq"],
        out_shape=jax.ShapeDtypeStruct((batch, heads, size, length), q.dtype),
        scratch_shapes=[pltpu.VMEM((size, rows), jnp.float32)],
    )(*_key_ranges(first[:, 0], start, keys, rows, columns), start[None], *inputs)  # fmt: skip
    spec = _key_specs(rows, columns, group, size, size_v)
    dk, dv = prefetching_call(
        functools.partial(_keys_kernel, scale=scale, cap=cap),
        (batch, groups, keys // columns, group, length // rows), inner=2,
        in_specs=[spec[name] for name in names],
        out_specs=[spec["k"], spec["v"]],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        scratch_shapes=[pltpu.VMEM((columns, size), jnp.float32),
                        pltpu.VMEM((columns, size_v), jnp.float32)],
    )(*_query_ranges(until, start, length, rows, columns), start[None], *inputs)  # fmt: skip
    return dq.swapaxes(2, 3), dk, dv


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def _attend(q, k, v, first, until, start, sinks, scale, cap, blocks):
    return _run_forward(q, k, v, first, start, sinks, scale, cap, blocks)[0]


def _attend_forward(q, k, v, first, until, start, sinks, scale, cap, blocks):
    out, lse = _run_forward(q, k, v, first, start, sinks, scale, cap, blocks)
    return out, (q, k, v, first, until, start, sinks, out, lse)


def _attend_backward(scale, cap, blocks, saved, grad):
    q, k, v, first, until, start, sinks, out, lse = saved
    # D = sum(dO * O): [B, H, 1, T]
    delta = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), -1)[:, :, None]
    numbers = (scale, cap, blocks)
    dq, dk, dv = _run_backward(q, k, v, first, until, start, grad, lse, delta, *numbers)
    ds = None
    if sinks is not None:  # padding has delta 0
        # dz = -sum exp(z - lse) D over batch and queries: [H]
        share = jnp.exp(sinks.astype(jnp.float32)[:, None, None] - lse)
        ds = -jnp.sum(share * delta, (0, 2, 3)).astype(sinks.dtype)
    return dq, dk, dv, None, None, None, ds


_attend.defvjp(_attend_forward, _attend_backward)


def attention(
    q: Array, k: Array, v: Array, first: Array, until: Array, start: Array, scale: float,
    softcap: float | None, sinks: Array | None,
) -> Array:  # fmt: skip
    """See sabia.kernels.attention.interface.attention."""
    batch, length = q.shape[:2]
    keys = k.shape[1]
    # [B, H, T, N], [B, K, S, N], [B, K, S, M]
    q, k, v = (x.astype(q.dtype).swapaxes(1, 2) for x in (q, k, v))
    blocks = rows, columns = _blocks(q, k)
    q, k, v = _padded(q, 2, rows), _padded(k, 2, columns), _padded(v, 2, columns)
    first = jnp.where(first >= keys, k.shape[2], first)  # padding sees nothing of the padded keys
    # [B, 1, T padded]
    first = _padded(jnp.broadcast_to(first, (batch, length)), 1, rows, k.shape[2])[:, None]
    until = _padded(jnp.broadcast_to(until, (batch, keys)), 1, columns)  # [B, S padded]
    # [B, H, T padded, M]
    out = _attend(q, k, v, first, until, start, sinks, scale, softcap, blocks)
    return out[:, :, :length].swapaxes(1, 2)
