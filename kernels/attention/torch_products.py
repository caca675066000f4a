"""The backward pass of attention on a CPU by whole products of matrices, for short rows in BF16.

torch's fused backward pass divides fewer than 768 queries into blocks of 32 or 64. In BF16 the
products of such blocks reach a twentieth of what AMX or AVX512-BF16 can do; here a product is that
of all queries and keys of a head, and the weights are made in one pass over memory. Scores are
computed and products summed in fp32, as there: for scores, oneDNN multiplies fp32 matrices, whose
numbers are those of BF16, in BF16. Measurements: tests/bench/RESULTS.md.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from sabia.kernels.row_functions.interface import attention_gradient
from sabia.kernels.row_products.torch_arrays import numbers
from sabia.kernels.runtime.torch_fp32 import HAS_BF16_UNITS

Tensor = torch.Tensor
MOST_QUERIES = 767  # torch's blocks are 256 queries from 768 on
BLOCK = 256  # queries at once; a causal block has no products with later keys
SCORES = 1 << 21  # of a batch of pieces


def serves(q: Tensor) -> bool:
    """Whether the backward pass of q[n, H, T, N] is computed here."""
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


def backward(
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
