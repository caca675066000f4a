"""Attention in torch: masks, and the choice between torch's attention and sabia.kernels.

On CPU, and with keys in a cache, it is `scaled_dot_product_attention`, whose CPU and flash kernels
read grouped keys without a copy; soft-capped attention is a plain expression. On CUDA, and where
SABIA_KERNELS names an implementation, rows without a cache use sabia.kernels.attention, whose masks
are one interval of keys per query instead of a matrix [T, S].
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sabia.core.model.kernel_choice import kernels_of, raises_missing_backend, unavailable
from sabia.core.model.ops_torch_wide import computed_in_fp32
from sabia.kernels.attention.interface import attention as attention_kernel
from sabia.kernels.attention.interface import attention_mask as kernel_mask

Tensor = torch.Tensor
KERNELS = kernels_of("torch")
_kernel = raises_missing_backend(attention_kernel)


@dataclass(frozen=True)
class AttentionMask:
    """`causal`: the triangle j ≤ t. Otherwise `bias`, 0 or -inf, [B or 1, 1, T, S]; None: all."""

    causal: bool
    bias: Tensor | None = None

    def float(self) -> "AttentionMask":
        """The same for queries in fp32."""
        return self if self.bias is None else AttentionMask(self.causal, self.bias.float())


def attention_mask(
    like: Tensor,
    keys: int,
    *,
    segments: Tensor | None = None,
    slots: Tensor | None = None,
    window: int | None = None,
    causal: bool = True,
) -> Any:
    """See Ops.attention_mask: an AttentionMask, or the kernels' own."""
    length = like.shape[1]
    if KERNELS.use("attention", like.device.type):
        if slots is None:
            settings: Any = {"segments": segments, "window": window, "causal": causal}
            return kernel_mask(like, length, keys, **settings)
        if KERNELS.requested["attention"] == "triton":
            raise unavailable("attention: triton has no cached decoding (expected whole rows)")
    if segments is None and slots is None and (window is None or window >= length):
        return AttentionMask(causal)
    # [B or 1, T]
    queries = torch.arange(length, device=like.device)[None] if slots is None else slots
    distance = queries[:, :, None] - torch.arange(keys, device=like.device)  # [B or 1, T, S], t - j
    allowed = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        allowed &= distance.abs() < window
    if segments is not None:
        allowed = allowed & (segments[:, :, None] == segments[:, None, :])
    bias = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)  # [B or 1, T, S]
    return AttentionMask(False, bias.masked_fill_(~allowed, float("-inf"))[:, None])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See Ops.attention."""
    if not isinstance(mask, AttentionMask):
        options: Any = {"scale": scale, "softcap": softcap, "sinks": sinks}
        options["implementation"] = KERNELS.requested["attention"]
        return _kernel(q, k.to(q.dtype), v.to(q.dtype), mask, **options)
    # [B, T, H, N] → [B, H, T, N]; keys and values [B, K, S, ·]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if k.dtype != q.dtype:
        k, v = k.to(q.dtype), v.to(q.dtype)
    if softcap is not None:
        return _capped_attention(q, k, v, mask, scale, softcap, sinks).transpose(1, 2)
    if sinks is not None:
        q, k, v, mask = _with_sink_key(q, k, v, mask, scale, sinks)
    size, dtype = v.shape[3], q.dtype
    if size < q.shape[3]:  # the fused kernels need keys and values of one size
        v = F.pad(v, (0, q.shape[3] - size))
    if computed_in_fp32(q) and q.shape[2] > 1:
        q, k, v, mask = q.float(), k.float(), v.float(), mask.float()
    return _fused_attention(q, k, v, mask, scale)[..., :size].to(dtype)


def _fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    """q, k, v[B, heads, length, N] → [B, T, H, N]."""
    if q.shape[2] == 1:  # one query per row: the heads of a group become its queries
        out = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])  # [B, K, H/K, N]
        out = F.scaled_dot_product_attention(out, k, v, attn_mask=mask.bias, scale=scale)
        return out.reshape(q.shape[0], 1, q.shape[1], v.shape[3])
    grouped = bool(q.shape[1] != k.shape[1])  # not a symbol under torch.compile
    if grouped and mask.bias is not None and q.device.type == "cuda":
        # CUDA kernels that accept a bias do not read grouped keys; repeating keys is faster than
        # torch's fallback
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        grouped = False
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask.bias, is_causal=mask.causal, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)


def _with_sink_key(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, AttentionMask]:
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
    bias = mask.bias
    if bias is None:
        bias = q.new_zeros((1, 1, length, length))
        if mask.causal:
            bias.masked_fill_(_future_keys(q), float("-inf"))
    return q, k, F.pad(v, (0, 0, 0, 1)), AttentionMask(False, F.pad(bias, (0, 1)))


def _future_keys(q: Tensor) -> Tensor:
    """Boolean [T, T]: the keys after each query of q[..., T, N]."""
    length = q.shape[-2]
    return torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)


def _capped_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, cap: float, sinks: Tensor | None
) -> Tensor:
    batch, heads, length, size = q.shape
    groups = k.shape[1]
    q = q.reshape(batch, groups, heads // groups, length, size)  # [B, K, H/K, T, N]
    scores = torch.einsum("bkgtn,bksn->bkgts", q, k).float() * scale  # [B, K, H/K, T, S], fp32
    scores = torch.tanh(scores / cap) * cap
    if mask.causal:
        scores = scores.masked_fill(_future_keys(q), float("-inf"))
    elif mask.bias is not None:
        scores = scores + mask.bias[:, :, None]
    if sinks is not None:
        # [B, K, H/K, T, 1]
        column = sinks.float().view(1, groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    # the sink is in the denominator only: its own column is dropped
    weights = torch.softmax(scores, -1)[..., : k.shape[2]].to(v.dtype)
    out = torch.einsum("bkgts,bksn->bkgtn", weights, v)  # [B, K, H/K, T, P]
    return out.reshape(batch, heads, length, v.shape[-1])
