"""Dense families by their differences: which projections have biases, norms of what, which MLP.

Norms are vectors of the stream's width (two where LayerNorm has a bias); windows do not change
parameters, but operations. Counts are held against transformers' own models by the tests.
"""

from collections.abc import Sequence
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.counting.blocks import Block, layer
from sabia.core.plan.counting.dialects import reading
from sabia.core.plan.counting.dialects.reading import CountFields
from sabia.core.spec.families import qwen3
from sabia.core.spec.fields import Fields


def qwen2(fields: CountFields) -> Architecture:
    """Qwen2, Qwen2.5 (arXiv 2407.10671): Llama with biases on queries, keys and values."""
    fields.expect("attention_bias", (True,), True)
    fields.expect("use_mrope", (False,), False)
    fields.ignore("num_nextn_predict_layers")  # MiMo: kept beside the model
    hidden, depth = _shape(fields)
    return _stack(fields, hidden, qwen3.windows(fields, depth), qkv_bias=True)


def phi3(fields: CountFields) -> Architecture:
    """Phi-3, Phi-4 (arXiv 2404.14219): Llama with fused projections."""
    fields.expect("attention_bias", (False,), False)
    fields.expect("mlp_bias", (False,), False)
    hidden, depth = _shape(fields)
    return _stack(fields, hidden, [fields.take("sliding_window", int, None)] * depth)


def granite(fields: CountFields) -> Architecture:
    """Granite 3 dense: Llama with factors."""
    hidden, depth = _shape(fields)
    bias = fields.take("attention_bias", bool, False)
    return _stack(fields, hidden, [None] * depth, qkv_bias=bias, output_bias=bias)


def smollm3(fields: CountFields) -> Architecture:
    """SmolLM3: Llama, some layers without rotation."""
    hidden, depth = _shape(fields)
    bias, windows = fields.take("attention_bias", bool, False), qwen3.windows(fields, depth)
    return _stack(fields, hidden, windows, tied=True, qkv_bias=bias, output_bias=bias)


def seed_oss(fields: CountFields) -> Architecture:
    """Seed-OSS: Llama whose attention's biases are chosen apart."""
    hidden, depth = _shape(fields)
    qkv = fields.take("attention_bias", bool, True)
    output = fields.take("attention_out_bias", bool, False)
    return _stack(fields, hidden, [None] * depth, qkv_bias=qkv, output_bias=output)


def glm4(fields: CountFields) -> Architecture:
    """GLM-4-0414: norms before and behind both halves, biases on queries, keys and values."""
    hidden, depth = _shape(fields)
    bias = fields.take("attention_bias", bool, True)
    return _stack(fields, hidden, [None] * depth, norms=4, qkv_bias=bias)


def olmo3(fields: CountFields) -> Architecture:
    """OLMo 3: norms behind each half and over all queries and keys, every fourth layer whole."""
    hidden, depth = _shape(fields)
    fields.expect("attention_bias", (False,), False)
    usual = [qwen3.KINDS[(index + 1) % 4 != 0] for index in range(depth)]
    return _stack(fields, hidden, _local(fields, depth, usual), qk_norm_whole=True)


def exaone4(fields: CountFields) -> Architecture:
    """EXAONE 4 (arXiv 2507.11407): norms behind each half and on each head's queries and keys."""
    hidden, depth = _shape(fields)
    pattern: Any = fields.take("sliding_window_pattern", object, "")
    every = len(pattern) if isinstance(pattern, str) else int(pattern)  # LLLG, or 4
    local = "sliding_window" in fields and every > 0
    usual = [qwen3.KINDS[local and (index + 1) % every != 0] for index in range(depth)]
    windows = _local(fields, depth, usual)
    return _stack(fields, hidden, windows, qk_norm=True)


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


def _shape(fields: Fields) -> tuple[int, int]:
    return fields.size("hidden_size"), fields.size("num_hidden_layers")


def _local(fields: Fields, depth: int, usual: list[str]) -> list[int | None]:
    """Take `layer_types` and the window of those that have one."""
    window = fields.take("sliding_window", int, None)
    kinds = fields.each("layer_types", depth, qwen3.KINDS, usual)
    return [window if kind == qwen3.KINDS[1] else None for kind in kinds]


def _stack(
    fields: CountFields,
    hidden: int,
    windows: Sequence[int | None],
    *,
    norms: int = 2,
    tied: bool = False,
    **flags: bool,
) -> Architecture:
    """RMS norms, grouped attention with a window a layer, a gated MLP."""
    sizes = reading.head_sizes(fields, hidden)
    feed = reading.gated(
        hidden, fields.size("intermediate_size"), bias=fields.take("mlp_bias", bool, False)
    )
    mixers = {window: reading.grouped(hidden, *sizes, window, **flags) for window in set(windows)}
    kinds = [layer(mixers[window], feed, norms * hidden, norms=norms) for window in windows]
    return reading.decoder(fields, hidden, kinds, tied=tied)


def _layer_normed(
    fields: CountFields,
    hidden: int,
    depth: int,
    mixer: Block,
    feed: Block,
    *,
    norms: int = 2,
    tied: bool = False,
    positions: int = 0,
) -> Architecture:
    """Layers with `norms` LayerNorms of weight and bias, and one behind them."""
    kinds = [layer(mixer, feed, 2 * norms * hidden, norms=norms)] * depth
    return reading.decoder(fields, hidden, kinds, tied=tied, other=2 * hidden, positions=positions)


def nemotron_nas(fields: CountFields) -> Architecture:
    """Nemotron Super (arXiv 2505.00949): Llama 3 whose layers were thinned one by one.

    A layer's MLP is ffn_mult times as wide as 2/3 of the stream, in multiples of 256; attention,
    with its norm, may be missing.
    """
    hidden, depth = _shape(fields)
    heads, blocks = fields.size("num_attention_heads"), fields.take("block_configs", list)
    fields.expect("attention_bias", (False,), False)
    fields.expect("mlp_bias", (False,), False)
    if len(blocks) != depth:
        raise UsageError(f"config.json: block_configs has {len(blocks)} (expected {depth})")

    def mixer(block: dict[str, object]) -> Block:
        _plain_block("attention", block)
        if block.get("no_op"):
            return Block()
        groups = block.get("n_heads_in_group")
        if not isinstance(groups, int):
            raise UsageError(f"config.json: n_heads_in_group is {groups!r} (expected a number)")
        return reading.grouped(hidden, heads, heads // groups, hidden // heads)

    def feed(block: dict[str, object]) -> Block:
        _plain_block("ffn", block)
        if block.get("no_op"):
            return Block()
        inner = int(2 * float(str(block["ffn_mult"])) * hidden / 3)
        return reading.gated(hidden, -(-inner // 256) * 256)

    halves = [(mixer(block["attention"]), feed(block["ffn"])) for block in blocks]
    norms = [sum(part != Block() for part in pair) for pair in halves]
    kinds = [
        layer(*pair, count * hidden, norms=count) for pair, count in zip(halves, norms, strict=True)
    ]
    return reading.decoder(fields, hidden, kinds)


def _plain_block(name: str, block: dict[str, object]) -> None:
    for key in ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens"):
        if block.get(key):
            raise UsageError(f"config.json: {name} {key} is {block[key]!r} (expected none)")
