"""Gated delta net: linear attention whose state forgets and corrects itself (arXiv 2412.06464).

Per value head a state S[N, V] is decayed, corrected towards v at key k, and read with query q:
S ← α·S; S ← S + k·(β·(v - Sᵀk))ᵀ; o = Sᵀq, with α = exp(-exp(a_log)·softplus(decay(y) + dt_bias))
and β = sigmoid(beta(y)). q, k, v pass a short causal convolution over time and SiLU; q and k have
unit length. The result is normed per head, gated by SiLU(z(y)) and projected.

Each key head serves value_heads / key_heads consecutive value heads. Every tensor with an entry
per head has the axis "heads", key heads too, so that one split of the heads cuts all of them
alike: a tensor axis must divide the key heads.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

from sabia.core.errors import UsageError
from sabia.core.spec.tensors import Row


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

    def rows(self, width: int) -> tuple[Row, ...]:
        """Tensors for a residual stream of `width`."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        outs = {"q": keys, "k": keys, "v": values, "z": values}
        outs |= {"decay": self.value_heads, "beta": self.value_heads}
        matrices = [
            Row(f"delta.{name}", (size, width), ("heads", "embed"), "attention")
            for name, size in outs.items()
        ]
        taps = [
            Row(f"delta.conv_{name}", (outs[name], self.taps), ("heads", "taps"), "conv", "fan_in")
            for name in "qkv"
        ]
        per_head: tuple[Any, Any, Any] = ((self.value_heads,), ("heads",), "attention")
        return (
            *matrices,
            *taps,
            Row("delta.a_log", *per_head, "rate"),
            Row("delta.dt_bias", *per_head, "step"),
            Row("delta.norm", (self.value_dim,), ("head_dim",), "norm", "ones"),
            Row("delta.o", (width, values), ("embed", "heads"), "attention", residual_output=True),
        )

    def split_units(self) -> dict[str, int]:
        """Units along the axes of its tensors that a mesh may split."""
        return {"heads": self.key_heads}

    def state_products(self) -> int:
        """Multiply-adds per token with the state: predict, correct, read."""
        return 3 * self.value_heads * self.key_dim * self.value_dim

    def cache_shapes(self) -> NoReturn:
        """Refuses: its state is no list of slots."""
        raise UsageError(
            "cache: decoding with a gated delta net (expected softmax attention in every layer; "
            "serve the exported model with a server and give its address)"
        )
