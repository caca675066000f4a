"""The parts of layers, as data, and the tensors of each part.

A layer is a mixer (attention, a delta net) followed by a feed-forward part, each with norms before,
after or both, and added to the residual stream. A part's tensor names are relative to its layer;
`core/model` computes each part in the function registered for its class. Every family is a
composition of these parts.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from sabia.core.spec.delta import GatedDeltaNet
from sabia.core.spec.latent import LatentAttention
from sabia.core.spec.rope import Rope
from sabia.core.spec.tensors import InitKind, TableRow

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
        rows = [
            TableRow("attn.q", (n, width), ("heads", "embed"), "attention"),
            TableRow("attn.k", (kv, width), ("kv_heads", "embed"), "attention"),
            TableRow("attn.v", (kv, width), ("kv_heads", "embed"), "attention"),
        ]
        if self.qkv_bias:
            rows += [
                TableRow("attn.q_bias", (n,), ("heads",), "attention", "zeros"),
                TableRow("attn.k_bias", (kv,), ("kv_heads",), "attention", "zeros"),
                TableRow("attn.v_bias", (kv,), ("kv_heads",), "attention", "zeros"),
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
        rows.append(
            TableRow("attn.o", (width, n), ("embed", "heads"), "attention", residual_output=True)
        )
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
            TableRow("mlp.down", (width, inner), ("embed", "mlp"), "mlp", residual_output=True),
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
    """A gated MLP or an MoE layer (core.spec.experts)."""

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
