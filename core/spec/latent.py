"""Multi-head latent attention: keys and values of all heads come from one latent per token.

DeepSeek-V2 and V3 (arXiv 2405.04434 section 2.1, 2412.19437 section 2.1.1). y is projected down to
a latent of `kv_rank`, which is normalized and projected up to each head's unrotated key and value.
A rotated key of rope.dim dimensions is computed from y and shared by all heads. Queries may
use a latent of `q_rank` in the same way. Only latent and rotated key are cached.
"""

from dataclasses import dataclass

from sabia.core.spec.rope import Rope
from sabia.core.spec.tensors import TableRow


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
            TableRow(
                "attn.o", (width, values), ("embed", "heads"), "attention", residual_output=True
            ),
        ]
        if self.bias:
            rows.append(TableRow("attn.o_bias", (width,), ("embed",), "attention", "zeros"))
        return tuple(rows)

    def _down_rows(self, name: str, size: int, width: int) -> list[TableRow]:
        rows = [TableRow(f"attn.{name}_down", (size, width), ("latent", "embed"), "attention")]
        if self.bias:
            rows.append(
                TableRow(f"attn.{name}_down_bias", (size,), ("latent",), "attention", "zeros")
            )
        return rows

    def score_width(self) -> int:
        """Multiply-adds per (query, key) pair over both products, summed over heads."""
        return self.heads * (self.key_dim + self.value_dim)

    def split_units(self) -> dict[str, int]:
        """Units of a logical axis that are never split over devices: whole heads."""
        return {"heads": self.heads}

    def cache_shapes(self) -> dict[str, tuple[int, int]]:
        """(heads, size) of the tensors that decoding caches for each token."""
        return {"latent": (1, self.kv_rank), "rotated": (1, self.rope.dim)}
