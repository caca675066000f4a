"""An Architecture for bare parameter counts: a published shape, scaled until the counts are met.

Depth, width, heads, vocabulary are the nearest published model's (counting.nearest) unless given.
What is left of the counts goes to the feed-forward parts: a dense MLP's inner width; in a mixture
the width of an expert from what a token visits, and the number of experts from the rest,
E = k + (total - active) / (layers · expert), rounded up. What rounding leaves is added to what each
token visits, so both counts come out within one element a layer.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.counting.architecture import Architecture, LayerKind
from sabia.core.plan.counting.known import architecture_from
from sabia.core.plan.counting.nearest import nearest_shape

_LEAST_SHARE = 0.05  # of the shape's own feed-forward width, below which it is no such model
_VOCAB_SHARE = 0.65  # most of the active parameters that lookup and head may take


def assumed_architecture(
    params: float, active: float, layers: int | None = None, hidden: int | None = None
) -> Architecture:
    """A model of `params` in all and `active` a token. Raises UsageError where none fits."""
    shape = nearest_shape(params, active)
    base = architecture_from(_resized(shape.config, layers, hidden))
    base = replace(base, extra=(), extra_params=0, counted_only=False)
    base = _with_vocabulary(base, active)
    fitted = _mixture(base, params, active) if active < params else _dense(base, params)
    return replace(fitted, name=f"assumed as {shape.name}", assumed=True)


def _resized(
    config: Mapping[str, Any], layers: int | None, hidden: int | None
) -> Mapping[str, Any]:
    """The configuration with another depth and width; heads keep their size."""
    found = dict(config)
    if layers:
        found["num_hidden_layers"] = layers
        found |= _layer_lists(found, layers)
    if hidden:
        ratio = hidden / config["hidden_size"]
        heads = max(1, round(config["num_attention_heads"] * ratio))
        groups = config["num_key_value_heads"]
        if groups == config["num_attention_heads"]:
            groups = heads
        found["head_dim"] = config.get("head_dim") or _head_size(config)
        found |= {"hidden_size": hidden, "num_attention_heads": heads}
        found |= {"num_key_value_heads": math.gcd(heads, groups)}
        if "o_groups" in config:  # output groups (DeepSeek-V4), which divide the heads
            found["o_groups"] = math.gcd(heads, config["o_groups"])
    return found


def _head_size(config: Mapping[str, Any]) -> int | None:
    if "qk_rope_head_dim" in config:
        return None
    return config["hidden_size"] // config["num_attention_heads"]


def _layer_lists(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "compress_ratios" in config:
        ratios = config["compress_ratios"]
        found["compress_ratios"] = [ratios[n % (len(ratios) - 1)] for n in range(layers)]
        found["num_nextn_predict_layers"] = 0
    if "first_k_dense_replace" in config:
        found["first_k_dense_replace"] = min(config["first_k_dense_replace"], layers - 1)
    return found


def _with_vocabulary(base: Architecture, active: float) -> Architecture:
    """A smaller vocabulary where lookup and head would take most of the active parameters."""
    tables = 2 if base.head_params else 1
    vocab = min(base.vocab, int(_VOCAB_SHARE * active / (tables * base.hidden)))
    size = vocab * base.hidden
    head = size if base.head_params else 0
    return replace(base, vocab=vocab, embedding_params=size, head_params=head)


def _dense(base: Architecture, params: float) -> Architecture:
    feeds = sum(kind.count * kind.mlp_params for kind in base.layers)
    share = (params - (base.params - feeds)) / feeds
    _check(base, share, params)

    def scaled(kind: LayerKind) -> LayerKind:
        width = _shared(kind.mlp_width * share)
        edges = kind.adapter_edges + kind.matrices * (width - kind.mlp_width)
        return replace(
            kind, mlp_params=round(kind.mlp_params * share), mlp_width=width, adapter_edges=edges
        )

    return _with_layers(base, scaled)


def _mixture(base: Architecture, params: float, active: float) -> Architecture:
    routed = next(kind for kind in base.layers if kind.experts)
    count = sum(kind.count for kind in base.layers if kind.experts)
    chosen, one = routed.top_k, routed.expert_params / routed.experts
    always = routed.mlp_params - base.hidden * routed.experts  # without the router
    fixed = base.active_params - count * (routed.mlp_params + chosen * one)
    experts, idle = routed.experts, (params - active) / count
    for _ in range(3):  # the router's size moves a little with the number of experts
        visited = (active - fixed) / count - base.hidden * experts
        share = visited / (always + chosen * one)
        _check(base, share, active)
        experts = _divisible(chosen + idle / (share * one))
    held = idle * experts / (experts - chosen)
    rest = (active - fixed) / count - held * chosen / experts
    gained = round((rest - base.hidden * experts - always) / (routed.matrices * base.hidden))

    def scaled(kind: LayerKind) -> LayerKind:
        if not kind.experts:
            return kind
        width = kind.mlp_width and _shared(max(1, kind.mlp_width + gained))
        edges = kind.adapter_edges + kind.matrices * (width - kind.mlp_width)
        return replace(
            kind,
            mlp_params=round(rest),
            mlp_width=width,
            adapter_edges=edges,
            expert_params=round(held),
            experts=experts,
            expert_width=_shared(kind.expert_width * held / experts / one),
        )

    return _with_layers(base, scaled)


def _divisible(experts: float) -> int:
    """At least `experts` but for a thousandth; many of them in sixteens, which devices share."""
    step = 16 if experts >= 64 else 4 if experts >= 16 else 1
    return math.ceil(experts * 0.999 / step) * step


def _shared(width: float) -> int:
    """A width that tensor ranks can share, within a part in sixteen; counts stay as they are."""
    step = max(1, min(256, 1 << int(width / 8).bit_length() - 1)) if width >= 16 else 1
    return max(1, round(width / step)) * step


def _with_layers(base: Architecture, scaled: Callable[[LayerKind], LayerKind]) -> Architecture:
    return replace(base, layers=tuple(scaled(kind) for kind in base.layers))


def _check(base: Architecture, share: float, wanted: float) -> None:
    if share < _LEAST_SHARE:
        raise UsageError(
            f"--params: {base.depth} layers of {base.hidden} leave nothing of {wanted:.3g} active "
            "parameters for the feed-forward parts (expected a smaller --layers or --hidden)"
        )
