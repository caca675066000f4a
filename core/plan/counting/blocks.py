"""The halves of a layer, counted: what mixes tokens, and what each token passes alone.

A Block sorts the tensors of one half: matrices that a token is multiplied with, routed experts, of
which it meets some, vectors (norms, biases). `layer` joins two halves into a LayerKind. Blocks are
of the model core's rows (counting.parts) or of shapes that a dialect states (counting.dialects).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.spec.tensors import Row

Shape = tuple[int, int]
_IDLE = dict.fromkeys(("heads", "kv_heads", "query_width", "key_width", "value_width"), 0)
_IDLE |= dict.fromkeys(("score_width", "cache_width", "mlp_width"), 0)


@dataclass(frozen=True)
class Block:
    """One half of a layer; the numbers are elements.

    matrices: met by every token; edges: inputs and outputs of those that take LoRA's adapters.
    experts: matrices of all routed experts. sizes: the LayerKind's fields that this half sets.
    """

    matrices: int = 0
    vectors: int = 0
    edges: int = 0
    experts: int = 0
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def __add__(self, other: "Block") -> "Block":
        return Block(
            self.matrices + other.matrices,
            self.vectors + other.vectors,
            self.edges + other.edges,
            self.experts + other.experts,
            {**self.sizes, **other.sizes},
        )


def of_rows(rows: Iterable[Row], sizes: Mapping[str, Any]) -> Block:
    """The Block of tensors that the model core declares."""
    rows = tuple(rows)
    inner = [row for row in rows if len(row.shape) > 1]
    routed = [row for row in inner if row.axes[0] == "expert"]
    adapted = [row for row in inner if _takes_adapter(row)]
    experts = elements(routed)
    return Block(
        matrices=elements(inner) - experts,
        vectors=elements(rows) - elements(inner),
        edges=sum(sum(row.shape) for row in adapted),
        experts=experts,
        sizes=sizes,
    )


def of_shapes(
    adapted: Iterable[Shape],
    *,
    others: Iterable[Shape] = (),
    vectors: int = 0,
    **sizes: Any,
) -> Block:
    """The Block of matrices [out, in]; others: those that take no adapter (routers, taps)."""
    adapted = tuple(adapted)
    matrices = sum(math.prod(shape) for shape in (*adapted, *others))
    return Block(matrices, vectors, sum(map(sum, adapted)), sizes=sizes)


def with_sizes(block: Block, **sizes: Any) -> Block:
    """The Block with other fields of its LayerKind."""
    return replace(block, sizes={**block.sizes, **sizes})


def layer(mixer: Block, feed: Block, vectors: int, norms: int = 2) -> LayerKind:
    """One layer (count 1) of both halves; vectors: elements of the `norms` around them."""
    return LayerKind(
        count=1,
        mixer_params=mixer.matrices,
        mlp_params=feed.matrices,
        vector_params=mixer.vectors + feed.vectors + vectors,
        expert_params=mixer.experts + feed.experts,
        adapter_edges=mixer.edges + feed.edges,
        stream_norms=norms,
        **_IDLE | dict(mixer.sizes) | dict(feed.sizes),
    )


def elements(rows: Iterable[Row]) -> int:
    """Elements of all tensors together."""
    return sum(math.prod(row.shape) for row in rows)


def _takes_adapter(row: Row) -> bool:
    """As core.model.lora: matrices that multiply every token, routers left out."""
    return len(row.shape) == 2 and row.init == "normal" and row.component in ("attention", "mlp")


def merged(kinds: Iterable[LayerKind]) -> tuple[LayerKind, ...]:
    """Equal kinds as one, with their counts added, in the order of their first layers."""
    counts: dict[LayerKind, int] = {}
    for kind in kinds:
        alike = replace(kind, count=1)
        counts[alike] = counts.get(alike, 0) + kind.count
    return tuple(replace(kind, count=count) for kind, count in counts.items())
