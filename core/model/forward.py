"""The forward pass of every family, once: pure functions over a backend's operations.

`hidden` turns token ids into the normed last hidden state, `logits` projects it, `token_losses`
gives log-losses without ever holding [B, T, V]. Parameters are a flat dictionary keyed by the
names of `ModelSpec.tensors()`. Packed rows: `segments` numbers the documents of a row (0 is
padding) and `positions` restart in each. Decoding: a KVCache, `positions[b, t]` being both the
rotary position and the slot where token t of row b is written; a query sees slots ≤ its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.model.cache import KVCache
from sabia.core.model.ops import Angles, Array, Ops, Params, Remat
from sabia.core.spec.layers import Attention, GatedMlp, Layer
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.rope import Rope, inverse_frequencies

__all__ = ["KVCache", "hidden", "logits", "token_losses"]

STREAM = ("batch", "sequence", "embed")
HEADS = ("batch", "sequence", "heads", "head_dim")
KV_HEADS = ("batch", "sequence", "kv_heads", "head_dim")
INNER = ("batch", "sequence", "mlp")
VOCAB = ("batch", "sequence", "vocab")


@dataclass(frozen=True)
class Context:
    """What all layers share in one pass: rotations by Rope, masks by window, the cache."""

    ops: Ops
    eps: float
    angles: Mapping[Rope, Angles]
    masks: Mapping[int | None, Any]
    slots: Array | None
    cache: KVCache | None
    reads: int


def hidden(
    spec: ModelSpec,
    params: Params,
    ids: Array,
    ops: Ops,
    *,
    positions: Array | None = None,
    segments: Array | None = None,
    cache: KVCache | None = None,
    remat: Remat = "none",
) -> Array:
    """The final normed hidden state [B, T, D] of token ids[B, T].

    ids, positions[B, T], segments[B, T] may be NumPy or backend integers. With a cache, its
    arrays are replaced (torch: written in place) and segments must be None. Activations have
    the dtype of the embedding.
    """
    if cache is not None and segments is not None:
        raise UsageError("forward: segments with a cache (expected one document per cache row)")
    ids = ops.integers(ids, params["embed"])
    x = ops.shard(ops.embedding(params["embed"], ids), STREAM)
    context = _context(spec, x, ops, positions, segments, cache)
    for index, (layer, names) in enumerate(zip(spec.layers, spec.layer_names(), strict=True)):
        weights = {short: params[name] for short, name in names.items()}
        x = ops.remat(_bind(layer, index, context), remat)(weights, x)
    return ops.rms_norm(x, params["final_norm"], spec.norm_eps)


def logits(spec: ModelSpec, params: Params, hidden: Array, ops: Ops) -> Array:
    """Scores over the vocabulary, fp32 [B, T, V]; slice `hidden` first where few are needed."""
    scores = ops.linear(hidden, params[spec.head_name])
    return ops.cast(ops.shard(scores, VOCAB), "float32")


def token_losses(
    spec: ModelSpec,
    params: Params,
    hidden: Array,
    targets: Array,
    ops: Ops,
    *,
    chunk_bytes: int | None = None,
) -> tuple[Array, Array]:
    """-log p(targets[B, T]) and log-sum-exp of the logits, each fp32 [B, T].

    hidden[b, t] predicts targets[b, t] (already shifted); a negative target costs 0.
    """
    head = params[spec.head_name]
    targets = ops.integers(targets, head)
    return ops.linear_cross_entropy(hidden, head, targets, chunk_bytes=chunk_bytes)


def _context(
    spec: ModelSpec,
    x: Array,
    ops: Ops,
    positions: Array | None,
    segments: Array | None,
    cache: KVCache | None,
) -> Context:
    length = x.shape[1]
    if positions is None:
        positions = ops.arange(length, x)[None, :]
    positions = ops.integers(positions, x)
    slots, reads = None, length
    if cache is not None:
        slots, reads = positions, cache.reads_for(positions, ops)
    if segments is not None:
        segments = ops.integers(segments, x)
    mixers = [layer.mixer for layer in spec.layers]
    angles = {
        rope: ops.rope_angles(positions, inverse_frequencies(rope))
        for rope in dict.fromkeys(mixer.rope for mixer in mixers)
    }
    masks = {
        window: ops.attention_mask(x, reads, segments=segments, slots=slots, window=window)
        for window in dict.fromkeys(mixer.window for mixer in mixers)
    }
    return Context(ops, spec.norm_eps, angles, masks, slots, cache, reads)


def _bind(layer: Layer, index: int, context: Context) -> Callable[[Params, Array], Array]:
    def block(weights: Params, x: Array) -> Array:
        x = x + MIXERS[type(layer.mixer)](layer.mixer, weights, x, index, context)
        x = context.ops.shard(x, STREAM)
        x = x + MLPS[type(layer.mlp)](layer.mlp, weights, x, context)
        return context.ops.shard(x, STREAM)

    return block


def project(weights: Params, name: str, x: Array, ops: Ops) -> Array:
    """x through the matrix `name` and, where the model has it, its bias."""
    return ops.linear(x, weights[name], weights.get(name + "_bias"))


def attention(part: Attention, weights: Params, x: Array, index: int, context: Context) -> Array:
    """Grouped-query softmax attention of x[B, T, D]."""
    ops = context.ops
    batch, length = x.shape[:2]
    y = ops.rms_norm(x, weights["attn.norm"], context.eps)
    q = project(weights, "attn.q", y, ops).reshape(batch, length, part.heads, part.head_dim)
    k = project(weights, "attn.k", y, ops).reshape(batch, length, part.kv_heads, part.head_dim)
    v = project(weights, "attn.v", y, ops).reshape(batch, length, part.kv_heads, part.head_dim)
    if part.qk_norm:
        q = ops.rms_norm(q, weights["attn.q_norm"], context.eps)
        k = ops.rms_norm(k, weights["attn.k_norm"], context.eps)
    angles = context.angles[part.rope]
    q, k = ops.rope(ops.shard(q, HEADS), angles), ops.rope(ops.shard(k, KV_HEADS), angles)
    v = ops.shard(v, KV_HEADS)
    if context.cache is not None:
        k, v = context.cache.extend(index, k, v, context.slots, context.reads, ops)
    mask = context.masks[part.window]
    out = ops.attention(q, k, v, mask, scale=part.scale, softcap=part.softcap)
    out = ops.shard(out, HEADS).reshape(batch, length, part.heads * part.head_dim)
    return project(weights, "attn.o", out, ops)


def gated_mlp(part: GatedMlp, weights: Params, x: Array, context: Context) -> Array:
    """down(silu(gate(y)) · up(y)) with y the normed x[B, T, D] (SwiGLU, arXiv 2002.05202)."""
    ops = context.ops
    y = ops.rms_norm(x, weights["mlp.norm"], context.eps)
    gate = ops.shard(project(weights, "mlp.gate", y, ops), INNER)
    up = ops.shard(project(weights, "mlp.up", y, ops), INNER)
    return project(weights, "mlp.down", ACTIVATIONS[part.activation](ops, gate) * up, ops)


MIXERS: Mapping[type, Callable[..., Array]] = {Attention: attention}
MLPS: Mapping[type, Callable[..., Array]] = {GatedMlp: gated_mlp}
ACTIVATIONS: Mapping[str, Callable[[Ops, Array], Array]] = {"silu": lambda ops, x: ops.silu(x)}
