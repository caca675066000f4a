"""The planner's Architecture of a model that the model core knows, from the same table of tensors.

A layer's tensors (`Layer.rows`) are what the trainer allocates; here they are only sorted: matrices
of the mixer, matrices of what every token visits, routed experts, vectors. Equal layers become one
LayerKind, so counts are those of `core.spec.count` to the element.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sabia.core.plan.counting.architecture import Architecture, LayerKind
from sabia.core.spec import ModelSpec, from_config
from sabia.core.spec.delta import GatedDeltaNet
from sabia.core.spec.experts import Experts
from sabia.core.spec.families import read_config
from sabia.core.spec.latent import LatentAttention
from sabia.core.spec.layers import Attention, FeedForward, GatedMlp, Layer, Mixer
from sabia.core.spec.tensors import Row


def architecture_of(path: str | Path) -> Architecture:
    """The model of the config.json at `path`, or in that directory.

    Raises UsageError naming the field that is missing, wrong or not counted; BadData where the
    file is not JSON.
    """
    return from_spec(from_config(read_config(path)))


def from_spec(model: ModelSpec) -> Architecture:
    """The Architecture of a model of the model core; UsageError for a classifier."""
    if model.classifier is not None:
        _ = model.head_name  # raises: there is no vocabulary to predict
    outer = [row for rows in model.outer_rows() for row in rows]
    embedding = _elements(row for row in outer if row.name == "embed")
    head = _elements(row for row in outer if row.name == "head")
    return Architecture(
        name=model.family,
        hidden=model.hidden_size,
        vocab=model.vocab_size,
        layers=_kinds(model),
        embedding_params=embedding,
        head_params=head,
        other_params=_elements(outer) - embedding - head,
        causal=model.causal,
    )


def _kinds(model: ModelSpec) -> tuple[LayerKind, ...]:
    alike: Counter[LayerKind] = Counter()
    for layer, count in Counter(model.layers).items():
        alike[layer_kind(layer, model.hidden_size)] += count
    return tuple(replace(kind, count=count) for kind, count in alike.items())


def layer_kind(layer: Layer, hidden: int) -> LayerKind:
    """One layer (count 1) of a residual stream of `hidden`."""
    mixer = [row for row in layer.mixer.rows(hidden) if len(row.shape) > 1]
    feed = [row for row in layer.mlp.rows(hidden) if len(row.shape) > 1]
    routed = [row for row in feed if row.axes[0] == "expert"]
    visited = _elements(feed) - _elements(routed)
    adapted = [row for row in mixer + feed if _takes_adapter(row)]
    return LayerKind(
        count=1,
        mixer_params=_elements(mixer),
        mlp_params=visited,
        vector_params=_elements(row for row in layer.rows(hidden) if len(row.shape) == 1),
        expert_params=_elements(routed),
        adapter_edges=sum(sum(row.shape) for row in adapted),
        **_mixing(layer.mixer),
        **_feeding(layer.mlp),
    )


def _elements(rows: Iterable[Row]) -> int:
    return sum(math.prod(row.shape) for row in rows)


def _takes_adapter(row: Row) -> bool:
    """As core.model.lora: matrices that multiply every token, routers left out."""
    return len(row.shape) == 2 and row.init == "normal" and row.component in ("attention", "mlp")


def _mixing(mixer: Mixer) -> dict[str, Any]:
    if isinstance(mixer, GatedDeltaNet):
        return _delta_sizes(mixer)
    cached = sum(heads * size for heads, size in mixer.cache_shapes().values())
    found = {"heads": mixer.heads, "score_width": mixer.score_width(), "cache_width": cached}
    return found | {"window": mixer.window} | _attention_sizes(mixer)


def _attention_sizes(mixer: Attention | LatentAttention) -> dict[str, int]:
    if isinstance(mixer, LatentAttention):
        keys, values = mixer.heads * mixer.key_dim, mixer.heads * mixer.value_dim
        widths = {"query_width": keys, "key_width": keys, "value_width": values}
        return widths | {"kv_heads": mixer.heads}
    keys = mixer.kv_heads * mixer.head_dim
    widths = {"query_width": mixer.heads * mixer.head_dim, "key_width": keys, "value_width": keys}
    return widths | {"kv_heads": mixer.kv_heads}


def _delta_sizes(mixer: GatedDeltaNet) -> dict[str, int]:
    """What decoding keeps of a delta net: its state, and the inputs of its convolution's taps."""
    keys, values = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
    state = mixer.value_heads * mixer.key_dim * mixer.value_dim
    return {
        "heads": mixer.value_heads,
        "kv_heads": mixer.key_heads,
        "query_width": keys,
        "key_width": keys,
        "value_width": values,
        "score_width": 0,
        "cache_width": 0,
        "state_products": mixer.state_products(),
        "state_width": state + (mixer.taps - 1) * (2 * keys + values),
    }


def _feeding(feed: FeedForward) -> dict[str, int]:
    if isinstance(feed, Experts):
        chosen = {"experts": feed.router.experts, "top_k": feed.router.chosen}
        return chosen | {"expert_width": feed.width, "mlp_width": feed.shared}
    if not isinstance(feed, GatedMlp):
        raise TypeError(f"{type(feed).__name__} has no sizes here")
    return {"mlp_width": feed.width}
