"""Attention over packed documents: definition and implementations.

Query t of a row has position p = start + t and attends to keys j of its own document with
first[t] <= j <= p, where first[t] = max(start of the document, p - window + 1). If attention
is not causal, it attends to those with |j - p| < window. A document is a run of equal segment
numbers; 0 is padding: its queries give 0, and no query attends to its keys. So a mask is one
interval per query, blocks of keys outside the intervals of a block of queries are skipped, and only
the reference builds a [T, S] matrix. With s = scale * q.k, or s = softcap * tanh(scale * q.k /
softcap), and one learned logit z per head if there are sinks:
    out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(z))      (arXiv 2309.17453, GPT-OSS)
Head h reads key-value head h * K // H; keys and values may differ in size (multi-head latent
attention: 192 and 128). Under context parallelism q is the slice [start : start + T] of the
sequence, and keys, values and segments are whole.

Order of choice
    torch on CUDA   library: `scaled_dot_product_attention` for a plain causal mask (cuDNN or
                    FlashAttention). Otherwise triton, one fused kernel; under torch.compile, and
                    for masks that are not causal, which the Triton and Pallas kernels refuse,
                    library: FlexAttention (takes all of the above: a score function for the cap, a
                    block mask, sinks from its log-sum-exp), which compiles a kernel per length.
    torch on CPU    library: `scaled_dot_product_attention` for a plain mask, else its kernel on
                    pieces of queries and keys (torch_cpu), in plain operations with a cap. One
                    query per row of a cache: loops over its slots (kernels.row_products).
    JAX on TPU      library: splash attention, where lengths are multiples of 128 and start is a
                    Python number; else the Pallas kernel.
    JAX on CUDA     library: cuDNN through `jax.nn.dot_product_attention` for half-precision causal
                    windows without documents; else reference.
    JAX on CPU      library (XLA) where there is neither cap nor sinks, else reference.
A TPU kernel cannot be partitioned by the compiler: on a mesh call it inside `shard_map`.
FlashAttention: arXiv 2205.14135 and 2307.08691.
"""

from collections.abc import Sequence
from typing import Any

from sabia.kernels.runtime.dispatch import Choice, framework

Array = Any


def _library_module(x: Array) -> Any:
    if framework(x) == "torch":
        from sabia.kernels.attention import torch_impl

        return torch_impl
    from sabia.kernels.attention import jax_impl

    return jax_impl


def attention_mask(
    like: Array,
    queries: int,
    keys: int,
    *,
    segments: Array | None = None,
    slots: Array | None = None,
    start: Any = 0,
    window: int | None = None,
    causal: bool = True,
    at: Array | None = None,
    shared: Sequence[Any] = (),
) -> Any:
    """The key intervals of a batch, computed once and used by every layer; an opaque object.

    segments[B, keys] are integers, 0 for padding; None: every row is one document. `start` is the
    position of the first of `queries` (a JAX scalar too, in JAX). With slots[B, queries] the keys
    are those of a cache, and a query at slot s sees the slots up to s (the last `window` of them).
    at[B, queries] (causal, in torch): the key that is each query's own, where queries are not a
    slice of the keys. shared: the `SharedSlots` of a cache in torch. `like` gives the device and,
    for a cache, the dtype of queries. Raises ValueError where the queries reach beyond the keys or
    the window is below 1.
    """
    if at is not None and not (causal and slots is None and framework(like) == "torch"):
        raise ValueError("attention: queries at given keys (expected causal attention in torch)")
    if window is not None and window < 1:
        raise ValueError(f"attention: window {window} (expected 1 or more)")
    if at is None and isinstance(start, int) and not 0 <= start <= keys - queries:
        raise ValueError(f"attention: queries {start}..{start + queries} of {keys} keys")
    if segments is not None and segments.shape[-1] != keys:
        raise ValueError(f"attention: {segments.shape[-1]} segment numbers for {keys} keys")
    module = _library_module(like)
    if slots is not None:
        return module.cache_mask(like, keys, slots, window, *([shared] if shared else ()))
    if at is not None:
        return module.mask_at(like, at, keys, segments, window)
    return module.attention_mask(like, queries, keys, segments, start, window, causal)


def choose_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: object,
    *,
    softcap: float | None = None,
    sinks: Array | None = None,
    implementation: str | None = None,
) -> Choice:
    """The implementation that `attention` uses for these arguments, and the reason."""
    return _library_module(q).choose_attention(q, k, v, mask, softcap, sinks, implementation)


def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Any,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """q[B, T, H, N], k[B, S, K, N], v[B, S, K, M], sinks[H] → [B, T, H, M] in q's dtype.

    `mask` comes from `attention_mask`; scale defaults to N ** -0.5. Differentiable in q, k, v and
    sinks. Raises ValueError for shapes that do not fit, dispatch.Unavailable if the named
    implementation is unavailable.
    """
    if q.shape[2] % k.shape[2] or k.shape[:3] != v.shape[:3] or q.shape[-1] != k.shape[-1]:
        shapes = f"q{tuple(q.shape)}, k{tuple(k.shape)}, v{tuple(v.shape)}"
        raise ValueError(f"attention: {shapes} (expected [B,T,H,N], [B,S,K,N], [B,S,K,M], K | H)")
    if k.shape[1] != mask.keys or q.shape[1] != mask.queries:
        raise ValueError(
            f"attention: {q.shape[1]} queries and {k.shape[1]} keys with a mask of {mask.queries} "
            f"and {mask.keys}: on a mesh, is an exchange of the tokens missing?"
        )
    module = _library_module(q)
    name = module.choose_attention(q, k, v, mask, softcap, sinks, implementation).implementation
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return module.IMPLEMENTATIONS[name](q, k, v, mask, scale, softcap, sinks)
