"""The arguments of the parts of a layer: the context of a forward pass, and one layer's weights.

Parts are pure functions `part(settings, block, y)` of the normed stream y[B, T, D]. Every matrix
product goes through `Block.project` or `Block.products`, which name the tensors, so that the rules
of the chain (core.ops.product) know which matrix they multiply by.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sabia.core.model.lora import A, B
from sabia.core.ops.base import Angles, Array, Ops, Params, dtype_name
from sabia.core.ops.product import Matrix, Product
from sabia.core.spec.layers import NormKind
from sabia.core.spec.rope import Rope

if TYPE_CHECKING:
    from sabia.core.ops.kv_cache import KVCache

# logical axes of activations, for sharding
STREAM = ("batch", "sequence", "embed")
HEADS = ("batch", "sequence", "heads", "head_dim")
KV_HEADS = ("batch", "sequence", "kv_heads", "head_dim")
WHOLE_KV_HEADS = ("batch", None, "kv_heads", "head_dim")
INNER = ("batch", "sequence", "mlp")
VOCAB = ("batch", "sequence", "vocab")


def stream_norm(
    kind: NormKind, ops: Ops, x: Array, weight: Array, eps: float, offset: float = 0.0
) -> Array:
    """The norm of that kind over x's last axis."""
    if kind == "layer":
        return ops.layer_norm(x, weight, eps)
    return ops.rms_norm(x, weight, eps, offset)


def scaled(x: Array, factor: float, ops: Ops) -> Array:
    """x times a constant in fp32, of x's dtype: bf16 has no 1.4/sqrt(62), for instance."""
    if factor == 1.0:
        return x
    return ops.cast(ops.cast(x, "float32") * factor, dtype_name(x))


@dataclass(frozen=True)
class Queries:
    """The tokens that a layer is computed for, if not for all: at[B, N], with their angles and
    masks."""

    at: Array
    angles: Mapping[Rope, Angles]
    masks: Mapping[int | None, Any]


@dataclass(frozen=True)
class Context:
    """What all layers share in one pass: rotary angles by Rope, masks by window, the cache.

    segments[B, T]: document numbers of packed rows, None if each row is one document.
    slots[B, T], reads: where the cache is written, and how many of its slots attention reads.
    wanted: names of the statistics that parts must return in Block.stats.
    routing: by layer, the experts [B, T, k] that tokens have, numbered from 1, whose gates the
    router gives; 0: those that the router chooses.
    keys[B, S]: the token of each key, if documents of a row share tokens; None: its own.
    queries: of the layer, if it is computed for some tokens only.
    """

    ops: Ops
    eps: float
    angles: Mapping[Rope, Angles]
    masks: Mapping[int | None, Any]
    segments: Array | None = None
    slots: Array | None = None
    cache: "KVCache | None" = None
    reads: int = 0
    wanted: frozenset[str] = frozenset()
    norm_kind: NormKind = "rms"
    routing: Mapping[int, Array] | None = None
    keys: Array | None = None
    queries: Queries | None = None

    @property
    def query_angles(self) -> Mapping[Rope, Angles]:
        """Rotary angles of the queries."""
        return self.angles if self.queries is None else self.queries.angles

    @property
    def query_masks(self) -> Mapping[int | None, Any]:
        """Masks of the queries."""
        return self.masks if self.queries is None else self.queries.masks

    def chosen(self, x: Array) -> Array:
        """x[B, T, …] of the tokens that the layer is computed for, [B, N, …]."""
        return x if self.queries is None else self.ops.tokens_at(x, self.queries.at)

    def of_keys(self, x: Array) -> Array:
        """x[B, T, …] of each key, [B, S, …]."""
        return x if self.keys is None else self.ops.tokens_at(x, self.keys)

    def norm(self, x: Array, weight: Array, offset: float = 0.0) -> Array:
        """x through the kind of norm that the model uses for its residual stream."""
        return stream_norm(self.norm_kind, self.ops, x, weight, self.eps, offset)


@dataclass(frozen=True)
class Block:
    """One layer in one pass: its tensors by short name, their full names, the shared context.

    stats: statistics of a part (router loads, balance losses) by name.
    """

    index: int
    weights: Params
    names: Mapping[str, str]
    context: Context
    stats: dict[str, Array] = field(default_factory=dict)

    @property
    def ops(self) -> Ops:
        """The backend's operations."""
        return self.context.ops

    def project(self, name: str, x: Array) -> Array:
        """x · Wᵀ (+ bias, if the model has one) with the matrix `name`."""
        return self.ops.multiply(Product(x, (self._matrix(name),)))[0]

    def products(self, x: Array, *names: str, plan: object = None) -> list[Array]:
        """`project` with several matrices; with a plan rows[M, in] of experts, each times its
        expert's matrix of the stacks `names`."""
        return self.ops.multiply(Product(x, tuple(map(self._matrix, names)), plan))

    def _matrix(self, name: str) -> Matrix:
        weights, adapter = self.weights, None
        if name + A in weights:
            adapter = self._matrix(name + A), self._matrix(name + B)
        return Matrix(self.names[name], weights[name], weights.get(name + "_bias"), adapter)

    def norm(self, name: str, x: Array, offset: float = 0.0) -> Array:
        """RMSNorm of x's last axis by the vector `name`."""
        return self.ops.rms_norm(x, self.weights[name], self.context.eps, offset)
