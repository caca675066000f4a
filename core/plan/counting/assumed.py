"""An Architecture from parameter counts: a published model, scaled to these counts.

Depth, width, heads and vocabulary are those of the nearest published model (`nearest_shape`)
unless given. The remaining parameters are in the feed-forward layers: a dense MLP's inner width; in
an MoE model the width of an expert follows from the active parameters, and the number of experts
from the others, E = k + (total - active) / (layers · expert), rounded up. The rounding error is
added to the active part, so both counts are met within one element per layer.

The published model that is nearest to given parameter counts.

Its depth, widths and heads are assumed where only counts are given: 1.6T/49B has 61 layers of 7168.
Distance is by the ratios of total and of active parameters. A dense count gets a dense model, a
sparse one an MoE model. The caller reports the assumption.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.catalogue import read_data
from sabia.core.plan.counting.architecture import Architecture, LayerKind
from sabia.core.plan.counting.known import architecture_from


@dataclass(frozen=True)
class Shape:
    """A published model of `params` parameters, `active` of them active, and its configuration."""

    name: str
    params: float
    active: float
    config: Mapping[str, Any]
    source: str
    date: date


def load_shapes() -> tuple[Shape, ...]:
    """All shapes on file."""
    return tuple(Shape(**row) for row in read_data("shapes.toml")["shape"])


def nearest_shape(params: float, active: float) -> Shape:
    """The published model of the same kind nearest in log(params), log(active)."""

    def distance(shape: Shape) -> float:
        return math.hypot(math.log(shape.params / params), math.log(shape.active / active))

    dense = active >= params
    alike = [shape for shape in load_shapes() if (shape.active == shape.params) == dense]
    return min(alike, key=distance)


_LEAST_SHARE = 0.05  # lower bound of the scale of the published feed-forward width
_VOCAB_SHARE = 0.65  # upper bound of embedding and head, as a share of the active parameters


def assumed_architecture(
    params: float, active: float, layers: int | None = None, hidden: int | None = None
) -> Architecture:
    """A model of `params` in total and `active` per token. Raises UsageError where none fits."""
    shape = nearest_shape(params, active)
    base = architecture_from(_resized(shape.config, layers, hidden))
    base = replace(base, extra=(), extra_params=0, counted_only=False)
    # a smaller vocabulary where embedding and head would be most of the active parameters
    tables = 2 if base.head_params else 1
    vocab = min(base.vocab, int(_VOCAB_SHARE * active / (tables * base.hidden)))
    size = vocab * base.hidden
    head = size if base.head_params else 0
    base = replace(base, vocab=vocab, embedding_params=size, head_params=head)
    layers_of = _moe(base, params, active) if active < params else _dense(base, params)
    return replace(base, layers=layers_of, name=f"assumed as {shape.name}", assumed=True)


def _resized(config: Mapping[str, Any], layers: int | None, hidden: int | None) -> dict[str, Any]:
    """The configuration with another depth and width; heads keep their size."""
    resized = dict(config)
    if layers:
        resized["num_hidden_layers"] = layers
        if "compress_ratios" in config:
            ratios = config["compress_ratios"]
            resized["compress_ratios"] = [ratios[n % (len(ratios) - 1)] for n in range(layers)]
            resized["num_nextn_predict_layers"] = 0
        if "first_k_dense_replace" in config:
            resized["first_k_dense_replace"] = min(config["first_k_dense_replace"], layers - 1)
    if hidden:
        heads = max(1, round(config["num_attention_heads"] * (hidden / config["hidden_size"])))
        groups = config["num_key_value_heads"]
        if groups == config["num_attention_heads"]:
            groups = heads
        head_size = config["hidden_size"] // config["num_attention_heads"]
        latent = "qk_rope_head_dim" in config  # has fields of its own for the sizes of heads
        resized["head_dim"] = config.get("head_dim") or (None if latent else head_size)
        resized |= {"hidden_size": hidden, "num_attention_heads": heads}
        resized |= {"num_key_value_heads": math.gcd(heads, groups)}
        if "o_groups" in config:  # output groups (DeepSeek-V4), which divide the heads
            resized["o_groups"] = math.gcd(heads, config["o_groups"])
    return resized


def _dense(base: Architecture, params: float) -> tuple[LayerKind, ...]:
    feeds = sum(kind.count * kind.mlp_params for kind in base.layers)
    share = (params - (base.params - feeds)) / feeds
    _check(base, share, params)
    return tuple(_with_feed(k, k.mlp_params * share, k.mlp_width * share) for k in base.layers)


def _moe(base: Architecture, params: float, active: float) -> tuple[LayerKind, ...]:
    routed = next(kind for kind in base.layers if kind.experts)
    count = sum(kind.count for kind in base.layers if kind.experts)
    chosen, one = routed.top_k, routed.expert_params / routed.experts
    always = routed.mlp_params - base.hidden * routed.experts  # without the router
    fixed = base.active_params - count * (routed.mlp_params + chosen * one)
    experts, idle = routed.experts, (params - active) / count
    for _ in range(3):  # the router's size depends a little on the number of experts
        share = ((active - fixed) / count - base.hidden * experts) / (always + chosen * one)
        _check(base, share, active)
        # rounded up (tolerance 0.1 %); large numbers are multiples of 16 for many ranks
        needed = chosen + idle / (share * one)
        step = 16 if needed >= 64 else 4 if needed >= 16 else 1
        experts = math.ceil(needed * 0.999 / step) * step
    held = idle * experts / (experts - chosen)
    rest = (active - fixed) / count - held * chosen / experts
    gained = round((rest - base.hidden * experts - always) / (routed.matrices * base.hidden))

    def scaled(kind: LayerKind) -> LayerKind:
        if not kind.experts:
            return kind
        resized = _with_feed(kind, rest, max(1, kind.mlp_width + gained))
        inner = _divisible_width(kind.expert_width * held / experts / one)
        return replace(resized, expert_params=round(held), experts=experts, expert_width=inner)

    return tuple(map(scaled, base.layers))


def _with_feed(kind: LayerKind, params: float, width: float) -> LayerKind:
    """The layer with another MLP (or shared experts, where it has any) and its adapters."""
    inner = kind.mlp_width and _divisible_width(width)
    edges = kind.adapter_edges + kind.matrices * (inner - kind.mlp_width)
    return replace(kind, mlp_params=round(params), mlp_width=inner, adapter_edges=edges)


def _divisible_width(width: float) -> int:
    """A width that tensor ranks can divide, within 1/16; the parameter counts do not change."""
    step = max(1, min(256, 1 << int(width / 8).bit_length() - 1)) if width >= 16 else 1
    return max(1, round(width / step)) * step


def _check(base: Architecture, share: float, wanted: float) -> None:
    if share < _LEAST_SHARE:
        raise UsageError(
            f"--params: {base.depth} layers of hidden size {base.hidden} use all of {wanted:.3g} "
            "active parameters without the feed-forward layers (expected a smaller --layers or "
            "--hidden)"
        )
