"""A model as the planner sees it: kinds of layers and how many of each, with their sizes.

Memory, time, layout and serving formulas read nothing but this. It comes from the model core's own
table (a config.json of a family that trains here), from the generic counter (other families), or
from bare counts with a published model's depth and width (then `assumed` says so).
"""

from dataclasses import dataclass

from sabia.core.plan.elementwise import Number, smaller


@dataclass(frozen=True)
class Sparse:
    """Attention to `local` keys as they are and to others merged, `pooled` tokens into one.

    chosen: most of the merged keys that a query sees (None: all); index_width: multiply-adds per
    (query, merged key) pair by which they are chosen. DeepSeek-V3.2's has pooled 1 and no local.
    """

    local: int = 0
    pooled: int = 1
    chosen: int | None = None
    index_width: int = 0


@dataclass(frozen=True)
class LayerKind:
    """`count` layers that are alike. Parameters are elements, of one layer.

    mixer_params: projections of attention (or of a recurrent mixer). mlp_params: what every token
    visits of the feed-forward part: a dense MLP, or shared experts and the router's matrix.
    expert_params: all routed experts together (0 in a dense layer); a token visits
    top_k / experts of them. vector_params: norms and biases.

    query_width, key_width, value_width: elements of all queries, keys and values of a token, as
    attention multiplies them (a latent attention's after the upward projection). score_width:
    multiply-adds per (query, key) pair over both products, all heads. window: most keys that a
    query sees (None: all before it); sparse: where it chooses among keys; `keys` counts both.
    state_products: multiply-adds a token of a recurrent state.
    cache_width: elements that decoding keeps of each token; state_width: elements kept once a
    sequence, whatever its length.
    mlp_width, expert_width: inner widths of the dense (or shared) part and of one routed expert;
    matrices: 3 where these are gated, else 2. adapter_edges: inputs and outputs together of the
    matrices that LoRA gives adapters to (a rank-r adapter has r of each): all that every token
    multiplies, but the router.
    stream_norms: norms of the residual stream's width. head_normed: elements of queries and keys
    normed besides; query_latent, key_latent: widths of a latent attention's normed latents.
    """

    count: int
    mixer_params: int
    mlp_params: int
    vector_params: int
    heads: int
    kv_heads: int
    query_width: int
    key_width: int
    value_width: int
    score_width: int
    cache_width: int
    mlp_width: int
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

    @property
    def attended_width(self) -> int:
        """Elements of a token that attention, or a recurrent state, gives to the output matrix."""
        return self.score_width - self.query_width if self.score_width else self.value_width

    def keys(self, sequence: Number, sides: int = 1) -> Number:
        """Keys that a query sees, those behind the mask counted too; sides 2: in an encoder."""
        if self.sparse is None:
            return smaller(sequence, sides * (self.window or sequence))
        merged = sequence / self.sparse.pooled
        found = self.sparse.local + smaller(merged, self.sparse.chosen or merged)
        return smaller(sequence, found)

    def index_products(self, sequence: Number) -> Number:
        """Multiply-adds a token by which it chooses its keys; 0 where it sees all."""
        return self.sparse.index_width * sequence / self.sparse.pooled if self.sparse else 0

    def score_products(self, sequence: Number, sides: int = 1) -> Number:
        """Multiply-adds a token with its `keys`, and of choosing them; nothing is masked."""
        return self.keys(sequence, sides) * self.score_width + self.index_products(sequence)

    @property
    def params(self) -> int:
        """Everything in one layer."""
        return self.mixer_params + self.mlp_params + self.vector_params + self.expert_params

    @property
    def active_expert_params(self) -> float:
        """Elements of the routed experts that one token visits."""
        return self.expert_params * self.top_k / self.experts if self.experts else 0

    @property
    def matmul_params(self) -> float:
        """Matrix elements that a token is multiplied with."""
        return self.mixer_params + self.mlp_params + self.active_expert_params


@dataclass(frozen=True)
class Architecture:
    """A model that predicts tokens: embedding, layers, head. Parameters are elements.

    embedding_params: lookup tables (tokens; learned positions). head_params: the projection to the
    vocabulary, 0 where tied. other_params: final norm and what belongs to no layer.
    extra: layers of multi-token prediction, trained beside the model, each with one more pass
    through the head; extra_params: their joining projections and norms.
    causal: tokens see only what is before them (an encoder's see both sides, windows too).
    counted_only: a family that can be counted here and not trained.
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
        """Layers of the model itself."""
        return sum(kind.count for kind in self.layers)

    @property
    def params(self) -> int:
        """All parameters, multi-token prediction included; tied ones once."""
        own = sum(kind.count * kind.params for kind in (*self.layers, *self.extra))
        outer = self.embedding_params + self.head_params + self.other_params
        return own + outer + self.extra_params

    @property
    def expert_params(self) -> int:
        """Routed experts of all layers."""
        return sum(kind.count * kind.expert_params for kind in (*self.layers, *self.extra))

    @property
    def active_params(self) -> float:
        """Parameters that one token visits, without the layers of multi-token prediction."""
        idle = sum(k.count * (k.expert_params - k.active_expert_params) for k in self.layers)
        own = sum(kind.count * kind.params for kind in self.layers)
        return own - idle + self.embedding_params + self.head_params + self.other_params

    @property
    def matmul_params(self) -> float:
        """Active matrix elements without the input lookup; the head always counts."""
        passes = 1 + sum(kind.count for kind in self.extra)
        own = sum(kind.count * kind.matmul_params for kind in (*self.layers, *self.extra))
        return own + passes * self.vocab * self.hidden + self.extra_params
