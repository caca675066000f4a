"""Gated delta net: linear attention with a decayed and corrected state (arXiv 2412.06464).

Per value head a state S[N, V] is decayed, corrected towards v at key k, and read with query q:
S ← α·S; S ← S + k·(β·(v - Sᵀk))ᵀ; o = Sᵀq, with α = exp(-exp(a_log)·softplus(decay(y) + dt_bias))
and β = sigmoid(beta(y)). q, k, v pass a short causal convolution over time and SiLU; q and k have
unit length. The result is normalized per head, gated by SiLU(z(y)) and projected.

Each key head is shared by value_heads / key_heads consecutive value heads. All tensors with an
entry per head, also those of key heads, have the axis "heads", so that all are split in the same
way: the size of a mesh axis must divide the key heads.
"""

from dataclasses import dataclass
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.spec.tensors import TableRow


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
            TableRow(
                "delta.o", (width, values), ("embed", "heads"), "attention", residual_output=True
            ),
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
