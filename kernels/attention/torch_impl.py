"""Attention over packed documents in torch: the mask, the reference, and torch's own kernels.

`scaled_dot_product_attention` is the fastest for a plain causal mask (it selects cuDNN or
FlashAttention) and supports grouped heads; on CPU its kernel also computes the pieces of other
masks (torch_cpu). FlexAttention generates a fused Triton kernel from a score function and a block
mask, whose blocks are computed here from the intervals, without the [B, T, S] matrix that
`create_block_mask` makes.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sabia.kernels.attention import torch_cached, torch_cpu
from sabia.kernels.attention.torch_cached import CacheMask
from sabia.kernels.runtime.dispatch import Choice, Option, choose, reference_option, triton_obstacle
from sabia.kernels.runtime.torch_fp32 import computed_in_fp32
from sabia.kernels.runtime.torch_process import allow_compilations

Tensor = torch.Tensor
FLEX_BLOCK = 128
FLEX_LEAST_HEAD = 16


def _once(compute: Callable[[Any], Any]) -> Any:
    """A property computed once. While compiling it is computed each time: the compiler merges equal
    expressions, but cannot trace the lock of functools.cached_property."""
    name = compute.__name__

    def read(self: Any) -> Any:
        if torch.compiler.is_compiling():
            return compute(self)
        if name not in self.__dict__:
            self.__dict__[name] = compute(self)
        return self.__dict__[name]

    return property(read, doc=compute.__doc__)


@dataclass(frozen=True)
class Mask:
    """first[B or 1, T]: the least visible key of each query, `keys` for padding (int32).

    until[B or 1, S]: one past the last position that sees each key, 0 for padding (int32).
    `causal`: the plain triangle of a square; `whole`: every query sees every key.
    last[B or 1, T]: the last visible key of each query, -1 for padding; None: its own one.
    at[B, T]: the key that is each query's own; None: the one at its position.
    """

    first: Tensor
    until: Tensor
    start: int
    causal: bool
    whole: bool = False
    last: Tensor | None = None
    at: Tensor | None = None

    @property
    def queries(self) -> int:
        """T."""
        return self.first.shape[-1]

    @property
    def keys(self) -> int:
        """S."""
        return self.until.shape[-1]

    @_once
    def positions(self) -> Tensor:
        """int32[T] of the queries."""
        count = self.first.shape[-1]
        return torch.arange(self.start, self.start + count, device=self.first.device)

    @property
    def last_keys(self) -> Tensor:
        """int[B or 1, T]: the last visible key of each query; any number for padding."""
        if self.last is not None:
            return self.last
        return self.positions[None] if self.at is None else self.at

    @_once
    def dense(self) -> Tensor:
        """bool[B or 1, 1, T, S]: which keys each query sees."""
        keys = torch.arange(self.keys, device=self.first.device)
        allowed = (keys >= self.first[..., None]) & (keys <= self.last_keys[..., None])
        return allowed[:, None]

    def groups(self, batch: int) -> list[torch_cpu.Group]:
        """The pieces of a batch on CPU, computed once."""
        by_batch = self.__dict__.setdefault("groups by batch", {})
        if batch not in by_batch:
            shape = (batch, self.first.shape[-1])
            intervals = self.first.expand(shape), self.last_keys.expand(shape)
            causal = self.last is None
            by_batch[batch] = torch_cpu.groups(*intervals, self.keys, causal)
        return by_batch[batch]

    @_once
    def seen(self) -> Tensor:
        """bool[B or 1, T, 1, 1]: queries that are not padding."""
        return (self.first < self.keys)[..., None, None]

    @_once
    def blocks(self) -> Any:
        """FlexAttention's BlockMask."""
        return _block_mask(self)


def attention_mask(
    like: Tensor, queries: int, keys: int, segments: Tensor | None, start: int, window: int | None,
    causal: bool,
) -> Mask:  # fmt: skip
    """See attention.attention_mask."""
    at = torch.arange(keys, device=like.device, dtype=torch.int32)[None]  # [1, S]
    if segments is None:
        # [1, S] each: a key's document is [begin, end)
        begin, end = torch.zeros_like(at), torch.full_like(at, keys)
    else:
        change = torch.ones_like(segments, dtype=torch.bool)
        # [B, S]: the first token of each document
        change[:, 1:] = segments[:, 1:] != segments[:, :-1]
        begin = torch.where(change, at, 0).cummax(-1).values  # [B, S]
        last = torch.where(change.roll(-1, -1), at + 1, keys)  # row's end is always a change
        end = last.flip(-1).cummin(-1).values.flip(-1)  # [B, S]
    if window is not None and window < keys:
        # causal: first[t] = max(document start, p - window + 1); j is seen while p < j + window
        begin, end = torch.maximum(begin, at - window + 1), torch.minimum(end, at + window)
    if segments is not None:
        # an empty interval for padding: first = S, until = 0
        begin, end = torch.where(segments == 0, keys, begin), torch.where(segments == 0, 0, end)
    free = False  # or True: a constant, where torch.compile has a symbol for the condition
    if segments is None and (window is None or window >= keys) and queries == keys:
        free = True
    begin, end = begin.int(), end.int().contiguous()
    first = begin[:, start : start + queries].contiguous()  # [B or 1, T]
    if causal:
        return Mask(first, end, start, free)
    last = (end[:, start : start + queries] - 1).contiguous()  # [B or 1, T]
    return Mask(first, end, start, False, free, last)


def mask_at(
    like: Tensor, at: Tensor, keys: int, segments: Tensor | None, window: int | None
) -> Mask:
    """See attention.attention_mask, with `at`."""
    whole = attention_mask(like, keys, keys, segments, 0, window, True)
    first = whole.first.expand(len(at), keys).gather(1, at)
    return Mask(first, whole.until, 0, False, at=at.int())


cache_mask = torch_cached.cache_mask


def _block_mask(mask: Mask) -> Any:
    from torch.nn.attention.flex_attention import BlockMask

    rows, length = mask.first.shape
    # blocks of queries, blocks of keys
    count, total = -(-length // FLEX_BLOCK), -(-mask.keys // FLEX_BLOCK)
    spare = count * FLEX_BLOCK - length
    shape = (rows, count, FLEX_BLOCK)
    firsts = F.pad(mask.first, (0, spare), value=mask.keys).view(shape)
    most, least = firsts.amax(-1), firsts.amin(-1)  # [B, count]: of first keys
    # one past the last visible key
    reach = torch.where(mask.first < mask.keys, mask.last_keys + 1, 0)
    reach = F.pad(reach, (0, spare)).view(shape)  # [B, count, FLEX_BLOCK]
    # [B, count]: end of what any, of what every query sees
    stop, surely = reach.amax(-1), reach.amin(-1)
    # [B, count]: blocks of keys with a visible key
    low, high = least // FLEX_BLOCK, -(-stop // FLEX_BLOCK)
    # [B, count]: blocks seen by every query
    full_low, full_high = -(-most // FLEX_BLOCK), surely // FLEX_BLOCK
    block = torch.arange(total, device=mask.first.device)
    some = (block >= low[..., None]) & (block < high[..., None])  # [B, count, total]
    full = (block >= full_low[..., None]) & (block < full_high[..., None])  # [B, count, total]
    first, start, keys = mask.first, mask.start, mask.keys
    limits = mask.at if mask.last is None else mask.last

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = b if rows > 1 else b * 0
        inside = i.clamp_max(length - 1)  # the last block reaches beyond the queries
        most = i + start if limits is None else limits[row, inside]
        return (j >= first[row, inside]) & (j <= most) & (i < length) & (j < keys)

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        # [B, count, total]: the chosen blocks first
        order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)
        return chosen.sum(-1).int()[:, None], order.int()[:, None]

    return BlockMask.from_kv_blocks(
        *listed(some & ~full),
        *listed(full),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=visible,
        seq_lengths=(length, keys),
    )


def _bare(mask: Mask) -> bool:
    """Whether `scaled_dot_product_attention` needs no mask in memory."""
    return mask.causal or mask.whole


def _cuda_library(q: Tensor, v: Tensor, flexible: bool) -> Option:
    size, obstacle = min(q.shape[-1], v.shape[-1]), None
    if flexible and size < FLEX_LEAST_HEAD:
        obstacle = f"FlexAttention: heads of {size} (at least {FLEX_LEAST_HEAD})"
    kernel = "FlexAttention" if flexible else "scaled_dot_product_attention"
    return Option("library", f"{kernel}: torch's fused kernel", obstacle)


def choose_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | CacheMask, softcap: float | None,
    sinks: Tensor | None, implementation: str | None,
) -> Choice:  # fmt: skip
    """See attention.choose_attention."""
    if not isinstance(mask, Mask):  # one implementation; Triton alone is refused
        cached = Option("library", "scaled_dot_product_attention over the slots of a cache")
        refused = Option("triton", "", "it has no cached decoding (expected whole rows)")
        named = implementation if implementation == "triton" else None
        return choose("attention", [cached, refused], named)
    flexible = not (_bare(mask) and softcap is None and sinks is None)
    device = q.device.type
    if device == "cuda":
        library = _cuda_library(q, v, flexible)
    elif device == "cpu":
        library = Option("library", "scaled_dot_product_attention, in pieces if masked")
    else:
        library = Option("library", "", f"not tried on {device}")
    obstacle = triton_obstacle(q)
    if mask.last is not None or mask.at is not None:
        obstacle = "its queries are a causal slice of the keys, these are not"
    own = Option("triton", "one fused kernel", obstacle, automatic=device == "cuda")
    # FlexAttention is compiled for every length of rows
    own_first = flexible and not torch.compiler.is_compiling()
    kernels = [own, library] if own_first else [library, own]
    return choose("attention", [*kernels, reference_option()], implementation)


def _reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    if computed_in_fp32(q):
        wide = _reference(q.float(), k.float(), v.float(), mask, scale, softcap, sinks)
        return wide.to(q.dtype)
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))  # [B, S, H, N], [B, S, H, M]
    scores = torch.einsum("bthn,bshn->bhts", q, k).float() * scale  # [B, H, T, S]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap  # s = softcap * tanh(s / softcap)
    scores = scores.masked_fill(~mask.dense, -torch.inf)
    scores = torch.where(mask.seen.transpose(1, 2), scores, 0)  # avoids NaN in the gradient
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)  # [B, H, T, 1]
        scores = torch.cat((scores, column), -1)
    # [B, H, T, S]: exp(s) / (sum exp(s) + exp(z)); the column of z is left out
    weights = torch.softmax(scores, -1)[..., : k.shape[1]]
    out = torch.einsum("bhts,bshn->bthn", weights.to(v.dtype), v)  # [B, T, H, M]
    return torch.where(mask.seen, out, 0)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T, N], [B, K, S, N], [B, K, S, M]
    size = v.shape[-1]
    if size < q.shape[-1]:  # the fused kernels need keys and values of one size
        v = F.pad(v, (0, q.shape[-1] - size))
    grouped = bool(q.shape[1] != k.shape[1])  # not a symbol under torch.compile
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=mask.causal, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)[..., :size]  # [B, T, H, M]


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # one compilation per length and kind of mask; beyond the limit torch would store all scores
    allow_compilations()
    return torch.compile(flex_attention, dynamic=False)


def flex(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """FlexAttention; compiled, unless torch.compile is tracing or the tensors are on CPU."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    bare = torch.compiler.is_compiling() or q.device.type == "cpu"
    attend: Any = flex_attention if bare else _compiled_flex()
    cap: Any = softcap  # a number where it is used

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    out, aux = attend(
        *(x.transpose(1, 2) for x in (q, k, v)),
        score_mod=None if softcap is None else capped,
        block_mask=mask.blocks,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
        return_aux=AuxRequest(lse=True),
        # what torch chooses for short rows fails for 65 to 127 queries of grouped heads
        kernel_options={"BACKEND": "TRITON"},
    )
    if sinks is not None:  # the sink only enlarges the denominator
        # [B, H, T]: sum exp(s) / (sum exp(s) + exp(z)) = sigmoid(lse - z)
        share = torch.sigmoid(aux.lse - sinks.float()[:, None])
        out = (out * share[..., None]).to(q.dtype)
    return torch.where(mask.seen, out.transpose(1, 2), 0)


def _library(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | CacheMask, scale: float, softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    if not isinstance(mask, Mask):
        return torch_cached.attention(q, k, v, mask, scale, softcap, sinks)
    if computed_in_fp32(q):
        wide = _library(q.float(), k.float(), v.float(), mask, scale, softcap, sinks)
        return wide.to(q.dtype)
    plain = softcap is None and sinks is None
    if plain and _bare(mask) and not torch_cpu.in_whole_products(q.transpose(1, 2)):
        return _sdpa(q, k, v, mask, scale)
    if q.device.type == "cpu":
        return torch_cpu.attention(q, k, v, mask, scale, softcap, sinks)
    return flex(q, k, v, mask, scale, softcap, sinks)


def _triton(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *scoring: Any) -> Tensor:
    from sabia.kernels.attention.triton_impl import attention

    return attention(q, k, v, mask.first, mask.until, mask.start, *scoring)


IMPLEMENTATIONS = {"reference": _reference, "library": _library, "triton": _triton}
