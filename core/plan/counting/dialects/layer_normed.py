"""Families with LayerNorm: GPT-2 and its descendants, mostly with plain MLPs and biases.

A LayerNorm is two vectors of the stream's width, or one where it has no bias.
"""

from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.counting.blocks import Block, layer
from sabia.core.plan.counting.dialects import reading
from sabia.core.plan.counting.dialects.reading import CountFields
from sabia.core.spec.fields import Fields


def starcoder2(fields: CountFields) -> Architecture:
    """StarCoder2 (arXiv 2402.19173): LayerNorm and biases everywhere, a plain MLP."""
    hidden, depth = _shape(fields)
    bias = fields.take("use_bias", bool, True)
    mixer = reading.attention(
        fields, hidden, window=fields.take("sliding_window", int, None),
        qkv_bias=bias, output_bias=bias,
    )  # fmt: skip
    feed = reading.plain(hidden, fields.size("intermediate_size"), bias=bias)
    return _layer_normed(fields, hidden, depth, mixer, feed, tied=True)


def nemotron(fields: CountFields) -> Architecture:
    """Nemotron-4 (arXiv 2402.16819): LayerNorm with bias, squared ReLU between two matrices."""
    hidden, depth = _shape(fields)
    bias = fields.take("attention_bias", bool, False)
    mixer = reading.attention(fields, hidden, qkv_bias=bias, output_bias=bias)
    inner, feed_bias = fields.size("intermediate_size"), fields.take("mlp_bias", bool, False)
    return _layer_normed(fields, hidden, depth, mixer, reading.plain(hidden, inner, bias=feed_bias))


def gpt_neox(fields: CountFields) -> Architecture:
    """GPT-NeoX, Pythia (arXiv 2304.01373)."""
    hidden, depth = _shape(fields)
    fields.ignore("use_parallel_residual", "classifier_dropout")
    bias, heads = fields.take("attention_bias", bool, True), fields.size("num_attention_heads")
    mixer = reading.grouped(hidden, heads, heads, hidden // heads, None, bias, bias)
    feed = reading.plain(hidden, fields.size("intermediate_size"), bias=True)
    return _layer_normed(fields, hidden, depth, mixer, feed)


def phi(fields: CountFields) -> Architecture:
    """Phi-1.5, Phi-2 (arXiv 2309.05463): one LayerNorm a layer, biases, the head's too."""
    hidden, depth = _shape(fields)
    fields.expect("qk_layernorm", (False,), False)
    mixer = reading.attention(fields, hidden, qkv_bias=True, output_bias=True)
    feed = reading.plain(hidden, fields.size("intermediate_size"), bias=True)
    vocab = fields.size("vocab_size")
    kinds = [layer(mixer, feed, 2 * hidden, norms=1)] * depth
    return reading.decoder(fields, hidden, kinds, vocab=vocab, other=2 * hidden + vocab)


def gpt2(fields: CountFields) -> Architecture:
    """GPT-2: learned positions, LayerNorm and biases everywhere."""
    hidden, depth, heads = (fields.size(name) for name in ("n_embd", "n_layer", "n_head"))
    for name in _GPT2_REMARKS:
        fields.ignore(name)
    positions = fields.size("n_positions", fields.take("n_ctx", int, 1024))
    mixer = reading.grouped(hidden, heads, heads, hidden // heads, None, True, True)
    feed = reading.plain(hidden, fields.take("n_inner", int, 4 * hidden), bias=True)
    return _layer_normed(fields, hidden, depth, mixer, feed, tied=True, positions=positions)


_GPT2_REMARKS: tuple[str, ...] = ("summary_type", "summary_use_proj", "summary_activation", "n_ctx")
_GPT2_REMARKS += ("summary_proj_to_labels", "summary_first_dropout", "scale_attn_weights")
_GPT2_REMARKS += ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")


def falcon(fields: CountFields) -> Architecture:
    """Falcon (arXiv 2311.16867): one key-value head, or groups in the new architecture."""
    hidden, depth = _shape(fields)
    heads, new = fields.size("num_attention_heads"), fields.take("new_decoder_architecture", bool)
    multi, parallel = fields.take("multi_query", bool), fields.take("parallel_attn", bool)
    bias, groups = fields.take("bias", bool), fields.size("num_kv_heads", heads)
    fields.ignore("alibi")
    kv_heads = groups if new else 1 if multi else heads
    norms = fields.take("num_ln_in_parallel_attn", int, 2 if new else 1 if parallel else 2)
    mixer = reading.grouped(hidden, heads, kv_heads, hidden // heads, None, bias, bias)
    feed = reading.plain(hidden, fields.size("ffn_hidden_size", 4 * hidden), bias=bias)
    return _layer_normed(fields, hidden, depth, mixer, feed, tied=True, norms=norms)


def opt(fields: CountFields) -> Architecture:
    """OPT (arXiv 2205.01068): learned positions, two of them unused."""
    hidden, depth = _shape(fields)
    heads, inner = fields.size("num_attention_heads"), fields.size("ffn_dim")
    fields.expect("word_embed_proj_dim", (hidden,), hidden)
    for name, only in (("do_layer_norm_before", True), ("_remove_final_layer_norm", False)):
        fields.expect(name, (only,), only)
    fields.expect("layer_norm_elementwise_affine", (True,), True)
    fields.ignore("layerdrop", "init_std")
    bias, positions = fields.take("enable_bias", bool, True), fields.size("max_position_embeddings")
    mixer = reading.grouped(hidden, heads, heads, hidden // heads, None, bias, bias)
    feed = reading.plain(hidden, inner, bias=bias)
    return _layer_normed(fields, hidden, depth, mixer, feed, tied=True, positions=positions + 2)


def bloom(fields: CountFields) -> Architecture:
    """BLOOM (arXiv 2211.05100): no positions, the embeddings normed."""
    hidden = _either(fields, "hidden_size", "n_embed")
    depth = _either(fields, "n_layer", "num_hidden_layers")
    heads = _either(fields, "n_head", "num_attention_heads")
    for name in _BLOOM_REMARKS:
        fields.ignore(name)
    mixer = reading.grouped(hidden, heads, heads, hidden // heads, None, True, True)
    feed = reading.plain(hidden, 4 * hidden, bias=True)
    return _layer_normed(fields, hidden, depth, mixer, feed, tied=True, outer_norms=2)


_BLOOM_REMARKS: tuple[str, ...] = ("apply_residual_connection_post_layernorm", "slow_but_exact")
_BLOOM_REMARKS += ("masked_softmax_fusion", "bias_dropout_fusion", "offset_alibi", "seq_length")
_BLOOM_REMARKS += ("attention_softmax_in_fp32", "skip_bias_add", "skip_bias_add_qkv", "n_inner")
_BLOOM_REMARKS += ("unk_token_id",)


def mpt(fields: CountFields) -> Architecture:
    """MPT (MosaicML, 2023): no biases, no positions."""
    hidden, depth, heads = (fields.size(name) for name in ("d_model", "n_layers", "n_heads"))
    fields.expect("no_bias", (True,), True)
    fields.ignore("max_seq_len", "learned_pos_emb", "norm_type", "logit_scale", "emb_pdrop")
    fields.ignore("init_device", "init_config", "embedding_fraction", "tokenizer_name", "verbose")
    inner = CountFields(fields.take("attn_config", dict))
    for name, only in (("alibi", True), ("qk_ln", False), ("attn_type", "multihead_attention")):
        inner.expect(name, (only,), only)
    inner.ignore("attn_impl", "softmax_scale", "clip_qkv", "prefix_lm", "alibi_bias_max")
    inner.ignore("attn_uses_sequence_id")
    inner.finish()
    mixer = reading.grouped(hidden, heads, heads, hidden // heads)
    feed = reading.plain(hidden, hidden * fields.size("expansion_ratio", 4))
    return _layer_normed(fields, hidden, depth, mixer, feed, tied=True, bias=False)


def stablelm(fields: CountFields) -> Architecture:
    """StableLM 2 (arXiv 2402.17834): Llama with LayerNorm, biases on queries, keys, values."""
    hidden, depth = _shape(fields)
    fields.expect("qk_layernorm", (False,), False)
    bias = fields.take("use_qkv_bias", bool, False)
    norms = 1 if fields.take("use_parallel_residual", bool, False) else 2
    mixer = reading.attention(fields, hidden, qkv_bias=bias)
    feed = reading.gated(hidden, fields.size("intermediate_size"))
    return _layer_normed(fields, hidden, depth, mixer, feed, norms=norms)


def phimoe(fields: CountFields) -> Architecture:
    """Phi-3.5-MoE (arXiv 2404.14219): sixteen experts, the head's bias too."""
    hidden, depth = _shape(fields)
    bias, vocab = fields.take("attention_bias", bool, False), fields.size("vocab_size")
    window = fields.take("sliding_window", int, None)
    mixer = reading.attention(fields, hidden, window, qkv_bias=bias, output_bias=bias)
    sizes = [fields.size(f"num_{name}") for name in ("local_experts", "experts_per_tok")]
    feed = reading.mixture(hidden, sizes[0], sizes[1], fields.size("intermediate_size"))
    head = vocab if fields.take("lm_head_bias", bool, False) else 0
    kinds = [layer(mixer, feed, 4 * hidden)] * depth
    return reading.decoder(fields, hidden, kinds, vocab=vocab, other=2 * hidden + head)


def _shape(fields: Fields) -> tuple[int, int]:
    return fields.size("hidden_size"), fields.size("num_hidden_layers")


def _either(fields: CountFields, name: str, other: str) -> int:
    return fields.size(name) if name in fields else fields.size(other)


def _layer_normed(
    fields: CountFields,
    hidden: int,
    depth: int,
    mixer: Block,
    feed: Block,
    *,
    norms: int = 2,
    outer_norms: int = 1,
    bias: bool = True,
    tied: bool = False,
    positions: int = 0,
) -> Architecture:
    """Layers with `norms` LayerNorms each, and `outer_norms` around them, with or without bias."""
    norm = (1 + bias) * hidden
    kinds = [layer(mixer, feed, norms * norm, norms=norms)] * depth
    return reading.decoder(
        fields, hidden, kinds, tied=tied, other=outer_norms * norm, positions=positions
    )
