"""Families with LayerNorm: GPT-2 and similar, mostly with biases and MLPs without gate.

A LayerNorm has two vectors of the hidden size, or one where it has no bias.
"""

from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.counting.blocks import LayerHalf, layer
from sabia.core.plan.counting.dialects import reading
from sabia.core.plan.counting.dialects.reading import CountFields


def starcoder2(fields: CountFields) -> Architecture:
    """StarCoder2 (arXiv 2402.19173): LayerNorm and biases everywhere, an MLP without gate."""
    bias, window = fields.take("use_bias", bool, True), fields.take("sliding_window", int, None)
    mixer = reading.attention(fields, window, qkv_bias=bias, output_bias=bias)
    feed = reading.plain(fields.hidden, fields.size("intermediate_size"), bias=bias)
    return _layer_normed(fields, mixer, feed, tied=True)


def nemotron(fields: CountFields) -> Architecture:
    """Nemotron-4 (arXiv 2402.16819): LayerNorm with bias, squared ReLU between two matrices."""
    mixer = reading.attention(fields, **reading.biases(fields))
    inner, bias = fields.size("intermediate_size"), fields.take("mlp_bias", bool, False)
    return _layer_normed(fields, mixer, reading.plain(fields.hidden, inner, bias=bias))


def gpt_neox(fields: CountFields) -> Architecture:
    """GPT-NeoX, Pythia (arXiv 2304.01373)."""
    bias, heads = fields.take("attention_bias", bool, True), fields.size("num_attention_heads")
    mixer = _equal_heads(fields, heads, bias)
    feed = reading.plain(fields.hidden, fields.size("intermediate_size"), bias=True)
    return _layer_normed(fields, mixer, feed)


def phi(fields: CountFields) -> Architecture:
    """Phi-1.5, Phi-2 (arXiv 2309.05463): one LayerNorm per layer; biases, also of the head."""
    mixer, hidden = reading.attention(fields, qkv_bias=True, output_bias=True), fields.hidden
    feed = reading.plain(hidden, fields.size("intermediate_size"), bias=True)
    vocab = fields.size("vocab_size")
    kinds = [layer(mixer, feed, 2 * hidden, norms=1)] * fields.depth
    return reading.decoder(fields, kinds, vocab=vocab, other=2 * hidden + vocab)


def gpt2(fields: CountFields) -> Architecture:
    """GPT-2: learned positions, LayerNorm and biases everywhere."""
    sizes = (fields.size(name) for name in ("n_embd", "n_layer", "n_head"))
    fields.hidden, fields.depth, heads = sizes
    positions = fields.size("n_positions", fields.take("n_ctx", int, 1024))
    mixer = _equal_heads(fields, heads, True)
    feed = reading.plain(fields.hidden, fields.take("n_inner", int, 4 * fields.hidden), bias=True)
    return _layer_normed(fields, mixer, feed, tied=True, positions=positions)


def falcon(fields: CountFields) -> Architecture:
    """Falcon (arXiv 2311.16867): one key-value head, or groups in the new architecture."""
    hidden = fields.hidden
    heads, new = fields.size("num_attention_heads"), fields.take("new_decoder_architecture", bool)
    multi, parallel = fields.take("multi_query", bool), fields.take("parallel_attn", bool)
    bias, groups = fields.take("bias", bool), fields.size("num_kv_heads", heads)
    kv_heads = groups if new else 1 if multi else heads
    norms = fields.take("num_ln_in_parallel_attn", int, 2 if new else 1 if parallel else 2)
    mixer = reading.grouped(hidden, heads, kv_heads, hidden // heads, None, bias, bias)
    feed = reading.plain(hidden, fields.size("ffn_hidden_size", 4 * hidden), bias=bias)
    return _layer_normed(fields, mixer, feed, tied=True, norms=norms)


def opt(fields: CountFields) -> Architecture:
    """OPT (arXiv 2205.01068): learned positions, two of them unused."""
    heads, inner = fields.size("num_attention_heads"), fields.size("ffn_dim")
    fields.expect("word_embed_proj_dim", (fields.hidden,), fields.hidden)
    bias, positions = fields.take("enable_bias", bool, True), fields.size("max_position_embeddings")
    mixer = _equal_heads(fields, heads, bias)
    feed = reading.plain(fields.hidden, inner, bias=bias)
    return _layer_normed(fields, mixer, feed, tied=True, positions=positions + 2)


def bloom(fields: CountFields) -> Architecture:
    """BLOOM (arXiv 2211.05100): no positions, a norm of the embeddings."""
    fields.hidden = _either(fields, "hidden_size", "n_embed")
    fields.depth = _either(fields, "n_layer", "num_hidden_layers")
    mixer = _equal_heads(fields, _either(fields, "n_head", "num_attention_heads"), True)
    feed = reading.plain(fields.hidden, 4 * fields.hidden, bias=True)
    return _layer_normed(fields, mixer, feed, tied=True, outer_norms=2)


def mpt(fields: CountFields) -> Architecture:
    """MPT (MosaicML, 2023): no biases, no positions."""
    sizes = (fields.size(name) for name in ("d_model", "n_layers", "n_heads"))
    fields.hidden, fields.depth, heads = sizes
    CountFields(fields.take("attn_config", dict), "mpt.attn_config").finish()
    mixer = _equal_heads(fields, heads, False)
    feed = reading.plain(fields.hidden, fields.hidden * fields.size("expansion_ratio", 4))
    return _layer_normed(fields, mixer, feed, tied=True, bias=False)


def stablelm(fields: CountFields) -> Architecture:
    """StableLM 2 (arXiv 2402.17834): Llama with LayerNorm, biases on queries, keys, values."""
    norms = 1 if fields.take("use_parallel_residual", bool, False) else 2
    mixer = reading.attention(fields, qkv_bias=fields.take("use_qkv_bias", bool, False))
    feed = reading.gated(fields.hidden, fields.size("intermediate_size"))
    return _layer_normed(fields, mixer, feed, norms=norms)


def phimoe(fields: CountFields) -> Architecture:
    """Phi-3.5-MoE (arXiv 2404.14219): sixteen experts, the head may have a bias."""
    vocab, window = fields.size("vocab_size"), fields.take("sliding_window", int, None)
    mixer = reading.attention(fields, window, **reading.biases(fields))
    feed = reading.routed(fields, "num_local_experts", "intermediate_size")
    head = vocab if fields.take("lm_head_bias", bool, False) else 0
    kinds = [layer(mixer, feed, 4 * fields.hidden)] * fields.depth
    return reading.decoder(fields, kinds, vocab=vocab, other=2 * fields.hidden + head)


def _equal_heads(fields: CountFields, heads: int, bias: bool) -> LayerHalf:
    """Attention with as many heads for keys and values."""
    size = fields.hidden // heads
    return reading.grouped(fields.hidden, heads, heads, size, qkv_bias=bias, output_bias=bias)


def _either(fields: CountFields, name: str, other: str) -> int:
    return fields.size(name) if name in fields else fields.size(other)


def _layer_normed(
    fields: CountFields, mixer: LayerHalf, feed: LayerHalf, *, norms: int = 2, outer_norms: int = 1,
    bias: bool = True, tied: bool = False, positions: int = 0,
) -> Architecture:  # fmt: skip
    """Layers with `norms` LayerNorms each, and `outer_norms` outside, with or without bias."""
    norm = (1 + bias) * fields.hidden
    kinds = [layer(mixer, feed, norms * norm, norms=norms)] * fields.depth
    return reading.decoder(fields, kinds, tied=tied, other=outer_norms * norm, positions=positions)
