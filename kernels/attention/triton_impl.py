"""Attention over packed documents as Triton kernels: online softmax, sinks, cap, both gradients.

Forward: a program owns BLOCK_M queries of a head and walks the blocks of BLOCK_N keys from the
least `first` of its queries to its last position; everything outside is never read. The backward
pass runs two kernels that recompute the weights p = exp(s - lse): one like the forward pass for dq
(and delta = sum(dout * out)), one whose programs own keys and walk the queries of all heads of
their group up to `until`, for dk and dv. With ds = p * (dout.v - delta), through the cap
ds * (1 - (s / cap)^2), and dz = -sum exp(z - lse) * delta for the sinks.

Registered as operators of torch, so torch.compile carries them as they are. The default block sizes
below are chosen by counting shared memory; `kernels.runtime.tuned` has those measured on a device,
by the padded width of the widest head and the dtype: "128 bfloat16".
"""

from typing import Any

import torch
import triton
import triton.language as tl

from sabia.kernels.runtime.cache_folder import name_compilers_folders
from sabia.kernels.runtime.torch_support import Context
from sabia.kernels.runtime.tuned import tuned_blocks

name_compilers_folders()

Tensor = torch.Tensor
LOG2E = tl.constexpr(1.4426950408889634)

# Widest padded head → (BLOCK_M, BLOCK_N, warps, stages), for H100, H200 and B200.
BLOCKS = {
    "forward": {64: (128, 64, 4, 3), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)},
    "backward": {64: (64, 64, 4, 2), 128: (64, 64, 8, 2), 256: (32, 32, 8, 1)},
}
INTERPRETED_BLOCK = 16


@triton.jit
def _load(base, rows, stride, count, columns, width):
    """Rows of a matrix [count, width] with unit column stride; zeros beyond its edges."""
    inside = (rows < count)[:, None] & (columns < width)[None, :]
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _scores(q, k, scale, cap, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # [rows of q, rows of k]
    if CAPPED:
        # cap * tanh(s / cap), as tanh x = 2 sigmoid(2 x) - 1
        s = cap * (2.0 * tl.sigmoid(2.0 * s / cap) - 1.0)
    return s


@triton.jit
def _forward_kernel(
    q_base, k_base, v_base, first_base, sinks, out_base, lse_base,
    q_batch: tl.int64, q_row: tl.int64, q_head: tl.int64,
    k_batch: tl.int64, k_row: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_row: tl.int64, v_head: tl.int64,
    first_batch, T, S, start, H, G, scale, cap, N: tl.constexpr, M: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    position = rows + start  # [BLOCK_M]: p = start + t
    columns, columns_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    # [BLOCK_M]; S for padding, which sees no key
    first = tl.load(first_base + batch * first_batch + rows, mask=rows < T, other=S)
    # [BLOCK_M, WIDTH]
    q = _load(q_base + batch * q_batch + head * q_head, rows, q_row, T, columns, N)
    k_base += batch * k_batch + (head // G) * k_head
    v_base += batch * v_batch + (head // G) * v_head
    # FlashAttention-2, arXiv 2307.08691, algorithm 1: m (largest), l (total) and O (acc)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        # a sink is one more score without a value: m = z, l = exp(z - m) = 1
        largest = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head).to(tl.float32)
        total += 1.0
    acc = tl.zeros([BLOCK_M, WIDTH_V], tl.float32)  # [BLOCK_M, WIDTH_V]
    low = tl.min(first, 0) // BLOCK_N * BLOCK_N
    high = tl.max(tl.where(first < S, position + 1, 0), 0)
    for at in range(low, high, BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        k = _load(k_base, keys, k_row, S, columns, N)  # [BLOCK_N, WIDTH]
        s = _scores(q, k, scale, cap, CAPPED, PRECISION)  # [BLOCK_M, BLOCK_N]
        visible = (keys[None, :] >= first[:, None]) & (keys[None, :] <= position[:, None])
        s = tl.where(visible, s, float("-inf"))
        new = tl.maximum(largest, tl.max(s, 1))  # [BLOCK_M]: m' = max(m, max s)
        safe = tl.where(new == float("-inf"), 0.0, new)  # no key seen yet: avoids -inf - -inf
        p = tl.exp2((s - safe[:, None]) * LOG2E)  # exp(s - m')
        shrink = tl.exp2((largest - safe) * LOG2E)  # exp(m - m')
        total = total * shrink + tl.sum(p, 1)  # l' = l exp(m - m') + sum p
        v = _load(v_base, keys, v_row, S, columns_v, M)  # [BLOCK_N, WIDTH_V]
        # O' = O exp(m - m') + p V
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        largest = new
    seen = (first < S) & (rows < T)
    total = tl.where(total > 0, total, 1.0)
    out = acc / total[:, None]
    lse = tl.where(seen, largest + tl.log2(total) / LOG2E, 0.0)  # [BLOCK_M]: m + log l
    index = (batch * T + rows) * H + head
    inside = (rows < T)[:, None] & (columns_v < M)[None, :]
    tl.store(out_base + index[:, None] * M + columns_v[None, :],
             out.to(out_base.dtype.element_ty), mask=inside)  # fmt: skip
    tl.store(lse_base + index, lse, mask=rows < T)


@triton.jit
def _queries_kernel(
    q_base, k_base, v_base, first_base, out_base, lse_base, grad_base, delta_base, dq_base,
    q_batch: tl.int64, q_row: tl.int64, q_head: tl.int64,
    k_batch: tl.int64, k_row: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_row: tl.int64, v_head: tl.int64,
    first_batch, T, S, start, H, G, scale, cap, N: tl.constexpr, M: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(1) // H).to(tl.int64)
    head = tl.program_id(1) % H
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    position = rows + start  # [BLOCK_M]: p = start + t
    columns, columns_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    first = tl.load(first_base + batch * first_batch + rows, mask=rows < T, other=S)
    q = _load(q_base + batch * q_batch + head * q_head, rows, q_row, T, columns, N)
    index = (batch * T + rows) * H + head
    inside_v = (rows < T)[:, None] & (columns_v < M)[None, :]
    at_v = index[:, None] * M + columns_v[None, :]
    grad = tl.load(grad_base + at_v, mask=inside_v, other=0.0)  # [BLOCK_M, WIDTH_V]
    out = tl.load(out_base + at_v, mask=inside_v, other=0.0)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)  # [BLOCK_M]: D = sum(dO * O)
    tl.store(delta_base + index, delta, mask=rows < T)
    lse = tl.load(lse_base + index, mask=rows < T, other=0.0)
    k_base += batch * k_batch + (head // G) * k_head
    v_base += batch * v_batch + (head // G) * v_head
    dq = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    low = tl.min(first, 0) // BLOCK_N * BLOCK_N
    high = tl.max(tl.where(first < S, position + 1, 0), 0)
    for at in range(low, high, BLOCK_N):
        keys = at + tl.arange(0, BLOCK_N)
        k = _load(k_base, keys, k_row, S, columns, N)
        v = _load(v_base, keys, v_row, S, columns_v, M)
        s = _scores(q, k, scale, cap, CAPPED, PRECISION)
        visible = (keys[None, :] >= first[:, None]) & (keys[None, :] <= position[:, None])
        # [BLOCK_M, BLOCK_N]
        p = tl.exp2(tl.where(visible, s - lse[:, None], float("-inf")) * LOG2E)
        # dS = P * (dO V^T - D), arXiv 2307.08691, algorithm 2
        ds = p * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        if CAPPED:
            ds *= 1.0 - (s / cap) * (s / cap)  # d tanh(x) = 1 - tanh(x)^2
        # dQ += dS K; the scale follows at the end
        dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    inside = (rows < T)[:, None] & (columns < N)[None, :]
    tl.store(dq_base + index[:, None] * N + columns[None, :],
             (dq * scale).to(dq_base.dtype.element_ty), mask=inside)  # fmt: skip


@triton.jit
def _keys_kernel(
    q_base, k_base, v_base, first_base, until_base, lse_base, grad_base, delta_base,
    dk_base, dv_base,
    q_batch: tl.int64, q_row: tl.int64, q_head: tl.int64,
    k_batch: tl.int64, k_row: tl.int64, k_head: tl.int64,
    v_batch: tl.int64, v_row: tl.int64, v_head: tl.int64,
    first_batch, until_batch, T, S, start, H, G, scale, cap, N: tl.constexpr, M: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
):  # fmt: skip
    groups = H // G
    batch = (tl.program_id(1) // groups).to(tl.int64)
    group = tl.program_id(1) % groups
    keys = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns, columns_v = tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    until = tl.load(until_base + batch * until_batch + keys, mask=keys < S, other=0)
    # [BLOCK_N, WIDTH]
    k = _load(k_base + batch * k_batch + group * k_head, keys, k_row, S, columns, N)
    # [BLOCK_N, WIDTH_V]
    v = _load(v_base + batch * v_batch + group * v_head, keys, v_row, S, columns_v, M)
    dk = tl.zeros([BLOCK_N, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK_N, WIDTH_V], tl.float32)
    # causal: earlier queries do not see these keys
    low = tl.maximum(tl.program_id(0) * BLOCK_N - start, 0) // BLOCK_M * BLOCK_M
    high = tl.minimum(tl.max(until, 0) - start, T)
    for head in range(group * G, group * G + G):
        for at in range(low, high, BLOCK_M):
            rows = at + tl.arange(0, BLOCK_M)
            index = (batch * T + rows) * H + head
            first = tl.load(first_base + batch * first_batch + rows, mask=rows < T, other=S)
            lse = tl.load(lse_base + index, mask=rows < T, other=0.0)
            delta = tl.load(delta_base + index, mask=rows < T, other=0.0)
            # [BLOCK_M, WIDTH]
            q = _load(q_base + batch * q_batch + head * q_head, rows, q_row, T, columns, N)
            inside_v = (rows < T)[:, None] & (columns_v < M)[None, :]
            grad = tl.load(grad_base + index[:, None] * M + columns_v[None, :],
                           mask=inside_v, other=0.0)  # fmt: skip
            s = _scores(k, q, scale, cap, CAPPED, PRECISION)  # [BLOCK_N, BLOCK_M]: transposed
            after = keys[:, None] <= (rows + start)[None, :]
            visible = (keys[:, None] >= first[None, :]) & after
            p = tl.exp2(tl.where(visible, s - lse[None, :], float("-inf")) * LOG2E)
            dv += tl.dot(p.to(grad.dtype), grad, input_precision=PRECISION)  # dV += P^T dO
            ds = p * (tl.dot(v, tl.trans(grad), input_precision=PRECISION) - delta[None, :])
            if CAPPED:
                ds *= 1.0 - (s / cap) * (s / cap)  # d tanh(x) = 1 - tanh(x)^2
            dk += tl.dot(ds.to(q.dtype), q, input_precision=PRECISION)  # dK += dS^T Q
    index = (batch * S + keys) * groups + group
    tl.store(dk_base + index[:, None] * N + columns[None, :],
             (dk * scale).to(dk_base.dtype.element_ty),
             mask=(keys < S)[:, None] & (columns < N)[None, :])  # fmt: skip
    tl.store(dv_base + index[:, None] * M + columns_v[None, :],
             dv.to(dv_base.dtype.element_ty),
             mask=(keys < S)[:, None] & (columns_v < M)[None, :])  # fmt: skip


def _width(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def launch_options(q: Tensor, v: Tensor, kernel: str) -> dict[str, int | str]:
    """Block sizes and compiler options of a kernel in `BLOCKS` for these head sizes."""
    widths = _width(q.shape[-1]), _width(v.shape[-1])
    rows, keys, warps, stages = BLOCKS[kernel][max(64, *widths)]
    if q.dtype == torch.float32:  # twice the bytes
        rows, keys = rows // 2, max(16, keys // 2)
    key = f"{max(widths)} {str(q.dtype).removeprefix('torch.')}"
    default = (rows, keys, warps, stages)
    rows, keys, warps, stages = tuned_blocks(f"attention.{kernel}", key, q, default)
    if q.device.type == "cpu":
        rows = keys = INTERPRETED_BLOCK
    return {
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "BLOCK_M": rows, "BLOCK_N": keys, "WIDTH": widths[0], "WIDTH_V": widths[1],
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _rows(x: Tensor) -> int:
    """The stride between batches of a mask array; 0 if all batches share one row."""
    return 0 if x.shape[0] == 1 else x.stride(0)


@torch.library.custom_op("sabia::attention_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, until: Tensor, sinks: Tensor | None, start: int,
    scale: float, cap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, length, heads, size = q.shape
    out = q.new_empty(batch, length, heads, v.shape[-1])  # [B, T, H, M]
    lse = q.new_empty(batch, length, heads, dtype=torch.float32)  # [B, T, H]
    options = launch_options(q, v, "forward")
    _forward_kernel[triton.cdiv(length, options["BLOCK_M"]), batch * heads](
        q, k, v, first, sinks, out, lse, *_strides(q, k, v), _rows(first),
        length, k.shape[1], start, heads, heads // k.shape[2], scale, cap, size, v.shape[-1],
        CAPPED=cap > 0, SINKS=sinks is not None, **options,
    )  # fmt: skip
    return out, lse


@_forward.register_fake
def _(q, k, v, first, until, sinks, start, scale, cap):
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("sabia::attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, first: Tensor, until: Tensor, out: Tensor,
    lse: Tensor, start: int, scale: float, cap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, length, heads, size = q.shape
    keys, groups = k.shape[1], k.shape[2]
    delta = torch.empty_like(lse)  # [B, T, H]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    options = launch_options(q, v, "backward") | {"CAPPED": cap > 0}
    sizes = (length, keys, start, heads, heads // groups, scale, cap, size, v.shape[-1])
    _queries_kernel[triton.cdiv(length, options["BLOCK_M"]), batch * heads](
        q, k, v, first, out, lse, grad, delta, dq, *_strides(q, k, v), _rows(first), *sizes,
        **options,
    )  # fmt: skip
    _keys_kernel[triton.cdiv(keys, options["BLOCK_N"]), batch * groups](
        q, k, v, first, until, lse, grad, delta, dk, dv, *_strides(q, k, v), _rows(first),
        _rows(until), *sizes, **options,
    )  # fmt: skip
    return dq, dk, dv, delta


@_backward.register_fake
def _(grad, q, k, v, first, until, out, lse, start, scale, cap):
    made = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return *made, torch.empty_like(lse)


def _keep(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, first, until, sinks, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, first, until, *output, sinks)


def _gradients(ctx: Context, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, first, until, out, lse, sinks = ctx.saved_tensors
    saved = (q, k, v, first, until, out, lse)
    dq, dk, dv, delta = _backward(grad.contiguous(), *saved, *ctx.numbers)
    ds = None
    if sinks is not None:  # padding has delta 0
        # dz = -sum exp(z - lse) D over batch and queries: [H]
        ds = -(torch.exp(sinks.float() - lse) * delta).sum((0, 1)).to(sinks.dtype)
    return dq, dk, dv, None, None, ds, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def attention(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, until: Tensor, start: int, scale: float,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """See sabia.kernels.attention.interface.attention; heads of at most 256."""
    if max(q.shape[-1], v.shape[-1]) > 256:
        raise ValueError(f"attention: head size {max(q.shape[-1], v.shape[-1])} (at most 256)")
    arrays = (_unit(q), _unit(k).to(q.dtype), _unit(v).to(q.dtype), first, until, sinks)
    return _forward(*arrays, start, scale, softcap or 0.0)[0]
