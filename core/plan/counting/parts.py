"""The model core's models and parts of layers as the planner's Architecture and Blocks.

A layer's tensors (`Layer.rows`) are what the trainer allocates; here they are only sorted. Equal
layers become one LayerKind, so counts are those of `core.spec.count` to the element.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

from sabia.core.plan.counting.architecture import Architecture, LayerKind
from sabia.core.plan.counting.blocks import Block, elements, layer, merged, of_rows
from sabia.core.spec import ModelSpec
from sabia.core.spec.delta import GatedDeltaNet
from sabia.core.spec.experts import Experts
from sabia.core.spec.latent import LatentAttention
from sabia.core.spec.layers import Attention, FeedForward, GatedMlp, Layer, Mixer


def from_spec(model: ModelSpec) -> Architecture:
    """The Architecture of a model of the model core; UsageError for a classifier."""
    if model.classifier is not None:
        _ = model.head_name  # raises: there is no vocabulary to predict
    outer = [row for rows in model.outer_rows() for row in rows]
    embedding = elements(row for row in outer if row.name == "embed")
    head = elements(row for row in outer if row.name == "head")
    alike = Counter(model.layers).items()
    kinds = (replace(layer_kind(one, model.hidden_size), count=count) for one, count in alike)
    return Architecture(
        name=model.family,
        hidden=model.hidden_size,
        vocab=model.vocab_size,
        layers=merged(kinds),
        embedding_params=embedding,
        head_params=head,
        other_params=elements(outer) - embedding - head,
        causal=model.causal,
    )


def layer_kind(one: Layer, hidden: int) -> LayerKind:
    """One layer (count 1) of a residual stream of `hidden`."""
    around = [one.norms.rows(part, hidden) for part in ("attn", "mlp")]
    norms = [row for before, behind in around for row in (*before, *behind)]
    halves = mixer_block(one.mixer, hidden), feed_block(one.mlp, hidden)
    return layer(*halves, elements(norms), norms=len(norms))


def mixer_block(mixer: Mixer, hidden: int) -> Block:
    """Attention or a recurrent mixer."""
    return of_rows(mixer.rows(hidden), _mixing(mixer))


def feed_block(feed: FeedForward, hidden: int) -> Block:
    """A dense MLP or a mixture of experts."""
    return of_rows(feed.rows(hidden), _feeding(feed))


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
        latents = {"query_latent": mixer.q_rank or 0, "key_latent": mixer.kv_rank}
        return widths | latents | {"kv_heads": mixer.heads}
    queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    widths = {"query_width": queries, "key_width": keys, "value_width": keys}
    if mixer.qk_norm or mixer.qk_norm_whole:
        widths["head_normed"] = queries + keys
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
