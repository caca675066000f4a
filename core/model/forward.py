"""The forward pass of all model families: pure functions over a backend's operations.

`hidden` computes the normed last hidden state of token ids, `logits` projects it, `token_losses`
computes cross-entropies without storing [B, T, V]. Parameters are a flat dictionary keyed by the
names of `ModelSpec.tensors()`. Packed rows: `segments` numbers the documents of a row (0 is
padding) and `positions` restart in each. Decoding with a KVCache: `positions[b, t]` is both the
rotary position and the slot of token t of row b; a query attends to slots ≤ its own.

After the last norm there may be an encoder's head transform, and classifier scores. A document's
vector is a weighted sum of its tokens' last hidden states. The weights are part of the
batch: 1 at the first or the last token, or 1/n at each of n tokens (`pool_weights`). So padding,
its side, and the pooling of a family need no code of their own in the backends.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sabia.core.errors import UsageError
from sabia.core.model.block import STREAM, VOCAB, Block, Context, Queries, scaled, stream_norm
from sabia.core.model.feed_forward import ACTIVATIONS, FEED_FORWARD
from sabia.core.model.lora import with_adapters
from sabia.core.model.mixers import MIXERS
from sabia.core.ops.base import Angles, Array, Ops, Params, Remat, dtype_name
from sabia.core.ops.product import check_shared_axes
from sabia.core.spec.layers import GatedDeltaNet, GatedMlp, Layer
from sabia.core.spec.model import ModelSpec, Pooling
from sabia.core.spec.rope import Rope, inverse_frequencies

if TYPE_CHECKING:
    from sabia.core.ops.kv_cache import KVCache


def gather_tensors(params: Params, ops: Ops, *names: str) -> dict[str, Array]:
    """Unsharded tensors that belong to no layer, by name; names that `params` lacks are skipped."""
    present = {name: params[name] for name in names if name in params}
    return dict(ops.gather(present, {name: name for name in present}))


def head_transform(spec: ModelSpec, params: Params, x: Array, ops: Ops) -> Array:
    """norm(activation(W x)) of x[..., D] before the head; x itself if the model has none."""
    if spec.transform is None:
        return x
    w = gather_tensors(params, ops, "transform", "transform_bias", "transform_norm")
    x = ops.linear(x, w["transform"], w.get("transform_bias"), name="transform")
    x = ACTIVATIONS[spec.transform.activation](ops, x)
    return stream_norm(spec.norm_kind, ops, x, w["transform_norm"], spec.norm_eps)


def class_logits(spec: ModelSpec, params: Params, hidden: Array, pool: Array, ops: Ops) -> Array:
    """Scores of the labels, fp32 [B, L], from hidden[B, T, D] and weights pool[B, T]."""
    pooled = (ops.cast(hidden, "float32") * pool[:, :, None]).sum(1)  # Σ_t pool_t h_t, fp32 [B, D]
    x = head_transform(spec, params, ops.cast(pooled, dtype_name(hidden)), ops)
    w = gather_tensors(params, ops, "classifier", "classifier_bias")
    scores = ops.linear(x, w["classifier"], w.get("classifier_bias"), name="classifier")  # [B, L]
    return ops.cast(scores, "float32")


def pool_weights(lengths: Sequence[int] | np.ndarray, width: int, pooling: Pooling) -> np.ndarray:
    """Pooling weights float32[B, width]; each document starts its row and has `lengths` tokens."""
    size = np.asarray(lengths, np.int64)[:, None]  # [B, 1]
    column = np.arange(width)
    if pooling == "mean":
        return ((column < size) / np.maximum(size, 1)).astype(np.float32)
    # 1 at the first token (cls) or at the last
    return (column == (0 * size if pooling == "cls" else size - 1)).astype(np.float32)


Stats = dict[str, dict[int, Array]]  # name → layer → statistics


def hidden(spec: ModelSpec, params: Params, ids: Array, ops: Ops, **options: Any) -> Array:
    """The final normed hidden state [B, T, D]; `options` as in `hidden_and_stats`."""
    return hidden_and_stats(spec, params, ids, ops, **options)[0]


def hidden_and_stats(
    spec: ModelSpec,
    params: Params,
    ids: Array,
    ops: Ops,
    *,
    positions: Array | None = None,
    segments: Array | None = None,
    cache: "KVCache | None" = None,
    remat: Remat = "none",
    wanted: frozenset[str] = frozenset(),
    routing: Array | None = None,
    keys: Array | None = None,
    queries: Array | None = None,
    outputs: Array | None = None,
) -> tuple[Array, Stats]:
    """(final normed hidden state [B, T, D] of token ids[B, T], the statistics `wanted`).

    wanted: names of statistics of core.model.feed_forward. routing[B, T, L, k]: the experts of each
    token in
    the L layers with experts, numbered from 1; 0: those that the router chooses. ids, positions[B,
    T], segments[B, T] may be NumPy or backend integers. With a cache, its arrays are replaced
    (torch: written in place) and segments must be None. Activations have the dtype of the
    embedding, or that which `ops` names.

    In torch, without a mesh along a row (core.train.losses.computed_tokens): keys[B, S] and
    queries[B, T], of documents that share tokens: the token of each key of the documents one after
    the other, which segments[B, S] number, and the key that is each token's own. outputs[B, N]: the
    keys (without `keys`: tokens) whose hidden state is returned, [B, N, D]; the last layer is
    computed for these alone where it can be.
    """
    if cache is not None and segments is not None:
        raise UsageError("forward: segments with a cache (expected one document per cache row)")
    if cache is not None and not spec.causal:
        raise UsageError(f"forward: a cache with a {spec.family} encoder (expected whole rows)")
    x, layers = ops.stage_input(lambda: embedded(spec, params, ids, ops), len(spec.layers))
    length, slots = x.shape[1], None
    positions = ops.integers(ops.positions(length, x) if positions is None else positions, x)
    reads = length
    if cache is not None:
        slots, reads = positions, cache.reads_for(positions, ops)
    if segments is not None:
        segments = ops.integers(segments, x)
    # layers with equal rotary settings or windows share angles and masks
    lengths = _document_lengths(spec, segments, x, ops) if cache is None else None
    angles = {rope: _angles(rope, positions, lengths, ops) for rope in spec.ropes}
    if keys is not None:
        keys, queries = (ops.integers(numbers, x) for numbers in (keys, queries))
        reads = keys.shape[1]

    def mask(window: int | None, at: Array | None) -> Any:
        if cache is not None:
            return cache.mask(x, window, slots, reads, ops)
        shared: Any = {"segments": segments, "causal": spec.causal, "at": at}
        return ops.attention_mask(x, reads, window=window, **shared)

    masks = {window: mask(window, queries) for window in spec.windows}
    by_layer = None
    if routing is not None:
        chosen = ops.integers(routing, x)
        by_layer = {layer: chosen[:, :, n] for n, layer in enumerate(spec.expert_layers)}
    given = (segments, slots, cache, reads, wanted, spec.norm_kind, by_layer)
    context = Context(ops, spec.norm_eps, angles, masks, *given, keys)
    stats: Stats = {}
    names, tokens = spec.layer_names(), None
    if outputs is not None:
        outputs = ops.integers(outputs, x)
        tokens = outputs if keys is None else ops.take_along(keys, outputs)
    row = None if cache is None or outputs is not None else ops.decoded_rows(context, x)
    for index in layers:
        if row and row.advance(index, spec.layers[index], names[index], params, x):
            continue
        if tokens is not None and index == len(names) - 1 and _takes_queries(spec):
            at, by_token = ops.tokens_at(positions, tokens), None
            if lengths is not None:
                by_token = ops.tokens_at(lengths, tokens)
            own = {rope: _angles(rope, at, by_token, ops) for rope in spec.ropes}
            of_queries = {window: mask(window, outputs) for window in spec.windows}
            context = replace(context, queries=Queries(tokens, own, of_queries))
        layer_names = with_adapters(names[index], params)
        weights = {short: params[name] for short, name in layer_names.items()}
        block = _layer_function(spec.layers[index], index, layer_names, context)
        x, layer_stats = ops.remat(block, remat)(weights, x)
        for name, value in layer_stats.items():
            stats.setdefault(name, {})[index] = value
    if tokens is not None and context.queries is None:
        x = ops.tokens_at(x, tokens)
    x, stats = ops.stage_output(x, stats)
    return _stream_norm(spec, params, "final_norm", x, ops), stats


def _takes_queries(spec: ModelSpec) -> bool:
    """Whether the last layer can be computed for some tokens: softmax attention of earlier tokens,
    and a feed-forward part without a router, which has statistics of all tokens."""
    last = spec.layers[-1]
    return (
        spec.causal and not isinstance(last.mixer, GatedDeltaNet) and isinstance(last.mlp, GatedMlp)
    )


def embedded(spec: ModelSpec, params: Params, ids: Array, ops: Ops) -> Array:
    """The residual stream [B, T, D] of token ids[B, T] before the first layer."""
    table = gather_tensors(params, ops, "embed")["embed"]
    x = ops.embedding(table, ops.integers(ids, table))  # [B, T, D]
    x = x if ops.activations is None else ops.cast(x, ops.activations)
    if spec.embed_scale != 1.0:
        x = x * ops.full((), spec.embed_scale, x)  # rounded to x's dtype, as in the original code
    if spec.embed_norm:
        x = _stream_norm(spec, params, "embed_norm", x, ops)
    return ops.shard(x, STREAM)


def _stream_norm(spec: ModelSpec, params: Params, name: str, x: Array, ops: Ops) -> Array:
    weight = gather_tensors(params, ops, name)[name]
    return stream_norm(spec.norm_kind, ops, x, weight, spec.norm_eps, spec.norm_offset)


def logits(spec: ModelSpec, params: Params, hidden: Array, ops: Ops) -> Array:
    """Logits, fp32 [B, T, V]; slice `hidden` first if only some tokens are needed."""
    name = spec.head_name
    w = gather_tensors(params, ops, name, "head_bias")
    hidden = scaled(head_transform(spec, params, hidden, ops), spec.logit_scale, ops)
    scores = ops.linear(hidden, w[name], w.get("head_bias"), name=name)
    scores = ops.cast(ops.shard(scores, VOCAB), "float32")
    return scores if spec.logit_softcap is None else ops.softcap(scores, spec.logit_softcap)


def token_losses(
    spec: ModelSpec, params: Params, hidden: Array, targets: Array, ops: Ops, temperature: float = 1
) -> tuple[Array, Array]:
    """-log p(targets[B, T]) and log-sum-exp of the logits / temperature, each fp32 [B, T].

    hidden[b, t] predicts targets[b, t] (already shifted); a negative target has loss 0.
    """
    w = gather_tensors(params, ops, spec.head_name, "head_bias")
    # (W h + b) / T = W (h / T) + b / T, and cap tanh(s / cap) / T = cap / T tanh(s / T / (cap / T))
    scale, cap = spec.logit_scale / temperature, spec.logit_softcap
    hidden = scaled(head_transform(spec, params, hidden, ops), scale, ops)
    head = w[spec.head_name]
    if "head_bias" in w:  # W h + b = [W b] [h 1]: one more column of the matrix
        one = ops.full((*hidden.shape[:2], 1), 1 / temperature, hidden)
        hidden = ops.concat((hidden, one), -1)
        head = ops.concat((head, ops.cast(w["head_bias"][:, None], dtype_name(head))), -1)
    targets = ops.integers(targets, head)
    capped = None if cap is None else cap / temperature
    return ops.linear_cross_entropy(hidden, head, targets, softcap=capped)


def drawn_losses(
    spec: ModelSpec, params: Params, hidden: Array, targets: Array, ops: Ops, temperature: float
) -> Array:
    """-log p(targets[B, T]) as an engine draws, to the last bit: with `exact` operations."""
    targets = ops.integers(targets, hidden)
    given = hidden, targets, temperature, spec.vocab_size
    return ops.drawn_losses(lambda x: logits(spec, params, x, ops), *given)


def _document_lengths(spec: ModelSpec, segments: Array | None, x: Array, ops: Ops) -> Array | None:
    """Tokens of each token's document, fp32 [B, T], if a rotary embedding depends on them.

    A row without segments is one document, its padding included.
    """
    if not any(rope.by_length for rope in spec.ropes):
        return None
    if segments is None:
        segments = ops.integers(ops.full(x.shape[:2], 1.0, x), x)
    whole = ops.whole_segments(segments)
    ones = ops.cast(whole * 0 + 1, "float32")
    return ops.take_along(ops.weighted_bincount(whole, ones, whole.shape[1] + 1), segments)


def _angles(rope: Rope, positions: Array, lengths: Array | None, ops: Ops) -> Angles:
    """cos and sin of each position; lengths[B, T]: of the documents (None: in the original one)."""
    growth = None
    if rope.kind == "dynamic" and lengths is not None:
        excess = rope.factor * lengths / rope.original_length - (rope.factor - 1)
        growth = ops.where(excess > 1, excess, 1.0)
    cos, sin = ops.rope_angles(positions, inverse_frequencies(rope), growth)
    if rope.kind == "longrope" and lengths is not None:
        long = (lengths > rope.original_length)[:, :, None, None]
        angles = ops.rope_angles(positions, inverse_frequencies(rope, long=True))
        cos, sin = (ops.where(long, a, b) for a, b in zip(angles, (cos, sin), strict=True))
    return (cos, sin) if rope.amplitude == 1 else (cos * rope.amplitude, sin * rope.amplitude)


def _layer_function(
    layer: Layer, index: int, names: Mapping[str, str], context: Context
) -> Callable[..., Any]:
    ops, norms = context.ops, layer.norms
    mixer: tuple[str, Any, Any] = ("attn", layer.mixer, MIXERS)
    feed_forward: tuple[str, Any, Any] = ("mlp", layer.mlp, FEED_FORWARD)

    def run(weights: Params, x: Array) -> tuple[Array, dict[str, Array]]:
        block = Block(index, ops.gather(weights, names), names, context)
        w = block.weights
        for name, part, table in (mixer, feed_forward):
            y = context.norm(x, w[f"{name}.norm"], norms.offset) if norms.before(name) else x
            y = table[type(part)](part, block, y)  # [B, T, D]
            y = context.norm(y, w[f"{name}.post_norm"], norms.offset) if norms.post else y
            x = context.chosen(x) if name == "attn" else x
            check_shared_axes(name, stream=(x, "BTD"), output=(y, "BTD"))
            x = ops.shard(x + scaled(y, layer.residual_scale, ops), STREAM)
        return x, block.stats

    return run
