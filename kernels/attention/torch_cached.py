"""Attention over the slots of a key-value cache in torch: `scaled_dot_product_attention`.

Its CPU and flash kernels read grouped keys without a copy; soft-capped attention is a plain
expression. One query per row of a large cache is computed by kernels.row_products on a CPU, and of
slots that rows share by products of matrices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from sabia.kernels.row_products.interface import scores as scores_of
from sabia.kernels.row_products.interface import weighted_sums
from sabia.kernels.row_products.torch_arrays import reads_in_order
from sabia.kernels.runtime.torch_fp32 import computed_in_fp32
from sabia.kernels.runtime.torch_support import numbers

Tensor = torch.Tensor


@dataclass(frozen=True)
class SharedSlots:
    """Rows of the cache whose first `slots` keys and values are equal."""

    rows: slice | Tensor  # [R] of int64, ascending
    first_row: int
    slots: int

    @classmethod
    def of(cls, rows: Sequence[int], slots: int) -> "SharedSlots":
        """For ascending rows."""
        together = rows[-1] - rows[0] == len(rows) - 1
        return cls(slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows), rows[0], slots)

    def read(self, x: Tensor) -> Tensor:
        """[K, S, N]: the shared slots of keys or values x[B, S or more, K, N], in fp32."""
        return x[self.first_row, : self.slots].transpose(0, 1).float()

    def times(self, x: Tensor, matrices: Tensor) -> Tensor:
        """The rows x[B, K, G, ·] times matrices[K, ·, M], [R, K, G, M]."""
        mine = x[self.rows].transpose(0, 1)  # [K, R, G, ·]
        made = torch.bmm(mine.flatten(1, 2), matrices)
        return made.unflatten(1, mine.shape[1:3]).transpose(0, 1)


@dataclass(frozen=True)
class CacheMask:
    """bias[B, 1, T, S]: 0 for the slots of the cache that a query sees, -inf for the others.
    shared: of groups of rows, none of which is in two."""

    bias: Tensor
    shared: Sequence[SharedSlots] = ()

    @property
    def queries(self) -> int:
        """T."""
        return self.bias.shape[2]

    @property
    def keys(self) -> int:
        """S."""
        return self.bias.shape[3]


def cache_mask(
    like: Tensor, keys: int, slots: Tensor, window: int | None, shared: Sequence[SharedSlots] = ()
) -> CacheMask:
    """See attention.attention_mask, with slots."""
    # [B, T, S], t - j
    distance = slots[:, :, None] - torch.arange(keys, device=like.device)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    bias = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)  # [B, T, S]
    return CacheMask(bias.masked_fill_(hidden, float("-inf"))[:, None], shared)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: CacheMask,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See attention.attention; keys and values may have another dtype than queries."""
    if (whole := _in_order(q, k, v)) is not None:
        return _one_query(q, *whole, mask, scale, softcap, sinks)
    dtype = q.dtype
    # [B, T, H, N] → [B, H, T, N]; keys and values [B, K, S, ·]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if k.dtype != q.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    if softcap is not None:
        return _capped_attention(q, k, v, mask, scale, softcap, sinks).transpose(1, 2)
    if sinks is not None:
        q, k, v, mask = _with_sink_key(q, k, v, mask, scale, sinks)
    size = v.shape[3]
    if size < q.shape[3]:  # the fused kernels need keys and values of one size
        v = F.pad(v, (0, q.shape[3] - size))
    if computed_in_fp32(q) and q.shape[2] > 1:
        q, k, v, mask = q.float(), k.float(), v.float(), CacheMask(mask.bias.float())
    return _fused_attention(q, k, v, mask, scale)[..., :size].to(dtype)


def _in_order(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """Keys and values with all slots of their rows, if there is one query per row and loops over
    the slots read them faster than a fused kernel."""
    if q.shape[1] > 1 or not q.dtype == k.dtype == v.dtype:
        return None
    if not reads_in_order(q, (k.numel() + v.numel()) * k.element_size()):
        return None
    keys, values = whole_rows(k), whole_rows(v)
    return None if keys is None or values is None else (keys, values)


def whole_rows(x: Tensor) -> Tensor | None:
    """The contiguous array of whole rows, of which x[B, S, K, N] is the first slots."""
    rows, slots, heads, size = x.shape
    step = heads * size
    whole, rest = divmod(x.stride(0), step)
    if rest or whole < slots or x.stride()[1:] != (step, size, 1):
        return None
    return x.as_strided((rows, whole, heads, size), (x.stride(0), step, size, 1))


def _one_query(
    q: Tensor, k: Tensor, v: Tensor, mask: CacheMask, scale: float, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """q[B, 1, H, N], contiguous k[B, S or more, K, N] and v[B, S or more, K, M] → [B, 1, H, M]."""
    batch, _, heads, size = q.shape
    groups, per_group = k.shape[2], heads // k.shape[2]
    queries = (q.float() * scale).reshape(batch, groups, per_group, size)
    made, first = torch.empty(batch, groups, per_group, mask.keys), np.zeros(batch, np.int64)
    for one in mask.shared:
        first[one.rows] = one.slots
        made[one.rows, :, :, : one.slots] = one.times(queries, one.read(k).transpose(1, 2))
    scores_of(numbers(queries), numbers(k), first, numbers(made))
    weights = _weights(made[..., None, :], mask, softcap, sinks)[..., 0, :].contiguous()
    out = torch.empty(batch, groups, per_group, v.shape[3])
    weighted_sums(numbers(weights), numbers(v), first, numbers(out))
    for one in mask.shared:
        out[one.rows] += one.times(weights[..., : one.slots], one.read(v))
    return out.reshape(batch, 1, heads, -1).to(q.dtype)


def _fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: CacheMask, scale: float) -> Tensor:
    """q, k, v[B, heads, length, N] → [B, T, H, N]."""
    if q.shape[2] == 1:  # one query per row: the heads of a group become its queries
        out = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])  # [B, K, H/K, N]
        out = F.scaled_dot_product_attention(out, k, v, attn_mask=mask.bias, scale=scale)
        return out.reshape(q.shape[0], 1, q.shape[1], v.shape[3])
    grouped = bool(q.shape[1] != k.shape[1])  # not a symbol under torch.compile
    if grouped and q.device.type == "cuda":
        # CUDA kernels that accept a bias do not read grouped keys; repeating keys is faster than
        # torch's fallback
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask.bias, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)


def _with_sink_key(
    q: Tensor, k: Tensor, v: Tensor, mask: CacheMask, scale: float, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, CacheMask]:
    """Append one key, whose score is the head's sink and whose value is zero.

    Eight more dimensions keep rows aligned. In two of them, queries hold sink / scale (rounded to
    q's dtype, and the remainder), the new key holds 1 and the other keys 0.
    """
    batch, heads, length, size = q.shape
    wide = sinks.float() / scale
    high = wide.to(q.dtype)
    pair = torch.stack((high, (wide - high).to(q.dtype)), -1)  # [H, 2]
    # [B, H, T, N + 8]
    q = torch.cat((q, F.pad(pair, (0, 6))[:, None].expand(batch, heads, length, 8)), -1)
    key = F.pad(k.new_ones(2), (size, 6)).expand(batch, k.shape[1], 1, size + 8)  # [B, K, 1, N + 8]
    k = torch.cat((F.pad(k, (0, 8)), key), 2)  # [B, K, S + 1, N + 8]
    return q, k, F.pad(v, (0, 0, 0, 1)), CacheMask(F.pad(mask.bias, (0, 1)))


def _capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: CacheMask, scale: float, cap: float, sinks: Tensor | None
) -> Tensor:
    batch, heads, length, size = q.shape
    groups = k.shape[1]
    q = q.reshape(batch, groups, heads // groups, length, size)  # [B, K, H/K, T, N]
    scores = torch.einsum("bkgtn,bksn->bkgts", q, k).float() * scale  # [B, K, H/K, T, S], fp32
    weights = _weights(scores, mask, cap, sinks).to(v.dtype)
    out = torch.einsum("bkgts,bksn->bkgtn", weights, v)  # [B, K, H/K, T, P]
    return out.reshape(batch, heads, length, v.shape[-1])


def _weights(scores: Tensor, mask: CacheMask, cap: float | None, sinks: Tensor | None) -> Tensor:
    """The weights of keys, from scores[B, K, H/K, T, S] times the scale, fp32."""
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores + mask.bias[:, :, None]
    if sinks is not None:
        # [B, K, H/K, T, 1]
        column = sinks.float().view(1, scores.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    # the sink is in the denominator only: its own column is dropped
    return torch.softmax(scores, -1)[..., : mask.keys]
