"""The planner's description of a model: kinds of layers, the number of each, and their sizes.

All formulas of memory, time, layouts and serving use only this. It is made from the tensors of
core.spec (families that train here), from a reader of the configuration (other families, see
counting.known), or from parameter counts with a published model's depth and width (`assumed`).
"""

from dataclasses import dataclass

from sabia.core.plan.elementwise import Number, smaller


@dataclass(frozen=True)
class Sparse:
    """Sparse attention: to the last `local` keys, and to keys compressed from `pooled` tokens each.

    chosen: top-k of the compressed keys that a query attends to (None: all). index_width:
    multiply-adds per (query, compressed key) pair of the indexer. DeepSeek-V3.2: pooled 1, local 0.
    """

    local: int = 0
    pooled: int = 1
    chosen: int | None = None
    index_width: int = 0


@dataclass(frozen=True)
class LayerKind:
    """`count` equal layers. Parameters are elements of one layer.

    mixer_params: projections of attention (or of a recurrent mixer). mlp_params: the part of the
    feed-forward layer that is active for every token: a dense MLP, or shared experts and the
    router's matrix. expert_params: all routed experts together (0 in a dense layer), of which
    top_k / experts are active for a token. vector_params: norms and biases.

    query_width, key_width, value_width: elements of all queries, keys and values of a token, as
    attention multiplies them (with latent attention after the up-projection). score_width:
    multiply-adds per (query, key) pair over both products, all heads. window: sliding window (None:
    all previous keys); sparse: sparse attention; `keys` counts both. state_products: multiply-adds
    per token of a recurrent state. cache_width: elements of the KV cache per token; state_width:
    elements that decoding keeps once per sequence, whatever its length.
    mlp_width, expert_width: inner widths of the dense (or shared) part and of one routed expert;
    matrices: 3 where these are gated, else 2. adapter_edges: sum of inputs and outputs of the
    matrices with LoRA adapters (rank r adds r parameters for each): all matrices that are active
    for every token, except the router.
    stream_norms: norms of the residual stream. head_normed: elements of queries and keys with a
    norm; query_latent, key_latent: widths of the latents of latent attention. sinks: each head has
    a learned score in the softmax, without a value.
    """

    count: int
    mixer_params: int
    mlp_params: int
    vector_params: int
    heads: int = 0
    kv_heads: int = 0
    query_width: int = 0
    key_width: int = 0
    value_width: int = 0
    score_width: int = 0
    cache_width: int = 0
    mlp_width: int = 0
    expert_params: int = 0
    experts: int = 0
    top_k: int = 0
    expert_width: int = 0
    matrices: int = 3
    window: int | None = None
    state_products: int = 0
    state_width: int = 0
    adapter_edges: int = 0
    sparse: Sparse | None = None
    stream_norms: int = 2
    head_normed: int = 0
    query_latent: int = 0
    key_latent: int = 0
    sinks: bool = False

    @property
    def attended_width(self) -> int:
        """Input width of the output projection: results of attention, or of a recurrent state."""
        return self.score_width - self.query_width if self.score_width else self.value_width

    def keys(self, sequence: Number, sides: int = 1) -> Number:
        """Keys per query, masked ones included; sides: 2 in an encoder (both directions)."""
        if self.sparse is None:
            return smaller(sequence, sides * (self.window or sequence))
        merged = sequence / self.sparse.pooled
        return smaller(sequence, self.sparse.local + smaller(merged, self.sparse.chosen or merged))

    def score_products(self, sequence: Number, sides: int = 1) -> Number:
        """Multiply-adds per token of attention with its `keys`, and of the indexer; no mask."""
        index = self.sparse.index_width * sequence / self.sparse.pooled if self.sparse else 0
        return self.keys(sequence, sides) * self.score_width + index

    @property
    def params(self) -> int:
        """All parameters of one layer."""
        return self.mixer_params + self.mlp_params + self.vector_params + self.expert_params

    @property
    def active_expert_params(self) -> float:
        """Elements of the routed experts that are active for a token."""
        return self.expert_params * self.top_k / self.experts if self.experts else 0

    @property
    def matmul_params(self) -> float:
        """Active matrix elements."""
        return self.mixer_params + self.mlp_params + self.active_expert_params


@dataclass(frozen=True)
class Architecture:
    """A language model: embedding, layers, head. Parameters are elements.

    embedding_params: lookup tables (tokens; learned positions). head_params: the projection to the
    vocabulary, 0 where tied. other_params: the final norm and other tensors outside the layers.
    extra: multi-token prediction (MTP) layers, each with one more pass through the head;
    extra_params: their input projections and norms. causal: False for an encoder (bidirectional).
    counted_only: a family that can be counted here but not trained.
    """

    name: str
    hidden: int
    vocab: int
    layers: tuple[LayerKind, ...]
    embedding_params: int
    head_params: int
    other_params: int
    extra: tuple[LayerKind, ...] = ()
    extra_params: int = 0
    assumed: bool = False
    causal: bool = True
    counted_only: bool = False

    @property
    def depth(self) -> int:
        """Number of layers, without MTP."""
        return sum(kind.count for kind in self.layers)

    @property
    def params(self) -> int:
        """All parameters, with MTP; tied ones once."""
        own = sum(kind.count * kind.params for kind in (*self.layers, *self.extra))
        outer = self.embedding_params + self.head_params + self.other_params
        return own + outer + self.extra_params

    @property
    def expert_params(self) -> int:
        """Routed experts of all layers."""
        return sum(kind.count * kind.expert_params for kind in (*self.layers, *self.extra))

    @property
    def active_params(self) -> float:
        """Active parameters per token, without MTP."""
        idle = sum(k.count * (k.expert_params - k.active_expert_params) for k in self.layers)
        own = sum(kind.count * kind.params for kind in self.layers)
        return own - idle + self.embedding_params + self.head_params + self.other_params

    @property
    def matmul_params(self) -> float:
        """Active matrix elements with MTP, without the input lookup; the head always counts."""
        passes = 1 + sum(kind.count for kind in self.extra)
        own = sum(kind.count * kind.matmul_params for kind in (*self.layers, *self.extra))
        return own + passes * self.vocab * self.hidden + self.extra_params
