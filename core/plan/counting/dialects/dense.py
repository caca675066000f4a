"""Dense families with RMS norms, by their differences: biases, norms, kind of MLP.

Windows change FLOPs, not parameters. The tests compare the counts with the models of transformers.
Families with LayerNorm are in `layer_normed`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.counting.blocks import LayerHalf, layer
from sabia.core.plan.counting.dialects import reading
from sabia.core.plan.counting.dialects.reading import CountFields
from sabia.core.spec.families import qwen3


def mimo(fields: CountFields) -> Architecture:
    """MiMo: Llama with biases on queries, keys and values, as Qwen2."""
    return _stack(fields, qwen3.windows(fields), qkv_bias=True)


def ministral3(fields: CountFields) -> Architecture:
    """Ministral 3: Llama with a sliding window."""
    return _stack(fields, [fields.take("sliding_window", int, None)] * fields.depth)


def granite(fields: CountFields) -> Architecture:
    """Granite 3 dense: Llama with scaling factors."""
    return _stack(fields, **reading.biases(fields))


def arcee(fields: CountFields) -> Architecture:
    """AFM: Llama with an MLP without gate, squared ReLU between its two matrices."""
    return _stack(fields, mlp=reading.plain, **reading.biases(fields))


def cohere2(fields: CountFields) -> Architecture:
    """Command R7B, Command A (arXiv 2504.00698): one norm, every fourth layer without window."""
    windows = _local(fields, fields.size("sliding_window_pattern", 4))
    return _stack(fields, windows, norms=1, tied=True, **reading.biases(fields))


def cohere(fields: CountFields) -> Architecture:
    """Command-R, Aya: one norm; Command-R+ also norms each head's queries and keys apart."""
    apart = fields.take("use_qk_norm", bool, False)
    return _stack(fields, norms=1, tied=True, normed_apart=apart, **reading.biases(fields))


def ernie4_5(fields: CountFields) -> Architecture:
    """ERNIE 4.5 dense (Baidu, 2025): Llama, tied, with one option for all biases."""
    return _stack(fields, tied=True)


def hunyuan_v1_dense(fields: CountFields) -> Architecture:
    """Hunyuan dense (Tencent, 2025): norms of each head's queries and keys."""
    return _stack(fields, qk_norm=True, **reading.biases(fields))


def apertus(fields: CountFields) -> Architecture:
    """Apertus (arXiv 2509.14233): norms of heads, MLP without gate, two scales of xIELU."""
    return _stack(fields, mlp=reading.plain, qk_norm=True, more=2, **reading.biases(fields))


def smollm3(fields: CountFields) -> Architecture:
    """SmolLM3: Llama, some layers without rotary embedding."""
    windows = qwen3.windows(fields)
    return _stack(fields, windows, tied=True, **reading.biases(fields))


def seed_oss(fields: CountFields) -> Architecture:
    """Seed-OSS: Llama with separate options for the biases of attention."""
    qkv = fields.take("attention_bias", bool, True)
    return _stack(fields, qkv_bias=qkv, output_bias=fields.take("attention_out_bias", bool, False))


def glm4(fields: CountFields) -> Architecture:
    """GLM-4-0414: norms before and after both halves, biases on queries, keys and values."""
    return _stack(fields, norms=4, qkv_bias=fields.take("attention_bias", bool, True))


def olmo3(fields: CountFields) -> Architecture:
    """OLMo 3: norms after each half and of all queries and keys; every fourth has no window."""
    return _stack(fields, _local(fields, 4), qk_norm_whole=True)


def exaone4(fields: CountFields) -> Architecture:
    """EXAONE 4 (arXiv 2507.11407): norms after each half and of each head's queries and keys."""
    pattern: Any = fields.take("sliding_window_pattern", object, "")
    if not isinstance(pattern, str | int):
        raise UsageError(
            "config.json: sliding_window_pattern is no text or number (expected LLLG or 4)"
        )
    every = pattern if isinstance(pattern, int) else len(pattern)  # 4, or LLLG
    local = "sliding_window" in fields and every > 0
    return _stack(fields, _local(fields, every if local else 1), qk_norm=True)


def _local(fields: CountFields, every: int) -> list[int | None]:
    """Read `layer_types` and the window of each layer; by default not every `every`th."""
    usual = [qwen3.KINDS[(index + 1) % every != 0] for index in range(fields.depth)]
    window = fields.take("sliding_window", int, None)
    kinds = fields.each("layer_types", fields.depth, qwen3.KINDS, usual)
    return [window if kind == qwen3.KINDS[1] else None for kind in kinds]


def _stack(
    fields: CountFields, windows: Sequence[int | None] = (), *, norms: int = 2, tied: bool = False,
    mlp: Callable[..., LayerHalf] = reading.gated, more: int = 0, normed_apart: bool = False,
    **flags: bool,
) -> Architecture:  # fmt: skip
    """Norms without bias, grouped attention with one window per layer (empty: none), an MLP.

    more: further vector elements of each layer. normed_apart: a norm for each head.
    """
    hidden, sizes = fields.hidden, reading.head_sizes(fields)
    more += normed_apart * (sizes[0] + sizes[1]) * sizes[2]
    bias = fields.take("mlp_bias", bool, False)
    feed = mlp(hidden, fields.size("intermediate_size"), bias=bias)
    windows = windows or [None] * fields.depth
    mixers = {window: reading.grouped(hidden, *sizes, window, **flags) for window in set(windows)}
    kinds = [layer(mixers[window], feed, norms * hidden + more, norms=norms) for window in windows]
    return reading.decoder(fields, kinds, tied=tied)


def nemotron_nas(fields: CountFields) -> Architecture:
    """Nemotron Super (arXiv 2505.00949): Llama 3 whose layers were pruned one by one.

    A layer's MLP is ffn_mult times as wide as 2/3 of the residual stream, in multiples of 256;
    attention, with its norm, may be missing.
    """
    hidden, depth = fields.hidden, fields.depth
    heads, blocks = fields.size("num_attention_heads"), fields.take("block_configs", list)
    if len(blocks) != depth:
        raise UsageError(f"config.json: block_configs has {len(blocks)} (expected {depth})")

    def mixer(block: dict[str, object]) -> LayerHalf:
        _plain_block("attention", block)
        if block.get("no_op"):
            return LayerHalf()
        groups = block.get("n_heads_in_group")
        if not isinstance(groups, int):
            raise UsageError(f"config.json: n_heads_in_group is {groups!r} (expected a number)")
        return reading.grouped(hidden, heads, heads // groups, hidden // heads)

    def feed(block: dict[str, object]) -> LayerHalf:
        _plain_block("ffn", block)
        if block.get("no_op"):
            return LayerHalf()
        inner = int(2 * float(str(block["ffn_mult"])) * hidden / 3)
        return reading.gated(hidden, -(-inner // 256) * 256)

    halves = [(mixer(block["attention"]), feed(block["ffn"])) for block in blocks]
    norms = [sum(part != LayerHalf() for part in pair) for pair in halves]
    kinds = [
        layer(*pair, count * hidden, norms=count) for pair, count in zip(halves, norms, strict=True)
    ]
    return reading.decoder(fields, kinds)


def _plain_block(name: str, block: dict[str, object]) -> None:
    for key in ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens"):
        if block.get(key):
            raise UsageError(f"config.json: {name} {key} is {block[key]!r} (expected none)")
