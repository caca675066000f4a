"""The parts of layers, as data, and the tensors of each part.

A layer is a mixer (attention, a delta net) followed by a feed-forward part, each with norms before,
after or both, and added to the residual stream. A part's tensor names are relative to its layer;
`core/model` computes each part in the function registered for its class. Every family is a
composition of these parts.

The gated delta net: linear attention with a decayed and corrected state (arXiv 2412.06464). Per
value head a state S[N, V] is decayed, corrected towards v at key k, and read with query q: S ← α·S;
S ← S + k·(β·(v - Sᵀk))ᵀ; o = Sᵀq, with α = exp(-exp(a_log)·softplus(decay(y) + dt_bias)) and β =
sigmoid(beta(y)). q, k, v pass a short causal convolution over time and SiLU; q and k have unit
length. The result is normalized per head, gated by SiLU(z(y)) and projected.

Each key head is shared by value_heads / key_heads consecutive value heads. All tensors with an
entry per head, also those of key heads, have the axis "heads", so that all are split in the same
way: the size of a mesh axis must divide the key heads.

Multi-head latent attention: keys and values of all heads come from one latent per token.
DeepSeek-V2 and V3 (arXiv 2405.04434 section 2.1, 2412.19437 section 2.1.1). y is projected down to
a latent of `kv_rank`, which is normalized and projected up to each head's unrotated key and value.
A rotated key of rope.dim dimensions is computed from y and shared by all heads. Queries may
use a latent of `q_rank` in the same way. Only latent and rotated key are cached.

MoE layers: a router that selects experts for each token, and the experts. Kinds of router:
`softmax` over all experts (Switch, arXiv 2101.03961; Mixtral, Qwen3), `softmax_top_k` over the
selected ones only (GPT-OSS), `sigmoid` (DeepSeek-V3, arXiv 2412.19437 section 2.1.2). Experts are
stacked in one tensor per projection, [experts, out, in], so that the sharding rules have an expert
axis; the files have one name per expert or a fused tensor.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from sabia.core.errors import UsageError
from sabia.core.spec.rope import Rope
from sabia.core.spec.tensors import Component, InitKind, TableRow


def _output(name: str, width: int, size: int, axis: str, component: Component) -> TableRow:
    """The matrix by which a part adds to a residual stream of `width`."""
    return TableRow(name, (width, size), ("embed", axis), component, residual_output=True)


@dataclass(frozen=True)
class GatedDeltaNet:
    """The sizes of a gated delta net; `taps` is the length of its convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise UsageError(
                f"delta net: {self.value_heads} value heads, {self.key_heads} key heads "
                "(expected key heads that divide value heads)"
            )

    def rows(self, width: int) -> tuple[TableRow, ...]:
        """Tensors for a residual stream of `width`."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        outs = {"q": keys, "k": keys, "v": values, "z": values}
        outs |= {"decay": self.value_heads, "beta": self.value_heads}
        matrices = [
            TableRow(f"delta.{name}", (size, width), ("heads", "embed"), "attention")
            for name, size in outs.items()
        ]
        taps = [
            TableRow(f"delta.conv_{x}", (outs[x], self.taps), ("heads", "taps"), "conv", "fan_in")
            for x in "qkv"
        ]
        per_head: tuple[Any, Any, Any] = ((self.value_heads,), ("heads",), "attention")
        return (
            *matrices,
            *taps,
            TableRow("delta.a_log", *per_head, "rate"),
            TableRow("delta.dt_bias", *per_head, "step"),
            TableRow("delta.norm", (self.value_dim,), ("head_dim",), "norm", "ones"),
            _output("delta.o", width, values, "heads", "attention"),
        )

    def split_units(self) -> dict[str, int]:
        """Units of a logical axis that are never split over devices: key heads."""
        return {"heads": self.key_heads}

    def state_products(self) -> int:
        """Multiply-adds per token with the state: predict, correct, read."""
        return 3 * self.value_heads * self.key_dim * self.value_dim

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """What the tokens so far leave to the next ones, by name, without the rows: the last inputs
        of the convolutions, and the state."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        inputs = dict.fromkeys("qk", (self.taps - 1, keys)) | {"v": (self.taps - 1, values)}
        return {**inputs, "state": (self.value_heads, self.key_dim, self.value_dim)}


@dataclass(frozen=True)
class LatentAttention:
    """The sizes of multi-head latent attention.

    nope_dim: dimensions of a head's query and key without rotation (qk_nope_head_dim); rope.dim
    rotated ones follow.
    interleaved: rotated pairs are (2i, 2i + 1) in the weights, not (i, i + N/2).
    bias: of the downward projections and the output. latent_eps: of the latents' norms.
    """

    heads: int
    nope_dim: int
    value_dim: int
    kv_rank: int
    q_rank: int | None
    scale: float
    rope: Rope
    interleaved: bool = True
    bias: bool = False
    latent_eps: float = 1e-6
    window: int | None = None

    @property
    def key_dim(self) -> int:
        """Size of a head's query and key."""
        return self.nope_dim + self.rope.dim

    def rows(self, width: int) -> tuple[TableRow, ...]:
        """Tensors for a residual stream of `width`."""
        latent, values = self.kv_rank + self.rope.dim, self.heads * self.value_dim
        up = self.heads * (self.nope_dim + self.value_dim)
        queries = self.heads * self.key_dim
        if self.q_rank is None:
            rows = [TableRow("attn.q", (queries, width), ("heads", "embed"), "attention")]
        else:
            rows = self._down_rows("q", self.q_rank, width)
            rows += [
                TableRow("attn.q_norm", (self.q_rank,), ("latent",), "norm", "ones"),
                TableRow("attn.q_up", (queries, self.q_rank), ("heads", "latent"), "attention"),
            ]
        rows += [
            *self._down_rows("kv", latent, width),
            TableRow("attn.kv_norm", (self.kv_rank,), ("latent",), "norm", "ones"),
            TableRow("attn.kv_up", (up, self.kv_rank), ("heads", "latent"), "attention"),
            _output("attn.o", width, values, "heads", "attention"),
        ]
        if self.bias:
            rows.append(TableRow("attn.o_bias", (width,), ("embed",), "attention", "zeros"))
        return tuple(rows)

    def _down_rows(self, name: str, size: int, width: int) -> list[TableRow]:
        row = TableRow(f"attn.{name}_down", (size, width), ("latent", "embed"), "attention")
        bias = TableRow(f"attn.{name}_down_bias", (size,), ("latent",), "attention", "zeros")
        return [row, *[bias] * self.bias]

    def score_width(self) -> int:
        """Multiply-adds per (query, key) pair over both products, summed over heads."""
        return self.heads * (self.key_dim + self.value_dim)

    def split_units(self) -> dict[str, int]:
        """Units of a logical axis that are never split over devices: whole heads."""
        return {"heads": self.heads}

    def cache_shapes(self) -> dict[str, tuple[int, int]]:
        """(heads, size) of the tensors that decoding caches for each token."""
        return {"latent": (1, self.kv_rank), "rotated": (1, self.rope.dim)}


Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]
NormKind = Literal["rms", "layer"]


@dataclass(frozen=True)
class Attention:
    """Softmax attention with grouped keys and values.

    window: a query attends to the last `window` positions, including its own (None: all); in an
    encoder to positions that are less than `window` away on either side.
    scale: factor of the scores; head_dim**-0.5 in most families.
    rope: rotates the first rope.dim dimensions of each head; None: no rotation.
    qk_norm: RMSNorm of each head's query and key; qk_norm_whole: one norm over all heads;
    norm_offset: added to the stored weights of these norms.
    sinks: each head has an additional score in the softmax, without a value (GPT-OSS).
    output_gate: the result is multiplied by sigmoid(gate(y)) before the output projection.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    norm_offset: float = 0.0
    output_gate: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def rows(self, width: int) -> tuple[TableRow, ...]:
        """Tensors for a residual stream of `width`."""
        n, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        inputs = (("q", n, "heads"), ("k", kv, "kv_heads"), ("v", kv, "kv_heads"))
        rows = [
            TableRow(f"attn.{name}", (size, width), (axis, "embed"), "attention")
            for name, size, axis in inputs
        ]
        if self.qkv_bias:
            rows += [
                TableRow(f"attn.{name}_bias", (size,), (axis,), "attention", "zeros")
                for name, size, axis in inputs
            ]
        if self.output_gate:
            rows.append(TableRow("attn.gate", (n, width), ("heads", "embed"), "attention"))
        if self.output_gate and self.qkv_bias:
            rows.append(TableRow("attn.gate_bias", (n,), ("heads",), "attention", "zeros"))
        if self.sinks:
            rows.append(TableRow("attn.sinks", (self.heads,), ("heads",), "attention", "zeros"))
        init: InitKind = "zeros" if self.norm_offset else "ones"
        norms: list[tuple[str, int, str]] = []
        if self.qk_norm_whole:
            norms = [("q", self.heads, "heads"), ("k", self.kv_heads, "kv_heads")]
        elif self.qk_norm:
            norms = [("q", 1, "head_dim"), ("k", 1, "head_dim")]
        for name, heads, axis in norms:
            size = (heads * self.head_dim,)
            rows.append(TableRow(f"attn.{name}_norm", size, (axis,), "norm", init))
        rows.append(_output("attn.o", width, n, "heads", "attention"))
        if self.output_bias:
            rows.append(TableRow("attn.o_bias", (width,), ("embed",), "attention", "zeros"))
        return tuple(rows)

    def score_width(self) -> int:
        """Multiply-adds per (query, key) pair over both products, summed over heads."""
        return 2 * self.heads * self.head_dim

    def split_units(self) -> dict[str, int]:
        """Units of a logical axis that are never split over devices: whole heads."""
        return {"heads": self.heads, "kv_heads": self.kv_heads}

    def cache_shapes(self) -> dict[str, tuple[int, int]]:
        """(heads, size) of the tensors that decoding caches for each token."""
        return dict.fromkeys(("keys", "values"), (self.kv_heads, self.head_dim))


@dataclass(frozen=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x)) with `width` inner units."""

    width: int
    activation: Activation = "silu"
    bias: bool = False

    def rows(self, width: int) -> tuple[TableRow, ...]:
        """Tensors for a residual stream of `width`."""
        inner = self.width
        rows = [
            TableRow("mlp.gate", (inner, width), ("mlp", "embed"), "mlp"),
            TableRow("mlp.up", (inner, width), ("mlp", "embed"), "mlp"),
            _output("mlp.down", width, inner, "mlp", "mlp"),
        ]
        if self.bias:
            rows += [
                TableRow("mlp.gate_bias", (inner,), ("mlp",), "mlp", "zeros"),
                TableRow("mlp.up_bias", (inner,), ("mlp",), "mlp", "zeros"),
                TableRow("mlp.down_bias", (width,), ("embed",), "mlp", "zeros"),
            ]
        return tuple(rows)


@dataclass(frozen=True)
class Norms:
    """Norms of each part of a layer: of its input, of its output, or both.

    offset: added to the stored weights (1 in Gemma, whose files contain w - 1). bare: a part
    (`attn`, `mlp`) whose input is not normalized.
    """

    pre: bool = True
    post: bool = False
    offset: float = 0.0
    bare: str = ""

    def before(self, part: str) -> bool:
        """Whether the input of the part is normalized."""
        return self.pre and part != self.bare

    def rows(self, part: str, width: int) -> tuple[tuple[TableRow, ...], tuple[TableRow, ...]]:
        """Tensors (before, after) the part `attn` or `mlp`."""
        init: InitKind = "zeros" if self.offset else "ones"
        before = TableRow(f"{part}.norm", (width,), ("embed",), "norm", init)
        after = TableRow(f"{part}.post_norm", (width,), ("embed",), "norm", init)
        return (before,) * self.before(part), (after,) * self.post


Mixer = Attention | LatentAttention | GatedDeltaNet


class FeedForward(Protocol):
    """A gated MLP or an MoE layer (core.spec.layers)."""

    def rows(self, width: int) -> tuple[TableRow, ...]:
        """Tensors for a residual stream of `width`."""


@dataclass(frozen=True)
class Layer:
    """One block of the stack; residual_scale: factor of what each part adds to the stream."""

    mixer: Mixer
    mlp: FeedForward
    norms: Norms = Norms()
    residual_scale: float = 1.0

    def rows(self, width: int) -> tuple[TableRow, ...]:
        """Tensors of the block, in the order of the computation."""
        rows: tuple[TableRow, ...] = ()
        for name, part in (("attn", self.mixer), ("mlp", self.mlp)):
            before, after = self.norms.rows(name, width)
            rows += before + part.rows(width) + after
        return rows


Scores = Literal["softmax", "softmax_top_k", "sigmoid"]


@dataclass(frozen=True)
class ClampedSwiglu:
    """(up + 1)·gate·sigmoid(alpha·gate), gate ≤ `limit`, |up| ≤ `limit` by clamping (GPT-OSS)."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class Router:
    """Selects `top_k` of `experts` for each token and computes their gate weights.

    normalised: the selected scores are divided by their sum. scale: multiplies them afterwards.
    groups: experts form groups, and only the `top_k_groups` best (by the sum of their two best
    scores) are eligible. expert_bias: a bias per expert that changes the selection, not the gate
    weights (e_score_correction_bias); it has no gradient (core.train.stepper). bias: added to the
    linear scores.
    """

    experts: int
    top_k: int
    scores: Scores = "softmax"
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    top_k_groups: int = 1
    expert_bias: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        size = self.experts // self.groups
        even = size * self.groups == self.experts and self.top_k_groups <= self.groups
        if not even or self.top_k > size * self.top_k_groups:
            raise UsageError(
                f"config.json: {self.top_k} of {self.experts} experts in {self.top_k_groups} of "
                f"{self.groups} groups (expected groups that divide the experts, and no more "
                "selected experts than those groups have)"
            )

    def rows(self, width: int) -> tuple[TableRow, ...]:
        """Tensors for a residual stream of `width`; each rank of a mesh needs all scores."""
        count = ((self.experts,), ("choice",))
        rows = [TableRow("mlp.router", (self.experts, width), ("choice", "embed"), "router")]
        if self.bias:
            rows.append(TableRow("mlp.router_bias", *count, "router", "zeros"))
        if self.expert_bias:
            rows.append(TableRow("mlp.correction", *count, "router", "zeros", trained=False))
        return tuple(rows)


@dataclass(frozen=True)
class Experts:
    """Routed experts, gated MLPs of inner `width`, and a shared expert for all tokens.

    shared: inner width of the shared expert (0: none); several shared experts are one of their
    summed width. shared_gate: its output is multiplied by a sigmoid gate (Qwen3-Next).
    """

    router: Router
    width: int
    activation: Activation | ClampedSwiglu = "silu"
    bias: bool = False
    shared: int = 0
    shared_gate: bool = False

    def rows(self, width: int) -> tuple[TableRow, ...]:
        """Tensors for a residual stream of `width`."""
        return self.router.rows(width) + self._routed(width) + self._shared(width)

    def _routed(self, width: int) -> tuple[TableRow, ...]:
        """The tensors of a dense MLP with a leading axis of experts."""
        count, share = self.router.experts, (self.router.top_k, self.router.experts)
        return tuple(
            replace(
                row,
                name=row.name.replace("mlp.", "mlp.experts."),
                shape=(count, *row.shape),
                axes=("expert", *row.axes),
                active_share=share,
            )
            for row in GatedMlp(self.width, bias=self.bias).rows(width)
        )

    def _shared(self, width: int) -> tuple[TableRow, ...]:
        if not self.shared:
            return ()
        rows = tuple(
            replace(row, name=row.name.replace("mlp.", "mlp.shared."))
            for row in GatedMlp(self.shared).rows(width)
        )
        gate = TableRow("mlp.shared_gate", (1, width), ("choice", "embed"), "router")
        return rows + (gate,) * self.shared_gate
