"""The two halves of a layer, counted: the token mixer (attention), and the feed-forward layer.

A LayerHalf counts the tensors of one half by class: matrices, routed experts, vectors (norms,
biases). `layer` joins two halves into a LayerKind. The tensors are those that core.spec declares
(`Layer.rows`, which the trainer allocates), or shapes that a reader of a configuration states
(counting.dialects). Equal layers become one LayerKind; counts equal those of `core.spec.model`.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sabia.core.plan.counting.architecture import Architecture, LayerKind
from sabia.core.spec import ModelSpec
from sabia.core.spec import layers as parts
from sabia.core.spec.tensors import TableRow

Shape = tuple[int, int]


@dataclass(frozen=True)
class LayerHalf:
    """One half of a layer; the numbers are elements.

    matrices: active for every token; edges: inputs and outputs of those with LoRA adapters.
    experts: matrices of all routed experts. sizes: fields of LayerKind that this half sets.
    """

    matrices: int = 0
    vectors: int = 0
    edges: int = 0
    experts: int = 0
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def __add__(self, other: "LayerHalf") -> "LayerHalf":
        counts = ("matrices", "vectors", "edges", "experts")
        sums = {name: getattr(self, name) + getattr(other, name) for name in counts}
        return LayerHalf(**sums, sizes={**self.sizes, **other.sizes})

    def with_sizes(self, **sizes: object) -> "LayerHalf":
        """The LayerHalf with further fields of its LayerKind."""
        return replace(self, sizes={**self.sizes, **sizes})


def of_rows(rows: Iterable[TableRow], sizes: Mapping[str, Any]) -> LayerHalf:
    """The LayerHalf of tensors that core.spec declares."""
    rows = tuple(rows)
    inner = [row for row in rows if len(row.shape) > 1]
    experts = elements(row for row in inner if row.axes[0] == "expert")
    # as core.model.lora: matrices that are active for every token, without routers
    adapted = [row for row in inner if len(row.shape) == 2 and row.init == "normal"]
    edges = sum(sum(row.shape) for row in adapted if row.component in ("attention", "mlp"))
    matrices = elements(inner)
    return LayerHalf(matrices - experts, elements(rows) - matrices, edges, experts, sizes)


def of_shapes(
    adapted: Iterable[Shape], *, others: Iterable[Shape] = (), vectors: int = 0, **sizes: object,
) -> LayerHalf:  # fmt: skip
    """The LayerHalf of matrices [out, in]; others: those without an adapter (router, conv)."""
    adapted = tuple(adapted)
    matrices = sum(math.prod(shape) for shape in (*adapted, *others))
    return LayerHalf(matrices, vectors, sum(map(sum, adapted)), sizes=sizes)


MIXER_SIZES = ("heads", "kv_heads", "query_width", "key_width", "value_width")


def mixer_sizes(*sizes: int) -> dict[str, Any]:
    """Heads of a mixer, and the widths of all its queries, keys and values: MIXER_SIZES."""
    return dict(zip(MIXER_SIZES, sizes, strict=True))


def layer(mixer: LayerHalf, feed: LayerHalf, vectors: int, norms: int = 2) -> LayerKind:
    """One layer (count 1) of both halves; vectors: elements of the `norms` around them."""
    return LayerKind(
        count=1,
        mixer_params=mixer.matrices,
        mlp_params=feed.matrices,
        vector_params=mixer.vectors + feed.vectors + vectors,
        expert_params=mixer.experts + feed.experts,
        adapter_edges=mixer.edges + feed.edges,
        stream_norms=norms,
        **{**mixer.sizes, **feed.sizes},
    )


def elements(rows: Iterable[TableRow]) -> int:
    """Elements of all tensors together."""
    return sum(math.prod(row.shape) for row in rows)


def merged(kinds: Iterable[LayerKind]) -> tuple[LayerKind, ...]:
    """Equal kinds as one with their counts added, in the order of their first layers."""
    counts: Counter[LayerKind] = Counter()
    for kind in kinds:
        counts[replace(kind, count=1)] += kind.count
    return tuple(replace(kind, count=count) for kind, count in counts.items())


def from_spec(model: ModelSpec) -> Architecture:
    """The Architecture of a ModelSpec; UsageError for a classifier."""
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


def layer_kind(one: parts.Layer, hidden: int) -> LayerKind:
    """One layer (count 1) with a residual stream of width `hidden`."""
    around = [one.norms.rows(part, hidden) for part in ("attn", "mlp")]
    norms = [row for before, behind in around for row in (*before, *behind)]
    halves = mixer_block(one.mixer, hidden), feed_block(one.mlp, hidden)
    return layer(*halves, elements(norms), norms=len(norms))


def mixer_block(mixer: parts.Mixer, hidden: int) -> LayerHalf:
    """Attention or a recurrent mixer."""
    if isinstance(mixer, parts.GatedDeltaNet):
        return of_rows(mixer.rows(hidden), _delta_sizes(mixer))
    return of_rows(mixer.rows(hidden), _attention_sizes(mixer))


def feed_block(feed: parts.FeedForward, hidden: int) -> LayerHalf:
    """A dense MLP, or experts with their router."""
    if isinstance(feed, parts.Experts):
        sizes = {"experts": feed.router.experts, "top_k": feed.router.top_k}
        sizes |= {"expert_width": feed.width, "mlp_width": feed.shared}
    else:
        assert isinstance(feed, parts.GatedMlp)
        sizes = {"mlp_width": feed.width}
    return of_rows(feed.rows(hidden), sizes)


def _attention_sizes(mixer: parts.Attention | parts.LatentAttention) -> dict[str, object]:
    cached = sum(heads * size for heads, size in mixer.cache_shapes().values())
    sizes: dict[str, Any] = {"window": mixer.window, "cache_width": cached}
    sizes["score_width"] = mixer.score_width()
    if isinstance(mixer, parts.LatentAttention):
        keys, values = mixer.heads * mixer.key_dim, mixer.heads * mixer.value_dim
        sizes |= mixer_sizes(mixer.heads, mixer.heads, keys, keys, values)
        return sizes | {"query_latent": mixer.q_rank or 0, "key_latent": mixer.kv_rank}
    queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    sizes |= mixer_sizes(mixer.heads, mixer.kv_heads, queries, keys, keys)
    normed = mixer.qk_norm or mixer.qk_norm_whole
    return sizes | {"sinks": mixer.sinks, "head_normed": normed * (queries + keys)}


def _delta_sizes(mixer: parts.GatedDeltaNet) -> dict[str, object]:
    """A delta net's state for decoding: its matrices, and the last inputs of its convolution."""
    keys, values = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
    state = mixer.value_heads * mixer.key_dim * mixer.value_dim
    state += (mixer.taps - 1) * (2 * keys + values)
    sizes = mixer_sizes(mixer.value_heads, mixer.key_heads, keys, keys, values)
    return {**sizes, "state_products": mixer.state_products(), "state_width": state}
