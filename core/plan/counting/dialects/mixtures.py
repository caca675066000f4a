"""MoE families, by their differences: shared experts, dense layers, windows.

Similar to DeepSeek-V3 are DeepSeek-V2, and V3.2 and GLM-5 with sparse attention: an indexer
(DeepSeek-V3.2, 2025) scores all keys by small heads of its own, and attention uses the index_topk
best. In GLM-5.2 most layers reuse the selection of a previous layer.

A router's balancing bias counts as a vector where checkpoints contain one. MTP layers are not
counted, as in core.spec.
"""

from collections.abc import Sequence
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.counting.architecture import Architecture, Sparse
from sabia.core.plan.counting.blocks import LayerHalf, mixer_block, mixer_sizes, of_shapes
from sabia.core.plan.counting.dialects import reading
from sabia.core.plan.counting.dialects.reading import CountFields
from sabia.core.spec.families import qwen3, qwen3_moe

_KIND = "deepseek_sparse_attention"
_REPEATED = ("index_skip_topk_offset", "index_topk_freq", "index_topk_pattern")


def deepseek_v2(fields: CountFields) -> Architecture:
    """DeepSeek-V2 and V2-Lite (arXiv 2405.04434): no balancing bias."""
    mixer = mixer_block(reading.latent(fields), fields.hidden)
    feeds = reading.dense_first(fields, correction=False)
    return reading.stacked(fields, [mixer] * fields.depth, feeds)


def indexed(fields: CountFields) -> Architecture:
    """DeepSeek-V3.2 and GLM-5."""
    hidden, depth = fields.hidden, fields.depth
    fields.each("layer_types", depth, (_KIND,), [_KIND] * depth)
    own = fields.each("indexer_types", depth, ("full", "shared"), ["full"] * depth)
    if "shared" in own:
        fields.ignore(*_REPEATED)
    plain = reading.latent(fields)
    heads, size = fields.size("index_n_heads"), fields.size("index_head_dim")
    rank, most = plain.q_rank, fields.size("index_topk")
    if rank is None:
        raise UsageError("config.json: q_lora_rank is None (expected the indexer's own input)")
    base = mixer_block(plain, hidden)
    shapes = ((heads * size, rank), (size, hidden), (heads, hidden))
    mixers = {
        "shared": base.with_sizes(sparse=Sparse(chosen=most)),
        "full": (base + of_shapes(shapes, vectors=2 * size)).with_sizes(
            sparse=Sparse(chosen=most, index_width=heads * size),
            cache_width=base.sizes["cache_width"] + size,
        ),
    }
    return reading.stacked(fields, [mixers[kind] for kind in own], reading.dense_first(fields))


def qwen2_moe(fields: CountFields) -> Architecture:
    """Qwen1.5-MoE, Qwen2-MoE: Qwen2 with a shared expert behind a gate."""
    sparse = qwen3_moe.sparse(fields)
    mixer = reading.attention(fields, qkv_bias=fields.take("qkv_bias", bool, True))
    if any(qwen3.windows(fields)):
        raise UsageError("config.json: use_sliding_window is True (expected false)")
    shared = fields.size("shared_expert_intermediate_size")
    routed = reading.routed(fields, "num_experts", shared=shared, shared_gate=True)
    return _mixed(fields, [mixer] * fields.depth, routed, sparse)


def ernie4_5_moe(fields: CountFields) -> Architecture:
    """ERNIE 4.5 (Baidu, 2025), text only."""
    depth = fields.depth
    names = {"chosen": "moe_k", "alike": "moe_num_shared_experts"}
    routed = reading.routed(fields, "moe_num_experts", **names, correction=True)
    first, every = fields.take("moe_layer_start_index", int), fields.size("moe_layer_interval")
    last = fields.take("moe_layer_end_index", int)
    last = depth - 1 if last == -1 else last
    sparse = [first <= n <= last and not (n + 1) % every for n in range(depth)]
    return _mixed(fields, [reading.attention(fields)] * depth, routed, sparse, tied=True)


def minimax_m3(fields: CountFields) -> Architecture:
    """MiniMax-M3: sparse attention to blocks of keys in most layers, a shared expert."""
    depth = fields.depth
    whole = reading.attention(fields, qk_norm=True)
    inner = CountFields(fields.take("sparse_attention_config", dict), "minimax_m3.sparse")
    heads, size = inner.size("sparse_num_index_heads"), inner.size("sparse_index_dim")
    blocks, length = inner.size("sparse_topk_blocks"), inner.size("sparse_block_size")
    local = inner.take("sparse_local_block", int, 0) * length
    shapes = ((heads * size, fields.hidden), (size, fields.hidden))
    index = of_shapes(shapes, vectors=2 * size)
    where = reading.flags(inner, "sparse_attention_freq", depth)
    inner.finish()
    seen = Sparse(local, 1, blocks * length, heads * size)
    cache = whole.sizes["cache_width"] + size
    chosen = (whole + index).with_sizes(sparse=seen, cache_width=cache)
    mixers = [chosen if flag else whole for flag in where]
    bias, width = fields.take("use_routing_bias", bool), fields.size("intermediate_size")
    sizes = (fields.size("num_local_experts"), fields.size("num_experts_per_tok"), width)
    shared = fields.size("shared_intermediate_size")
    routed = reading.moe(fields.hidden, *sizes, shared, correction=bias)
    fields.expect("moe_intermediate_size", (width,), width)
    sparse = reading.flags(fields, "moe_layer_freq", depth)
    first = sparse.index(True) if True in sparse else depth
    fields.expect("first_k_dense_replace", (first,), first)
    return _mixed(fields, mixers, routed, sparse, dense="dense_intermediate_size")


def llama4(fields: CountFields) -> Architecture:
    """Llama 4 (Meta, 2025): experts every few layers with a shared one, chunked attention.

    Three of four layers attend within a chunk; on average a token attends to half of it, counted as
    a window.
    """
    depth, biases = fields.depth, reading.biases(fields)
    every, chunk = 4, fields.take("attention_chunk_size", int, 8192)
    whole = reading.attention(fields, **biases)
    local = whole.with_sizes(window=chunk)
    mixers = [local if (n + 1) % every else whole for n in range(depth)]
    step = fields.size("interleave_moe_layer_step", 1)
    sparse = fields.take("moe_layers", list, list(range(step - 1, depth, step)))
    inner, chosen = fields.size("intermediate_size"), fields.size("num_experts_per_tok")
    routed = reading.moe(fields.hidden, fields.size("num_local_experts"), chosen, inner, inner)
    where = [n in sparse for n in range(depth)]
    return _mixed(fields, mixers, routed, where, dense="intermediate_size_mlp")


def mimo_v2(fields: CountFields) -> Architecture:
    """MiMo-V2-Flash (Xiaomi, 2025): windows with sinks and more key-value heads in most layers."""
    window = fields.size("sliding_window")
    fields.expect("sliding_window_size", (window,), window)
    whole = _unequal(fields, "", None, fields.take("add_full_attention_sink_bias", bool))
    local = _unequal(fields, "swa_", window, fields.take("add_swa_attention_sink_bias", bool))
    windowed = reading.flags(fields, "hybrid_layer_pattern", fields.depth)
    mixers = [local if flag else whole for flag in windowed]
    routed = reading.routed(fields, "n_routed_experts", alike="n_shared_experts", correction=True)
    return _mixed(fields, mixers, routed, reading.flags(fields, "moe_layer_freq", fields.depth))


def _unequal(fields: CountFields, prefix: str, window: int | None, sinks: bool) -> LayerHalf:
    """Attention whose values have another head size than keys."""
    hidden, heads = fields.hidden, fields.size(f"{prefix}num_attention_heads")
    groups = fields.size(f"{prefix}num_key_value_heads")
    size, value = fields.size(f"{prefix}head_dim"), fields.size(f"{prefix}v_head_dim")
    shapes = [(heads * size, hidden), (groups * size, hidden), (groups * value, hidden)]
    return of_shapes(
        [*shapes, (hidden, heads * value)],
        vectors=heads * sinks,
        **mixer_sizes(heads, groups, heads * size, groups * size, groups * value),
        score_width=heads * (size + value),
        cache_width=groups * (size + value),
        window=window,
    )


def _mixed(
    fields: CountFields, mixers: Sequence[LayerHalf], routed: LayerHalf, sparse: Sequence[bool], *,
    dense: str = "intermediate_size", tied: bool = False,
) -> Architecture:  # fmt: skip
    """Layers with experts where `sparse` is true, the others with an MLP of the width `dense`."""
    feed = reading.gated(fields.hidden, fields.size(dense))
    return reading.stacked(fields, mixers, [routed if flag else feed for flag in sparse], tied=tied)


def dbrx(fields: CountFields) -> Architecture:
    """DBRX (Databricks, 2024): fine-grained experts; its own names of all sizes."""
    fields.hidden, fields.depth = fields.size("d_model"), fields.size("n_layers")
    hidden, heads = fields.hidden, fields.size("n_heads")
    own: dict[str, Any] = fields.take("attn_config", dict, {})
    feed: dict[str, Any] = fields.take("ffn_config", dict)
    mixer = reading.grouped(hidden, heads, own.get("kv_n_heads", 1), hidden // heads)
    routed = reading.moe(hidden, *(
        feed[name] for name in ("moe_num_experts", "moe_top_k", "ffn_hidden_size")
    ))  # fmt: skip
    return reading.stacked(fields, [mixer] * fields.depth, [routed] * fields.depth)
