"""Attention on CPU without a [T, S] matrix: pieces of queries and keys, each one fused call.

The queries of a row are divided where their intervals of keys (see interface.py) change form:
- triangle: 256 or more queries (or all of a square) whose first key is the same and whose last key
  is their own, or up to 128 queries that see 256 or more earlier keys (long windows), on the
  queries' own keys. The earlier keys that all of them see are a rectangle of their own, those that
  some of them see (the edge of a window) too, with a bias; results are merged by their
  log-sum-exps.
- rectangle: 256 or more queries that all see the same keys.
- tile: up to 128 of the other queries (short documents, windows) and the keys that any of them
  sees, with a bias of 0 or -inf. Queries of padding get 0.
Pieces of one shape are one batch. Costs and memory are linear in T for documents and windows of
bounded length. The backward pass needs outputs and log-sum-exps only (arXiv 2205.14135, B.2); with
those of the merged result each piece gives its part of the gradients.

For short rows in BF16 the backward pass is made of whole products of matrices (`whole_backward`).
torch's fused one divides fewer than 768 queries into blocks of 32 or 64, whose products in BF16
reach a twentieth of what AMX or AVX512-BF16 can do; here a product is that of all queries and keys
of a head, and the weights are made in one pass over memory. Scores are computed and products summed
in fp32, as there: for scores, oneDNN multiplies fp32 matrices, whose numbers are those of BF16, in
BF16. Without AMX the forward pass is computed so too (`whole_forward`). Measurements:
tests/bench/RESULTS.md.
"""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from sabia.kernels.row_functions.interface import attention_gradient, attention_weights
from sabia.kernels.row_products.torch_arrays import numbers
from sabia.kernels.runtime.autograd_context import Context
from sabia.kernels.runtime.torch_fp32 import HAS_AMX, HAS_BF16_UNITS

Tensor = torch.Tensor

MOST_QUERIES = 767  # torch's blocks are 256 queries from 768 on
BLOCK = 256  # queries at once; a causal block has no products with later keys
SCORES = 1 << 21  # of a batch of pieces


def in_whole_products(q: Tensor) -> bool:
    """Whether q[n, H, T, N] is of those rows."""
    return (
        HAS_BF16_UNITS
        and q.dtype == torch.bfloat16
        and q.device.type == "cpu"
        and q.shape[2] <= MOST_QUERIES
    )


@contextlib.contextmanager
def _fp32_rounded_to_bf16() -> Iterator[None]:
    """Products of fp32 matrices are computed in BF16 and summed in fp32: a setting of the process,
    so that other threads must not multiply fp32 matrices meanwhile."""
    settings: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _ordered(x: Tensor) -> Tensor:
    """A copy in the order of the axes."""
    return torch.empty(x.shape, dtype=x.dtype).copy_(x)


def whole_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """out[n, H, T, N] and lse[n, H, T]; see `whole_backward`."""
    (count, heads, queries, size), (shared, keys) = q.shape, k.shape[1:3]
    block = min(queries, BLOCK)
    step = min(count, max(1, SCORES // (heads * block * keys)))
    numel = step * heads * block * keys
    wide, narrow = torch.empty(numel), torch.empty(numel, dtype=q.dtype)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    for first in range(0, count, step):
        pieces = slice(first, first + step)
        query = _ordered(q[pieces])
        key, value = (_ordered(x[pieces]).flatten(0, 1) for x in (k, v))
        mask = query.new_empty(0, 0, 0).float() if bias is None else bias[pieces, 0].contiguous()
        for start in range(0, queries, block):
            rows = slice(start, min(start + block, queries))
            seen = rows.stop if causal else keys
            shape = len(key), heads // shared * (rows.stop - start), seen
            by_head = len(query), heads, rows.stop - start, seen
            left = query[:, :, rows].reshape(*shape[:2], size)
            scores, weights = (x[: math.prod(shape)].view(shape) for x in (wide, narrow))
            with _fp32_rounded_to_bf16():
                torch.bmm(left.float(), key[:, :seen].float().transpose(1, 2), out=scores)
            sums = torch.empty(by_head[:3])
            s, p, total, hidden = (
                numbers(x) for x in (scores.view(by_head), weights.view(by_head), sums, mask)
            )
            attention_weights(s, hidden, start, causal, scale, p, total)
            out[pieces, :, rows] = torch.bmm(weights, value[:, :seen]).view(*by_head[:3], size)
            lse[pieces, :, rows] = sums
    return out, lse


def whole_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    bias: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q[n, H, T, N], k and v[n, K, S, N], in their order of memory, from those of
    out[n, H, T, N] and lse[n, H, T], which may be that of more keys; bias: None or [n, 1, T, S] of
    0 and -inf."""
    (count, heads, queries, size), (shared, keys) = q.shape, k.shape[1:3]
    block = min(queries, BLOCK)
    step = min(count, max(1, SCORES // (heads * block * keys)))
    numel = step * heads * block * keys
    wide, narrow = torch.empty(2, numel), torch.empty(2, numel, dtype=q.dtype)
    d_q, d_k, d_v = (torch.empty_like(x) for x in (q, k, v))
    for first in range(0, count, step):
        pieces = slice(first, first + step)
        query, given_grad = (_ordered(x[pieces]) for x in (q, grad))
        key, value = (_ordered(x[pieces]).flatten(0, 1) for x in (k, v))
        of_pieces = (
            lse[pieces], *(x[pieces].transpose(1, 2) for x in (grad, out)),
            query.new_empty(0, 0, 0).float() if bias is None else bias[pieces, 0],
        )  # fmt: skip
        arrays = [numbers(x.contiguous()) for x in of_pieces]
        for start in reversed(range(0, queries, block)):  # the last block has all keys
            rows = slice(start, min(start + block, queries))
            seen = rows.stop if causal else keys
            shape = len(key), heads // shared * (rows.stop - start), seen
            by_head = -1, heads, rows.stop - start, seen
            # [n·K, H/K·T, N]
            left, right = (x[:, :, rows].reshape(*shape[:2], size) for x in (query, given_grad))
            scores, products = wide[:, : math.prod(shape)].view(2, *shape)
            weights, d_scores = narrow[:, : math.prod(shape)].view(2, *shape)
            with _fp32_rounded_to_bf16():
                torch.bmm(left.float(), key[:, :seen].float().transpose(1, 2), out=scores)
                torch.bmm(right.float(), value[:, :seen].float().transpose(1, 2), out=products)
            s, p = (numbers(x.view(by_head)) for x in (scores, products))
            made = (numbers(x.view(by_head)) for x in (weights, d_scores))
            given: Any = s, p, *arrays, start, causal, scale, *made
            attention_gradient(*given)
            d_rows = torch.bmm(d_scores, key[:, :seen])
            d_q[pieces, :, rows] = d_rows.view(*by_head[:3], size)
            for total, part, other in ((d_k, d_scores, left), (d_v, weights, right)):
                target = total[pieces, :, :seen]
                added = torch.bmm(part.transpose(1, 2), other).view(target.shape)
                target.copy_(added if rows.stop == queries else added.add_(target))
    return d_q, d_k, d_v


TILE = 128
LEAST_RUN = 256
LEAST_KEYS = 256
KEY_STEP = 64
MERGED = ("before", "edge")


@dataclass(frozen=True)
class Group:
    """n pieces of one shape: rows of the flattened [B·T] queries and [B·S] keys, n·len each.

    causal: query i of a piece sees keys up to i. bias[n, 1, queries, keys], fp32; None: all keys.
    merged: an earlier group has other keys of the same queries.
    """

    count: int
    queries: Tensor | slice
    keys: Tensor | slice
    causal: bool = False
    merged: bool = False
    bias: Tensor | None = None


def _is_one_piece(parts: list[Group], queries: Tensor, keys: Tensor) -> bool:
    """Whether one group has all queries[B·T, H, N] and all keys[B·S, K, N], each once."""
    ranges = [(group.queries, group.keys) for group in parts]
    return ranges == [(slice(0, len(queries)), slice(0, len(keys)))]


def _runs(
    first: np.ndarray, last: np.ndarray, causal: bool, least: int
) -> Iterator[tuple[int, int, bool]]:
    """[begin, end) of queries of a row, runs of at least `least` (True) alone, others in tiles."""
    change = first[1:] != first[:-1]
    change |= np.diff(last) != (1 if causal else 0)
    edges = np.concatenate(([0], np.flatnonzero(change) + 1, [len(first)]))
    long = np.flatnonzero(np.diff(edges) >= least)
    at = 0
    for begin, end in [*zip(edges[long], edges[long + 1], strict=True), (len(first), len(first))]:
        for start in range(at, begin, TILE):
            yield start, min(start + TILE, int(begin)), False
        if begin < end:
            yield int(begin), int(end), True
        at = int(end)


def _pieces(
    first: np.ndarray, last: np.ndarray, keys: int, causal: bool
) -> Iterator[tuple[str, int, int, int, int]]:
    """(kind, first query, queries, first key, keys) of one row."""
    # a square that is all one run needs no bias, however small
    least = LEAST_RUN if len(first) < keys else min(LEAST_RUN, len(first))
    for begin, end, is_long in _runs(first, last, causal, least):
        low, high = int(first[begin:end].min()), int(last[begin:end].max()) + 1
        if low >= high:  # padding
            continue
        common = int(first[begin:end].max())  # seen by all, if it lies before the queries
        own = int(last[begin])  # the key of the first query
        is_run = causal and bool((np.diff(last[begin:end]) == 1).all())
        if is_run and (is_long or own - common > LEAST_KEYS):
            yield "triangle", begin, end - begin, own, end - begin
            if low < common:
                yield "edge", begin, end - begin, low, common + 1 - low
                common += 1
            if common < own:
                yield "before", begin, end - begin, common, own - common
        elif not is_long:
            size = min(keys, -(-(high - low) // KEY_STEP) * KEY_STEP)
            yield "tile", begin, end - begin, min(low, keys - size), size
        else:
            yield "rectangle", begin, end - begin, low, high - low


def groups(first: Tensor, last: Tensor, keys: int, causal: bool) -> list[Group]:
    """first[B, T], last[B, T]: the interval of keys of each query, empty for padding.

    `causal`: the last key is the query's own.
    """
    low, high = first.numpy(), last.numpy()
    shapes: dict[tuple[str, int, int], list[tuple[int, int, int]]] = {}
    for row in range(len(low)):
        for kind, query, length, key, size in _pieces(low[row], high[row], keys, causal):
            shapes.setdefault((kind, length, size), []).append((row, query, key))
    ordered = sorted(shapes.items(), key=lambda item: (item[0][0] in MERGED, item[0]))
    return [_group(first, last, keys, *shape, np.array(where)) for shape, where in ordered]


def _group(
    first: Tensor, last: Tensor, keys: int, kind: str, length: int, size: int, where: np.ndarray
) -> Group:
    row, query, key = where.T
    queries = (row * first.shape[1] + query)[:, None] + np.arange(length)
    read = key[:, None] + np.arange(size)  # [n, size]
    bias = None
    if kind in ("tile", "edge"):
        at = torch.from_numpy(queries)
        j = torch.from_numpy(read)[:, None]
        hidden = (j < first.flatten()[at][..., None]) | (j > last.flatten()[at][..., None])
        bias = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None]
    flat = (row * keys)[:, None] + read
    flags = kind == "triangle", kind in MERGED
    return Group(len(row), _index(queries), _index(flat), *flags, bias)


def _index(rows: np.ndarray) -> Tensor | slice:
    """Flat row numbers; a slice if they are one range."""
    flat = rows.ravel()
    if flat[-1] - flat[0] + 1 == len(flat) and (np.diff(flat) == 1).all():
        return slice(int(flat[0]), int(flat[-1]) + 1)
    return torch.from_numpy(flat)


def _taken(x: Tensor, rows: Tensor | slice, count: int) -> Tensor:
    """The rows of x[B·T, H, N] as [n, H, length, N]."""
    part = x[rows]
    return part.view(count, -1, *part.shape[1:]).transpose(1, 2)


def _flat(x: Tensor) -> Tensor:
    """[n, H, length, …] → [n·length, H, …]."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def _scores(q: Tensor, k: Tensor, group: Group, scale: float, cap: float) -> tuple[Tensor, Tensor]:
    """Capped scores, -inf where hidden, and the cap's slope: [n, K, H/K, T, S], fp32."""
    grouped = q.unflatten(1, (k.shape[1], -1))
    share = torch.tanh(torch.einsum("bkgtn,bksn->bkgts", grouped, k).float() * (scale / cap))
    scores = share * cap
    if group.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill_(hidden, -torch.inf)
    elif group.bias is not None:
        scores = scores.add_(group.bias[:, :, None])
    return scores, 1 - share.square_()


def _piece(
    q: Tensor, k: Tensor, v: Tensor, group: Group, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """(out[n, H, T, N], log-sum-exp[n, H, T] in fp32) of one group; a query without keys: 0, 0."""
    if cap is None and in_whole_products(q) and not HAS_AMX:
        return whole_forward(q, k, v, group.causal, group.bias, scale)
    if cap is None:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, group.causal, attn_mask=group.bias, scale=scale
        )
    scores, _ = _scores(q, k, group, scale, cap)
    lse = torch.logsumexp(scores, -1).nan_to_num_(neginf=0.0)
    out = torch.einsum("bkgts,bksn->bkgtn", (scores - lse[..., None]).exp_().to(v.dtype), v)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _piece_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, group: Group,
    scale: float, cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, each with the shape of its input."""
    if cap is None and in_whole_products(q):
        given = group.causal, group.bias, scale
        return whole_backward(grad, q, k, v, out, lse, *given)
    if cap is None:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, group.causal, attn_mask=group.bias, scale=scale
        )
    heads = (k.shape[1], -1)
    scores, slope = _scores(q, k, group, scale, cap)
    weights = (scores - lse.unflatten(1, heads)[..., None]).exp_()  # [n, K, H/K, T, S]
    inner = (grad.float() * out.float()).sum(-1).unflatten(1, heads)[..., None]
    grad, q = grad.unflatten(1, heads), q.unflatten(1, heads)
    d_v = torch.einsum("bkgts,bkgtn->bksn", weights.to(v.dtype), grad)
    d_scores = torch.einsum("bkgtn,bksn->bkgts", grad, v).float().sub_(inner)
    d_scores = d_scores.mul_(weights).mul_(slope).mul_(scale).to(k.dtype)
    d_q = torch.einsum("bkgts,bksn->bkgtn", d_scores, k).flatten(1, 2)
    return d_q, torch.einsum("bkgts,bkgtn->bksn", d_scores, q), d_v


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, parts: list[Group], scale: float,
    cap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out[B, T, H, N], log-sum-exp[B, T, H], fp32, with the sinks)."""
    queries, keys, values = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    is_whole = _is_one_piece(parts, queries, keys)
    out = queries if is_whole else torch.zeros_like(queries)
    lse = torch.zeros(0 if is_whole else len(queries), queries.shape[1])
    for group in parts:
        sources = (queries, group.queries), (keys, group.keys), (values, group.keys)
        taken: Any = *(_taken(x, rows, group.count) for x, rows in sources), group, scale, cap
        part, weight = map(_flat, _piece(*taken))
        if is_whole:
            out, lse = part, weight
            break
        if group.merged:
            before = lse[group.queries]
            total = torch.logaddexp(before, weight)
            kept, added = ((x - total).exp_()[..., None] for x in (before, weight))
            part = (out[group.queries] * kept + part * added).to(out.dtype)
            weight = total
        out[group.queries], lse[group.queries] = part, weight
    if sinks is not None:  # a sink only enlarges the denominator
        total = torch.logaddexp(lse, sinks.float())
        out = (out * (lse - total).exp_()[..., None]).to(out.dtype)
        lse = total
    return out.reshape(q.shape), lse.reshape(q.shape[:3])


def backward_of(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, parts: list[Group],
    scale: float, cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v; parts of one gradient are summed in fp32."""
    flat = [x.flatten(0, 1) for x in (grad, q, k, v, out, lse)]
    queries, keys, values = flat[1:4]
    given, sums = (q, k, v), []
    if not _is_one_piece(parts, queries, keys):
        sums = [torch.zeros(x.shape, dtype=torch.float32) for x in (queries, keys, values)]
    for group in parts:
        rows, of_keys = group.queries, group.keys
        places = zip(flat, (rows, rows, of_keys, of_keys, rows, rows), strict=True)
        taken: Any = *(_taken(x, where, group.count) for x, where in places), group, scale, cap
        results = _piece_backward(*taken)
        if not sums:
            sums = [*map(_flat, results)]
            break
        targets = zip(sums, (rows, of_keys, of_keys), strict=True)
        for (total, where), part in zip(targets, map(_flat, results), strict=True):
            if isinstance(where, slice):
                total[where] += part
            else:
                total.index_add_(0, where, part.float())
    d_q, d_k, d_v = (
        total.to(x.dtype).reshape(x.shape) for total, x in zip(sums, given, strict=True)
    )
    return d_q, d_k, d_v


def _sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """A sink's value is 0: d z = -p_z (d out · out), summed over [B, T]."""
    share = (sinks.float() - lse).exp_()
    return -(share * (grad.float() * out.float()).sum(-1)).sum((0, 1)).to(sinks.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, parts: list[Group],
        scale: float, cap: float | None,
    ) -> Tensor:  # fmt: skip
        out, lse = _forward(q, k, v, sinks, parts, scale, cap)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.settings = parts, scale, cap
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        d_sinks = None if sinks is None else _sink_gradient(grad, out, lse, sinks)
        return *backward_of(grad, q, k, v, out, lse, *ctx.settings), d_sinks, None, None, None


# For torch.compile: the same as operators, which it does not look into. The groups depend on the
# contents of the mask, so they are found inside, at each call.


@torch.library.custom_op("sabia::cpu_attention", mutates_args=())
def _operator(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, first: Tensor, last: Tensor,
    causal: bool, scale: float, cap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    parts = groups(first, last, k.shape[1], causal)
    return _forward(q, k, v, sinks, parts, scale, cap)


@_operator.register_fake
def _(q: Tensor, *_others: object) -> tuple[Tensor, Tensor]:
    return torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("sabia::cpu_attention_backward", mutates_args=())
def _backward_operator(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, first: Tensor,
    last: Tensor, causal: bool, scale: float, cap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    parts = groups(first, last, k.shape[1], causal)
    return backward_of(grad, q, k, v, out, lse, parts, scale, cap)


@_backward_operator.register_fake
def _(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_others: object) -> tuple[Tensor, ...]:
    return tuple(torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))


def _keep(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.causal, ctx.scale, ctx.cap = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Context, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, first, last, out, lse = ctx.saved_tensors
    settings = (first, last, ctx.causal, ctx.scale, ctx.cap)
    d_sinks = None if sinks is None else _sink_gradient(grad, out, lse, sinks)
    return *_backward_operator(grad, q, k, v, out, lse, *settings), d_sinks, *[None] * 5


_operator.register_autograd(_differentiate, setup_context=_keep)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, cap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """q[B, T, H, N], k[B, S, K, N], v[B, S, K, M], sinks[H], a Mask → [B, T, H, M]."""
    size = v.shape[3]
    if size != q.shape[3]:  # the fused kernel needs keys and values of one size
        q, k, v = (F.pad(x, (0, max(size, q.shape[3]) - x.shape[3])) for x in (q, k, v))
    if torch.compiler.is_compiling():
        shape = (q.shape[0], q.shape[1])
        intervals = mask.first.expand(shape), mask.last_keys.expand(shape)
        out, _ = _operator(q, k, v, sinks, *intervals, mask.last is None, scale, cap)
    else:
        out = _Attention.apply(q, k, v, sinks, mask.groups(q.shape[0]), scale, cap)
    return out[..., :size]
