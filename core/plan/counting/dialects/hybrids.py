"""Nemotron-H, whose layers have only one half (Mamba-2, attention, MLP or MoE), and Gemma 4.

Also Nemotron Super, whose layers differ one by one.
"""

from collections.abc import Callable

from sabia.core.errors import UsageError
from sabia.core.plan.counting.architecture import Architecture, LayerKind
from sabia.core.plan.counting.blocks import LayerHalf, layer, of_shapes
from sabia.core.plan.counting.dialects import reading
from sabia.core.plan.counting.dialects.reading import CountFields
from sabia.core.plan.counting.dialects.recurrent import mamba
from sabia.core.spec.families.gemma2 import KINDS

Block = dict[str, object]  # a half of a layer of `block_configs`
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def nemotron_h(fields: CountFields) -> Architecture:
    """Nemotron-H and Nemotron 3 (arXiv 2504.03624): each layer has a norm and one half."""
    hidden = fields.hidden
    fields.expect("sliding_window", (None,), None)
    names = _pattern(fields)
    readers: dict[str, Callable[[CountFields, int], LayerHalf]] = {
        "mamba": _mamba,
        "attention": _attention,
        "mlp": lambda taken, width: reading.plain(width, taken.size("intermediate_size")),
        "moe": _experts,
    }
    halves = {name: read(fields, hidden) for name, read in readers.items() if name in names}
    if "mlp" not in names:
        fields.ignore("intermediate_size")

    def pair(name: str) -> tuple[LayerHalf, LayerHalf]:
        mixes = name in ("mamba", "attention")
        return (halves[name], LayerHalf()) if mixes else (LayerHalf(), halves[name])

    return reading.decoder(fields, [layer(*pair(name), hidden, norms=1) for name in names])


def _pattern(fields: CountFields) -> list[str]:
    if "layers_block_type" in fields:
        names = fields.take("layers_block_type", list)
    else:
        text = fields.take("hybrid_override_pattern", str)
        names = [_LETTERS.get(letter, letter) for letter in text]
    depth = fields.size("num_hidden_layers", len(names))
    if depth != len(names) or not set(names) <= set(_LETTERS.values()):
        raise UsageError(
            f"config.json: hybrid_override_pattern has {len(names)} of {sorted(set(names))} "
            f"(expected {depth} of {', '.join(_LETTERS)})"
        )
    return names


def _mamba(fields: CountFields, hidden: int) -> LayerHalf:
    names = "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"
    bias = fields.take("use_conv_bias", bool, True)
    return mamba(hidden, *map(fields.size, names), bias=bias)


def _attention(fields: CountFields, hidden: int) -> LayerHalf:
    heads, groups = fields.size("num_attention_heads"), fields.size("num_key_value_heads")
    size = fields.size("attention_head_dim", fields.size("head_dim", hidden // heads))
    return reading.grouped(hidden, heads, groups, size)


def _experts(fields: CountFields, hidden: int) -> LayerHalf:
    """Experts without gate (of a latent of `moe_latent_size`, where given), and a shared one."""
    count, inner = fields.size("n_routed_experts"), fields.size("moe_intermediate_size")
    fields.expect("n_shared_experts", (1,), 1)
    shared, latent = fields.size("moe_shared_expert_intermediate_size"), hidden
    shapes = [(shared, hidden), (hidden, shared)]
    if "moe_latent_size" in fields:
        latent = fields.size("moe_latent_size")
        shapes += [(latent, hidden), (hidden, latent)]
    sizes = {"experts": count, "top_k": fields.size("num_experts_per_tok"), "matrices": 2}
    met = of_shapes(shapes, others=((count, hidden),), vectors=count, mlp_width=shared, **sizes)
    return met + LayerHalf(experts=count * 2 * latent * inner, sizes={"expert_width": inner})


def gemma4(fields: CountFields) -> Architecture:
    """Gemma 4 (Google, 2026): wide heads and keys as values in global layers, four norms per layer.

    MoE layers have a dense MLP in parallel to the experts, with norms of its own.
    """
    hidden, depth = fields.hidden, fields.depth
    usual = [KINDS[(index + 1) % 6 == 0] for index in range(depth)]
    kinds = fields.each("layer_types", depth, KINDS, usual)
    heads, shared = fields.size("num_attention_heads"), fields.take("attention_k_eq_v", bool, False)
    groups, size = fields.size("num_key_value_heads"), fields.size("head_dim")
    wide = fields.size("global_head_dim", size)
    few = fields.size("num_global_key_value_heads", groups)
    window = fields.size("sliding_window")
    local = reading.grouped(hidden, heads, groups, size, window, qk_norm=True)
    whole = reading.grouped(hidden, heads, few if shared else groups, wide, qk_norm=True)
    if shared:
        whole += LayerHalf(matrices=-few * wide * hidden, edges=-few * wide - hidden)
    mixers = dict(zip(KINDS, (local, whole), strict=True))
    feed, norms = _gemma4_feed(fields, hidden)
    layers = [layer(mixers[kind], feed, norms * hidden, norms=norms) for kind in kinds]
    return reading.decoder(fields, layers, tied=True)


def _gemma4_feed(fields: CountFields, hidden: int) -> tuple[LayerHalf, int]:
    dense = reading.gated(hidden, fields.size("intermediate_size"))
    if not fields.take("enable_moe_block", bool, False):
        fields.ignore("moe_intermediate_size", "expert_intermediate_size")
        return dense, 4
    routed = reading.routed(fields, "num_experts", chosen="top_k_experts")
    sizes = dict(routed.sizes) | {"mlp_width": dense.sizes["mlp_width"]}
    norms = LayerHalf(vectors=hidden + sizes["experts"])
    return (dense + routed + norms).with_sizes(**sizes), 7


def nemotron_nas(fields: CountFields) -> Architecture:
    """Nemotron Super (arXiv 2505.00949): Llama 3 whose layers were pruned one by one.

    A layer's MLP is ffn_mult times as wide as 2/3 of the residual stream, in multiples of 256;
    attention, with its norm, may be missing.
    """
    hidden, depth = fields.hidden, fields.depth
    heads, blocks = fields.size("num_attention_heads"), fields.take("block_configs", list)
    if len(blocks) != depth:
        raise UsageError(f"config.json: block_configs has {len(blocks)} (expected {depth})")

    def mixer(block: Block) -> LayerHalf:
        groups = block.get("n_heads_in_group")
        if not isinstance(groups, int):
            raise UsageError(f"config.json: n_heads_in_group is {groups!r} (expected a number)")
        return reading.grouped(hidden, heads, heads // groups, hidden // heads)

    def feed(block: Block) -> LayerHalf:
        inner = int(2 * float(str(block["ffn_mult"])) * hidden / 3)
        return reading.gated(hidden, -(-inner // 256) * 256)

    def kind(block: dict[str, Block]) -> LayerKind:
        halves = _half("attention", block, mixer), _half("ffn", block, feed)
        norms = sum(half != LayerHalf() for half in halves)
        return layer(*halves, norms * hidden, norms=norms)

    return reading.decoder(fields, map(kind, blocks))


def _half(name: str, block: dict[str, Block], make: Callable[[Block], LayerHalf]) -> LayerHalf:
    """One half of a layer, which may be missing."""
    own = block[name]
    for key in ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens"):
        if own.get(key):
            raise UsageError(f"config.json: {name} {key} is {own[key]!r} (expected none)")
    return LayerHalf() if own.get("no_op") else make(own)
