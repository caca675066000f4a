"""Multi-head latent attention: keys and values of all heads come from one small vector a token.

DeepSeek-V2 and V3 (arXiv 2405.04434 section 2.1, 2412.19437 section 2.1.1). y is projected down to
a latent of `kv_rank`, which is normed and projected up to each head's unrotated key and value; a
rotated key of rope.dim dimensions comes straight from y and is shared by the heads. Queries may
pass a latent of `q_rank` in the same way. Only latent and rotated key are cached.
"""

from dataclasses import dataclass

from sabia.core.spec.rope import Rope
from sabia.core.spec.tensors import Row


@dataclass(frozen=True)
class LatentAttention:
    """The sizes of multi-head latent attention.

    plain_dim: unrotated dimensions of a head's query and key, before the rope.dim rotated ones.
    interleaved: rotated pairs are (2i, 2i + 1) in the weights, not (i, i + N/2).
    bias: of the downward projections and the output. latent_eps: of the latents' norms.
    """

    heads: int
    plain_dim: int
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
        return self.plain_dim + self.rope.dim

    def rows(self, width: int) -> tuple[Row, ...]:
        """Tensors for a residual stream of `width`."""
        latent, values = self.kv_rank + self.rope.dim, self.heads * self.value_dim
        up = self.heads * (self.plain_dim + self.value_dim)
        rows = [*self._query_rows(width), *self._down_rows("kv", latent, width)]
        rows += [
            Row("attn.kv_norm", (self.kv_rank,), ("latent",), "norm", "ones"),
            Row("attn.kv_up", (up, self.kv_rank), ("heads", "latent"), "attention"),
            Row("attn.o", (width, values), ("embed", "heads"), "attention", residual_output=True),
        ]
        if self.bias:
            rows.append(Row("attn.o_bias", (width,), ("embed",), "attention", "zeros"))
        return tuple(rows)

    def _query_rows(self, width: int) -> list[Row]:
        size = self.heads * self.key_dim
        if self.q_rank is None:
            return [Row("attn.q", (size, width), ("heads", "embed"), "attention")]
        return [
            *self._down_rows("q", self.q_rank, width),
            Row("attn.q_norm", (self.q_rank,), ("latent",), "norm", "ones"),
            Row("attn.q_up", (size, self.q_rank), ("heads", "latent"), "attention"),
        ]

    def _down_rows(self, name: str, size: int, width: int) -> list[Row]:
        rows = [Row(f"attn.{name}_down", (size, width), ("latent", "embed"), "attention")]
        if self.bias:
            rows.append(Row(f"attn.{name}_down_bias", (size,), ("latent",), "attention", "zeros"))
        return rows

    def score_width(self) -> int:
        """Multiply-adds per (query, key) pair over both products, summed over heads."""
        return self.heads * (self.key_dim + self.value_dim)

    def split_units(self) -> dict[str, int]:
        """What is never cut when a logical axis is split over devices: whole heads."""
        return {"heads": self.heads}

    def cache_shapes(self) -> dict[str, tuple[int, int]]:
        """(heads, size) of what decoding keeps of each token."""
        return {"latent": (1, self.kv_rank), "rotated": (1, self.rope.dim)}
