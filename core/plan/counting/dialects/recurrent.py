"""Families with a recurrent state instead of attention in some or all layers.

Mamba-2 (arXiv 2405.21060): Mamba 2, Granite 4 hybrid, Falcon-H1 (arXiv 2507.22448), and Nemotron-H
in `hybrids`. Mamba-1 (arXiv 2312.00752): Jamba (arXiv 2403.19887). Linear attention: MiniMax-01
(arXiv 2501.08313), Kimi Linear (arXiv 2510.26692). Counted are the tensors of transformers' models;
of a state [a, b] per head, 2·a·b multiply-adds per token: its update and its reading.
"""

import math
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.counting.architecture import Architecture
from sabia.core.plan.counting.blocks import LayerHalf, layer, mixer_block, mixer_sizes, of_shapes
from sabia.core.plan.counting.dialects import reading
from sabia.core.plan.counting.dialects.reading import CountFields

_KINDS = ("full_attention", "linear_attention")


def mamba(
    hidden: int, heads: int, size: int, groups: int, state: int, taps: int, *,
    bias: bool = True, normed: bool = True,
) -> LayerHalf:  # fmt: skip
    """Mamba-2: a state [size, state] per head; bias: of the convolution; normed: a gated norm."""
    inner, mixed = heads * size, heads * size + 2 * groups * state
    return of_shapes(
        ((inner + mixed + heads, hidden), (hidden, inner)),
        others=((mixed, taps),),
        vectors=3 * heads + normed * inner + bias * mixed,
        **mixer_sizes(heads, groups, groups * state, groups * state, inner),
        state_products=2 * inner * state,
        state_width=inner * state + (taps - 1) * mixed,
    )


def mamba2(fields: CountFields) -> Architecture:
    """Mamba 2: layers of one half, without attention."""
    hidden = fields.hidden
    heads, size = fields.size("num_heads"), fields.size("head_dim")
    expand = fields.size("expand", 2)
    if heads * size != expand * hidden:
        raise UsageError(
            f"config.json: num_heads is {heads} (expected {expand * hidden // size}, expand x "
            "hidden_size / head_dim)"
        )
    one = mamba(
        hidden, heads, size, fields.size("n_groups"), fields.size("state_size"),
        fields.size("conv_kernel", 4), bias=fields.take("use_conv_bias", bool, True),
    )  # fmt: skip
    return reading.decoder(fields, [layer(one, LayerHalf(), hidden, norms=1)] * fields.depth)


def _prefixed(fields: CountFields, normed: bool = True) -> LayerHalf:
    """Read Mamba-2 by the names of Granite and Falcon: `mamba_n_heads` and so on."""
    return mamba(
        fields.hidden, fields.size("mamba_n_heads"), fields.size("mamba_d_head"),
        fields.size("mamba_n_groups"), fields.size("mamba_d_state"),
        fields.size("mamba_d_conv", 4), bias=fields.take("mamba_conv_bias", bool, True),
        normed=normed,
    )  # fmt: skip


def granitemoehybrid(fields: CountFields) -> Architecture:
    """Granite 4: Mamba-2 or attention, then a shared MLP and, in the larger models, experts."""
    hidden, depth = fields.hidden, fields.depth
    kinds = fields.each("layer_types", depth, ("mamba", "attention"), ["mamba"] * depth)
    attended = reading.attention(fields, **reading.biases(fields))
    mixers = {"mamba": _prefixed(fields), "attention": attended}
    shared, experts = fields.size("shared_intermediate_size"), fields.take("num_local_experts", int)
    inner, chosen = fields.size("intermediate_size"), fields.take("num_experts_per_tok", int, 0)
    routed = (experts, chosen, inner, shared)
    feed = reading.moe(hidden, *routed) if experts else reading.gated(hidden, shared)
    return reading.stacked(fields, [mixers[kind] for kind in kinds], [feed] * depth)


def falcon_h1(fields: CountFields) -> Architecture:
    """Falcon-H1: attention and Mamba-2 side by side in each layer, then an MLP."""
    hidden = fields.hidden
    attended = reading.attention(fields)
    recurrent = _prefixed(fields, normed=fields.take("mamba_rms_norm", bool, False))
    inner = fields.size("mamba_d_ssm", recurrent.sizes["value_width"])
    if inner != recurrent.sizes["value_width"]:
        raise UsageError(f"config.json: mamba_d_ssm is {inner} (expected heads x their size)")
    # one layer's sizes: those of attention, with the state and the values of both
    sizes = dict(attended.sizes) | {
        key: recurrent.sizes[key] for key in ("state_products", "state_width")
    }
    sizes["value_width"] += inner
    both = (recurrent + attended).with_sizes(**sizes)
    feed = reading.gated(hidden, fields.size("intermediate_size"))
    return reading.stacked(fields, [both] * fields.depth, [feed] * fields.depth)


def jamba(fields: CountFields) -> Architecture:
    """Jamba: Mamba-1 with some layers of attention; some MLPs are mixtures of experts."""
    hidden, depth = fields.hidden, fields.depth
    mixers = _mamba1(fields), reading.attention(fields)
    inner, experts = fields.size("intermediate_size"), fields.size("num_experts")
    chosen, dense = fields.size("num_experts_per_tok"), reading.gated(hidden, inner)
    feeds = dense, reading.moe(hidden, experts, chosen, inner) if experts > 1 else dense

    def where(name: str, period: int, offset: int) -> list[bool]:
        step = fields.size(f"{name}_layer_period", period)
        first = fields.take(f"{name}_layer_offset", int, offset)
        return [(index - first) % step == 0 for index in range(depth)]

    attends, routes = where("attn", 8, 4), where("expert", 2, 1)
    return reading.stacked(fields, [mixers[n] for n in attends], [feeds[n] for n in routes])


def _mamba1(fields: CountFields) -> LayerHalf:
    """A state [inner, N]; step size, input and output matrices depend on the token."""
    hidden, state = fields.hidden, fields.size("mamba_d_state", 16)
    inner, taps = hidden * fields.size("mamba_expand", 2), fields.size("mamba_d_conv", 4)
    rank = fields.take("mamba_dt_rank", object, "auto")
    rank = math.ceil(hidden / 16) if rank == "auto" else rank
    if not isinstance(rank, int) or rank < 1:
        raise UsageError(f"config.json: mamba_dt_rank is {rank!r} (expected a number, or auto)")
    bias = fields.take("mamba_conv_bias", bool, True)
    return of_shapes(
        ((2 * inner, hidden), (rank + 2 * state, inner), (inner, rank), (hidden, inner)),
        others=((inner, taps),),
        vectors=inner * state + 2 * inner + bias * inner + rank + 2 * state,
        **mixer_sizes(1, 1, state, state, inner),
        state_products=2 * inner * state,
        state_width=inner * (state + taps - 1),
    )


def _square(heads: int, size: int, kept: int = 0) -> dict[str, Any]:
    """Sizes of a state [size, size] per head; kept: further elements for each sequence."""
    inner = heads * size
    state = {"state_products": 2 * inner * size, "state_width": inner * size + kept}
    return {**mixer_sizes(heads, heads, inner, inner, inner), **state}


def minimax(fields: CountFields) -> Architecture:
    """MiniMax-01 and M1: lightning attention (a state per head), every second layer full."""
    fields.expect("sliding_window", (None,), None)
    hidden, depth = fields.hidden, fields.depth
    usual = [_KINDS[index % 2] for index in range(depth)]
    kinds = fields.each("layer_types", depth, _KINDS, usual)
    heads, groups, size = reading.head_sizes(fields)
    inner = heads * size
    linear = of_shapes(
        ((3 * inner, hidden), (hidden, inner), (inner, hidden)),
        vectors=inner,
        **_square(heads, size),
    )
    mixers = dict(zip(_KINDS, (reading.grouped(hidden, heads, groups, size), linear), strict=True))
    feed = reading.routed(fields, "num_local_experts", "intermediate_size")
    return reading.stacked(fields, [mixers[kind] for kind in kinds], [feed] * depth)


def kimi_linear(fields: CountFields) -> Architecture:
    """Kimi Linear: three layers of delta attention with a gate per channel, then one of MLA."""
    hidden, depth = fields.hidden, fields.depth
    own: dict[str, Any] = fields.take("linear_attn_config", dict, {})
    kinds = _kimi_kinds(fields, depth, own.get("full_attn_layers"))
    names = {"head_dim": ("linear_head_dim", 128), "num_heads": ("linear_num_heads", 32),
             "short_conv_kernel_size": ("linear_conv_kernel_dim", 4)}  # fmt: skip
    size, heads, taps = (
        own[key] if key in own else fields.size(*name) for key, name in names.items()
    )
    inner = heads * size
    delta = of_shapes(
        ((inner, hidden),) * 3
        + ((size, hidden), (inner, size)) * 2
        + ((heads, hidden), (hidden, inner)),
        others=((3 * inner, taps),),
        vectors=inner + heads + size,
        **_square(heads, size, kept=(taps - 1) * 3 * inner),
    )
    mla = mixer_block(reading.latent(fields), hidden)
    mixers = dict(zip(_KINDS, (mla, delta), strict=True))
    dense = reading.gated(hidden, fields.size("intermediate_size"))
    sparse = reading.routed(
        fields, "num_experts", chosen="num_experts_per_token", alike="num_shared_experts",
        correction=True,
    )  # fmt: skip
    first = fields.take("first_k_dense_replace", int, 1)
    usual = ["dense" if index < first else "sparse" for index in range(depth)]
    feeds = fields.each("mlp_layer_types", depth, ("dense", "sparse"), usual)
    halves = {"dense": dense, "sparse": sparse}
    return reading.stacked(fields, [mixers[kind] for kind in kinds], [halves[f] for f in feeds])


def _kimi_kinds(fields: CountFields, depth: int, full: object) -> list[str]:
    """`layer_types`, or `full` layers numbered from 1; else every fourth after the first."""
    usual = [_KINDS[not index or index % 4 != 0] for index in range(depth)]
    if isinstance(full, list):
        usual = [_KINDS[index + 1 not in full] for index in range(depth)]
    return fields.each("layer_types", depth, _KINDS, usual)
