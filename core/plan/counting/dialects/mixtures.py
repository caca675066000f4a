"""Mixtures of experts by their differences: shared experts, dense layers among them, windows.

Relatives of DeepSeek-V3 are DeepSeek-V2, and V3.2 and GLM-5, whose keys an indexer chooses. The
indexer (DeepSeek-V3.2, 2025) scores all keys by small heads of its own and attention sees the
index_topk best. In GLM-5.2 most layers take the choice of a layer before them.

A router's balancing bias counts as a vector where the files hold one. Layers of multi-token
prediction are kept beside the model, as in the model core, and not counted.
"""

from collections.abc import Sequence

from sabia.core.errors import UsageError
from sabia.core.plan.counting.architecture import Architecture, Sparse
from sabia.core.plan.counting.blocks import Block, layer, mixer_block, of_shapes, with_sizes
from sabia.core.plan.counting.dialects import reading
from sabia.core.plan.counting.dialects.reading import CountFields
from sabia.core.spec.families import qwen3, qwen3_moe

_KIND = "deepseek_sparse_attention"
_GLM_REMARKS: tuple[str, ...] = ("indexer_rope_interleave", "index_share_for_mtp_iteration")
_GLM_REMARKS += ("index_skip_topk_offset", "index_topk_freq", "index_topk_pattern")


def deepseek_v2(fields: CountFields) -> Architecture:
    """DeepSeek-V2 and V2-Lite (arXiv 2405.04434): no balancing bias."""
    hidden, depth = fields.size("hidden_size"), fields.size("num_hidden_layers")
    fields.expect("mlp_bias", (False,), False)
    fields.ignore("head_dim")
    mixer = mixer_block(reading.latent(fields, hidden), hidden)
    return _latent_stack(fields, hidden, [mixer] * depth, correction=False)


def indexed(fields: CountFields) -> Architecture:
    """DeepSeek-V3.2 and GLM-5."""
    hidden, depth = fields.size("hidden_size"), fields.size("num_hidden_layers")
    fields.expect("mlp_bias", (False,), False)
    fields.ignore("head_dim", "num_nextn_predict_layers", *_GLM_REMARKS[:2])
    fields.each("layer_types", depth, (_KIND,), [_KIND] * depth)
    own = fields.each("indexer_types", depth, ("full", "shared"), ["full"] * depth)
    if "shared" in own:
        fields.ignore(*_GLM_REMARKS)
    plain = reading.latent(fields, hidden)
    heads, size = fields.size("index_n_heads"), fields.size("index_head_dim")
    rank, most = plain.q_rank, fields.size("index_topk")
    if rank is None:
        raise UsageError("config.json: q_lora_rank is None (expected the indexer's own input)")
    base = mixer_block(plain, hidden)
    shapes = ((heads * size, rank), (size, hidden), (heads, hidden))
    cache = base.sizes["cache_width"]
    mixers = {
        "shared": with_sizes(base, sparse=Sparse(chosen=most)),
        "full": with_sizes(
            base + of_shapes(shapes, vectors=2 * size),
            sparse=Sparse(chosen=most, index_width=heads * size),
            cache_width=cache + size,
        ),
    }
    return _latent_stack(fields, hidden, [mixers[kind] for kind in own], correction=True)


def _latent_stack(
    fields: CountFields, hidden: int, mixers: list[Block], *, correction: bool
) -> Architecture:
    feeds = reading.dense_first(fields, hidden, len(mixers), correction=correction)
    kinds = [layer(*halves, 2 * hidden) for halves in zip(mixers, feeds, strict=True)]
    return reading.decoder(fields, hidden, kinds)


def qwen2_moe(fields: CountFields) -> Architecture:
    """Qwen1.5-MoE, Qwen2-MoE: Qwen2 with a shared expert behind a gate."""
    hidden, depth = fields.size("hidden_size"), fields.size("num_hidden_layers")
    bias, sparse = fields.take("qkv_bias", bool, True), qwen3_moe.sparse(fields, depth)
    mixer = reading.attention(fields, hidden, qkv_bias=bias)
    windows = qwen3.windows(fields, depth)
    if any(windows):
        raise UsageError("config.json: use_sliding_window is True (expected false)")
    routed = reading.mixture(
        hidden,
        fields.size("num_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("moe_intermediate_size"),
        fields.size("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    dense = reading.gated(hidden, fields.size("intermediate_size"))
    return _stack(fields, hidden, [mixer] * depth, [routed if one else dense for one in sparse])


def granitemoe(fields: CountFields) -> Architecture:
    """Granite 3 mixtures."""
    hidden, depth = fields.size("hidden_size"), fields.size("num_hidden_layers")
    bias = fields.take("attention_bias", bool, False)
    mixer = reading.attention(fields, hidden, qkv_bias=bias, output_bias=bias)
    count, chosen = fields.size("num_local_experts"), fields.size("num_experts_per_tok")
    routed = reading.mixture(hidden, count, chosen, fields.size("intermediate_size"))
    return _stack(fields, hidden, [mixer] * depth, [routed] * depth)


def olmoe(fields: CountFields) -> Architecture:
    """OLMoE (arXiv 2409.02060): norms over all queries and keys."""
    hidden, depth = fields.size("hidden_size"), fields.size("num_hidden_layers")
    fields.expect("attention_bias", (False,), False)
    fields.expect("clip_qkv", (None,), None)
    mixer = reading.attention(fields, hidden, qk_norm_whole=True)
    count, chosen = fields.size("num_experts"), fields.size("num_experts_per_tok")
    routed = reading.mixture(hidden, count, chosen, fields.size("intermediate_size"))
    return _stack(fields, hidden, [mixer] * depth, [routed] * depth)


def glm4_moe(fields: CountFields) -> Architecture:
    """GLM-4.5, GLM-4.6 (arXiv 2508.06471): biases on queries, keys, values; DeepSeek's routing."""
    hidden, depth = fields.size("hidden_size"), fields.size("num_hidden_layers")
    bias, norm = fields.take("attention_bias", bool, False), fields.take("use_qk_norm", bool, False)
    mixer = reading.attention(fields, hidden, qkv_bias=bias, qk_norm=norm)
    fields.ignore("num_nextn_predict_layers")
    feeds = reading.dense_first(fields, hidden, depth)
    return _stack(fields, hidden, [mixer] * depth, feeds)


def ernie4_5_moe(fields: CountFields) -> Architecture:
    """ERNIE 4.5 (Baidu, 2025), texts alone."""
    hidden, depth = fields.size("hidden_size"), fields.size("num_hidden_layers")
    fields.expect("use_bias", (False,), False)
    fields.ignore("moe_norm_min", "moe_capacity", "moe_gate", "num_nextn_predict_layers")
    fields.expect("moe_use_aux_free", (True,), True)
    inner = fields.size("moe_intermediate_size")
    sizes = (fields.size("moe_num_experts"), fields.size("moe_k"), inner)
    shared = inner * fields.take("moe_num_shared_experts", int, 0)
    routed = reading.mixture(hidden, *sizes, shared, correction=True)
    first, every = fields.take("moe_layer_start_index", int), fields.size("moe_layer_interval")
    last = fields.take("moe_layer_end_index", int)
    last = depth - 1 if last == -1 else last
    dense = reading.gated(hidden, fields.size("intermediate_size"))
    feeds = [routed if first <= n <= last and not (n + 1) % every else dense for n in range(depth)]
    mixer = reading.attention(fields, hidden)
    return _stack(fields, hidden, [mixer] * depth, feeds, tied=True)


def minimax_m2(fields: CountFields) -> Architecture:
    """MiniMax-M2: norms over all queries and keys, a routing bias."""
    hidden, depth = fields.size("hidden_size"), fields.size("num_hidden_layers")
    fields.expect("shared_intermediate_size", (0,), 0)
    fields.expect("qk_norm_type", ("per_layer",), "per_layer")
    fields.expect("attn_type_list", ([1] * depth,), [1] * depth)
    fields.ignore("use_mtp", "mtp_transformer_layers", "num_mtp_modules")
    norm = fields.take("use_qk_norm", bool, True)
    mixer = reading.attention(fields, hidden, qk_norm_whole=norm)
    count, chosen = fields.size("num_local_experts"), fields.size("num_experts_per_tok")
    bias = fields.take("use_routing_bias", bool, True)
    inner = fields.size("intermediate_size")
    routed = reading.mixture(hidden, count, chosen, inner, correction=bias)
    return _stack(fields, hidden, [mixer] * depth, [routed] * depth)


def minimax_m3(fields: CountFields) -> Architecture:
    """MiniMax-M3: blocks of keys chosen by an indexer in most layers, a shared expert."""
    hidden, depth = fields.size("hidden_size"), fields.size("num_hidden_layers")
    fields.expect("qk_norm_type", ("per_head",), "per_head")
    fields.expect("attention_output_gate", (False,), False)
    fields.expect("use_qk_norm", (True,), True)
    fields.ignore("num_mtp_modules", "num_nextn_predict_layers", "use_gemma_norm")
    whole = reading.attention(fields, hidden, qk_norm=True)
    chosen, where = _indexed(fields, hidden, depth, whole)
    mixers = [chosen if flag else whole for flag in where]
    inner = fields.size("intermediate_size")
    fields.expect("moe_intermediate_size", (inner,), inner)
    fields.expect("n_shared_experts", (1,), 1)
    sizes = (fields.size("num_local_experts"), fields.size("num_experts_per_tok"), inner)
    shared, bias = fields.size("shared_intermediate_size"), fields.take("use_routing_bias", bool)
    routed = reading.mixture(hidden, *sizes, shared, correction=bias)
    dense = reading.gated(hidden, fields.size("dense_intermediate_size"))
    sparse = reading.flags(fields, "moe_layer_freq", depth)
    first = sparse.index(True) if True in sparse else depth
    fields.expect("first_k_dense_replace", (first,), first)
    return _stack(fields, hidden, mixers, [routed if flag else dense for flag in sparse])


def _indexed(
    fields: CountFields, hidden: int, depth: int, whole: Block
) -> tuple[Block, list[bool]]:
    """Take the sparse attention: its Block, and which layers have it."""
    inner = CountFields(fields.take("sparse_attention_config", dict))
    inner.expect("use_sparse_attention", (True,), True)
    inner.ignore("sparse_disable_index_value", "sparse_score_type", "sparse_init_block")
    heads, size = inner.size("sparse_num_index_heads"), inner.size("sparse_index_dim")
    blocks, length = inner.size("sparse_topk_blocks"), inner.size("sparse_block_size")
    local = inner.take("sparse_local_block", int, 0) * length
    index = of_shapes(((heads * size, hidden), (size, hidden)), vectors=2 * size)
    where = reading.flags(inner, "sparse_attention_freq", depth)
    inner.finish()
    seen = Sparse(local, 1, blocks * length, heads * size)
    cache = whole.sizes["cache_width"] + size
    return with_sizes(whole + index, sparse=seen, cache_width=cache), where


def llama4(fields: CountFields) -> Architecture:
    """Llama 4 (Meta, 2025): experts every few layers beside a shared one, chunked attention.

    Three of four layers see their chunk alone; a token sees half of it on average, as of a window.
    """
    hidden, depth = fields.size("hidden_size"), fields.size("num_hidden_layers")
    bias = fields.take("attention_bias", bool, False)
    fields.ignore("use_qk_norm", "attn_temperature_tuning", "floor_scale", "attn_scale")
    every, chunk = 4, fields.take("attention_chunk_size", int, 8192)
    sizes = reading.head_sizes(fields, hidden)
    mixers = {
        window: reading.grouped(hidden, *sizes, window, bias, bias) for window in (chunk, None)
    }
    inner, step = fields.size("intermediate_size"), fields.size("interleave_moe_layer_step", 1)
    sparse = fields.take("moe_layers", list, list(range(step - 1, depth, step)))
    chosen = fields.size("num_experts_per_tok")
    routed = reading.mixture(hidden, fields.size("num_local_experts"), chosen, inner, inner)
    dense = reading.gated(hidden, fields.size("intermediate_size_mlp"))
    return _stack(
        fields,
        hidden,
        [mixers[None if (n + 1) % every == 0 else chunk] for n in range(depth)],
        [routed if n in sparse else dense for n in range(depth)],
    )


def mimo_v2(fields: CountFields) -> Architecture:
    """MiMo-V2-Flash (Xiaomi, 2025): windows with sinks and more key-value heads in most layers."""
    hidden, depth = fields.size("hidden_size"), fields.size("num_hidden_layers")
    fields.expect("attention_bias", (False,), False)
    fields.ignore("swa_rope_theta", "attention_value_scale", "attention_chunk_size")
    fields.ignore("num_nextn_predict_layers")
    window = fields.size("sliding_window")
    fields.expect("sliding_window_size", (window,), window)
    whole = _unequal(fields, hidden, "", None, fields.take("add_full_attention_sink_bias", bool))
    local = _unequal(
        fields, hidden, "swa_", window, fields.take("add_swa_attention_sink_bias", bool)
    )
    mixers = [
        local if flag else whole for flag in reading.flags(fields, "hybrid_layer_pattern", depth)
    ]
    inner = fields.size("moe_intermediate_size")
    sizes = (fields.size("n_routed_experts"), fields.size("num_experts_per_tok"), inner)
    shared = inner * fields.take("n_shared_experts", int, 0)
    routed = reading.mixture(hidden, *sizes, shared, correction=True)
    dense = reading.gated(hidden, fields.size("intermediate_size"))
    sparse = reading.flags(fields, "moe_layer_freq", depth)
    return _stack(fields, hidden, mixers, [routed if flag else dense for flag in sparse])


def _unequal(
    fields: CountFields, hidden: int, prefix: str, window: int | None, sinks: bool
) -> Block:
    """Attention whose values have a size of their own."""
    heads = fields.size(f"{prefix}num_attention_heads")
    groups = fields.size(f"{prefix}num_key_value_heads")
    size, value = fields.size(f"{prefix}head_dim"), fields.size(f"{prefix}v_head_dim")
    shapes = [(heads * size, hidden), (groups * size, hidden), (groups * value, hidden)]
    return of_shapes(
        [*shapes, (hidden, heads * value)],
        vectors=heads * sinks,
        heads=heads,
        kv_heads=groups,
        query_width=heads * size,
        key_width=groups * size,
        value_width=groups * value,
        score_width=heads * (size + value),
        cache_width=groups * (size + value),
        window=window,
    )


def _stack(
    fields: CountFields,
    hidden: int,
    mixers: Sequence[Block],
    feeds: Sequence[Block],
    tied: bool = False,
) -> Architecture:
    """Two RMS norms a layer, one of `mixers` and of `feeds` each."""
    kinds = [layer(*halves, 2 * hidden) for halves in zip(mixers, feeds, strict=True)]
    return reading.decoder(fields, hidden, kinds, tied=tied)
