"""The parts that layers are made of, as data, and the tensors each part owns.

A layer is a mixer (attention, a delta net) followed by a feed-forward part, each with norms before,
behind or both, and added to the residual stream. A part's tensor names are relative to its layer;
`core/model` computes each part in the function registered for its class. Every family is a
composition of these parts.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from sabia.core.spec.delta import GatedDeltaNet
from sabia.core.spec.latent import LatentAttention
from sabia.core.spec.rope import Rope
from sabia.core.spec.tensors import InitKind, Row

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh"]
NormKind = Literal["rms", "layer"]


@dataclass(frozen=True)
class Attention:
    """Softmax attention with grouped keys and values.

    window: a query sees the last `window` positions, itself included (None: all); in an encoder
    those less than `window` away on either side.
    scale: factor of the scores; head_dim**-0.5 in most families.
    rope: rotates the first rope.dim dimensions of each head; None: no rotation.
    qk_norm: RMSNorm of each head's query and key; qk_norm_whole: one norm over all heads;
    norm_offset: added to the stored weights of these norms.
    sinks: each head has a score that takes part in the softmax and has no value (GPT-OSS).
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

    def rows(self, width: int) -> tuple[Row, ...]:
        """Tensors for a residual stream of `width`."""
        n, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = [
            Row("attn.q", (n, width), ("heads", "embed"), "attention"),
            Row("attn.k", (kv, width), ("kv_heads", "embed"), "attention"),
            Row("attn.v", (kv, width), ("kv_heads", "embed"), "attention"),
        ]
        if self.qkv_bias:
            rows += [
                Row("attn.q_bias", (n,), ("heads",), "attention", "zeros"),
                Row("attn.k_bias", (kv,), ("kv_heads",), "attention", "zeros"),
                Row("attn.v_bias", (kv,), ("kv_heads",), "attention", "zeros"),
            ]
        if self.output_gate:
            rows.append(Row("attn.gate", (n, width), ("heads", "embed"), "attention"))
        if self.output_gate and self.qkv_bias:
            rows.append(Row("attn.gate_bias", (n,), ("heads",), "attention", "zeros"))
        if self.sinks:
            rows.append(Row("attn.sinks", (self.heads,), ("heads",), "attention", "zeros"))
        rows += self._norm_rows()
        rows.append(
            Row("attn.o", (width, n), ("embed", "heads"), "attention", residual_output=True)
        )
        if self.output_bias:
            rows.append(Row("attn.o_bias", (width,), ("embed",), "attention", "zeros"))
        return tuple(rows)

    def _norm_rows(self) -> list[Row]:
        init: InitKind = "zeros" if self.norm_offset else "ones"
        sizes: list[tuple[str, int, str]] = []
        if self.qk_norm_whole:
            sizes = [("q", self.heads, "heads"), ("k", self.kv_heads, "kv_heads")]
        elif self.qk_norm:
            sizes = [("q", 1, "head_dim"), ("k", 1, "head_dim")]
        return [
            Row(f"attn.{name}_norm", (heads * self.head_dim,), (axis,), "norm", init)
            for name, heads, axis in sizes
        ]

    def score_width(self) -> int:
        """Multiply-adds per (query, key) pair over both products, summed over heads."""
        return 2 * self.heads * self.head_dim

    def split_units(self) -> dict[str, int]:
        """What is never cut when a logical axis is split over devices: whole heads."""
        return {"heads": self.heads, "kv_heads": self.kv_heads}

    def cache_shapes(self) -> dict[str, tuple[int, int]]:
        """(heads, size) of what decoding keeps of each token."""
        return dict.fromkeys(("keys", "values"), (self.kv_heads, self.head_dim))


@dataclass(frozen=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x)) of inner `width`."""

    width: int
    activation: Activation = "silu"
    bias: bool = False

    def rows(self, width: int) -> tuple[Row, ...]:
        """Tensors for a residual stream of `width`."""
        inner = self.width
        rows = [
            Row("mlp.gate", (inner, width), ("mlp", "embed"), "mlp"),
            Row("mlp.up", (inner, width), ("mlp", "embed"), "mlp"),
            Row("mlp.down", (width, inner), ("embed", "mlp"), "mlp", residual_output=True),
        ]
        if self.bias:
            rows += [
                Row("mlp.gate_bias", (inner,), ("mlp",), "mlp", "zeros"),
                Row("mlp.up_bias", (inner,), ("mlp",), "mlp", "zeros"),
                Row("mlp.down_bias", (width,), ("embed",), "mlp", "zeros"),
            ]
        return tuple(rows)


@dataclass(frozen=True)
class Norms:
    """Norms around each part of a layer: of what it reads, of what it gives, or both.

    offset: added to the stored weights (1 in Gemma, whose files hold w - 1). bare: a part (`attn`,
    `mlp`) that reads the stream as it is.
    """

    pre: bool = True
    post: bool = False
    offset: float = 0.0
    bare: str = ""

    def before(self, part: str) -> bool:
        """Whether what the part reads is normed."""
        return self.pre and part != self.bare

    def rows(self, part: str, width: int) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
        """Tensors (before, behind) the part `attn` or `mlp`."""
        init: InitKind = "zeros" if self.offset else "ones"
        before = Row(f"{part}.norm", (width,), ("embed",), "norm", init)
        behind = Row(f"{part}.post_norm", (width,), ("embed",), "norm", init)
        return (before,) * self.before(part), (behind,) * self.post


Mixer = Attention | LatentAttention | GatedDeltaNet


class FeedForward(Protocol):
    """A gated MLP, or a mixture of experts (core.spec.experts)."""

    def rows(self, width: int) -> tuple[Row, ...]:
        """Tensors for a residual stream of `width`."""


@dataclass(frozen=True)
class Layer:
    """One block of the stack."""

    mixer: Mixer
    mlp: FeedForward
    norms: Norms = Norms()

    def rows(self, width: int) -> tuple[Row, ...]:
        """Tensors of the block, in the order of the computation."""
        rows: tuple[Row, ...] = ()
        for name, part in (("attn", self.mixer), ("mlp", self.mlp)):
            before, behind = self.norms.rows(name, width)
            rows += before + part.rows(width) + behind
        return rows
