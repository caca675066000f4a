"""Sampling: logits → tokens with log-probabilities, with counter-based random numbers.

Order of the filters, each applied to the result of the one before: temperature, top-k, top-p,
min-p. Of tokens with equal logits the one with the smaller id comes first; the token that crosses
the top-p mass is kept. Temperature 0 is the argmax. The uniform number of a draw is a hash of
(seed, request id, sample, position) only, and the token is found by inverting the cumulative
distribution, so a token does not depend on the batch, on its slot or on where a run resumed.
Sources: SplitMix64 (Steele, Lea, Flood 2014, DOI 10.1145/2714064.2660195); nucleus sampling (arXiv
1904.09751); min-p (arXiv 2407.01082).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sabia.core.errors import UsageError

if TYPE_CHECKING:
    import torch

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn; the defaults are the model's own distribution.

    top_k 0, top_p 1 and min_p 0 filter nothing.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and self.top_k >= 0):
            raise UsageError(
                f"sampling: temperature {self.temperature}, top-k {self.top_k} (expected 0 or more)"
            )
        if not (0 < self.top_p <= 1 and 0 <= self.min_p < 1):
            raise UsageError(
                f"sampling: top-p {self.top_p} (expected above 0, at most 1), "
                f"min-p {self.min_p} (expected 0 or more, below 1)"
            )

    @property
    def filters(self) -> bool:
        """True if sampling excludes part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def mix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer: a bijection of uint64 with full avalanche, elementwise."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stream_keys(seed: int, request_id: str, samples: Sequence[int]) -> np.ndarray:
    """Keys (uint64) of a request's samples by number; uniforms() takes them with a position."""
    text = f"{seed}\0{request_id}".encode("utf-8", "surrogatepass")
    root = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    with np.errstate(over="ignore"):
        return mix64(np.uint64(root) + GOLDEN * (np.asarray(samples, np.uint64) + np.uint64(1)))


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers[B] in [0, 1) with 52 random bits, for keys[B] and positions[B] (tokens drawn so
    far)."""
    with np.errstate(over="ignore"):
        bits = mix64(keys + GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(12)) * 2.0**-52  # 52: u times the total stays below the total


@dataclass(frozen=True)
class RowParams:
    """SamplingParams of B rows as columns [B, 1] on the logits' device."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    any_filter: bool
    any_greedy: bool

    @classmethod
    def of(cls, rows: list[SamplingParams], device: torch.device | str = "cpu") -> RowParams:
        """Columns of the rows' parameters."""
        import torch

        def column(name: str, dtype: torch.dtype) -> torch.Tensor:
            values = [getattr(row, name) for row in rows]
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        return cls(
            column("temperature", torch.float32),
            column("top_k", torch.int64),
            column("top_p", torch.float64),
            column("min_p", torch.float32),
            any(row.filters for row in rows),
            any(row.temperature == 0 for row in rows),
        )

    def joined(self, other: RowParams) -> RowParams:
        """The parameters of these rows followed by those of others."""
        import torch

        pairs = zip(self._columns(), other._columns(), strict=True)
        temperature, top_k, top_p, min_p = (torch.cat(pair) for pair in pairs)
        any_filter = self.any_filter or other.any_filter
        any_greedy = self.any_greedy or other.any_greedy
        return RowParams(temperature, top_k, top_p, min_p, any_filter, any_greedy)

    def _columns(self) -> tuple[torch.Tensor, ...]:
        return self.temperature, self.top_k, self.top_p, self.min_p

    def take(self, rows: torch.Tensor) -> RowParams:
        """The parameters of some rows, in the order given."""
        temperature, top_k, top_p, min_p = (c[rows] for c in self._columns())
        return RowParams(temperature, top_k, top_p, min_p, self.any_filter, self.any_greedy)


def draw(
    logits: torch.Tensor, params: RowParams, uniform: np.ndarray, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens[B], logprobs[B], raw_logprobs[B]) of one draw per row from logits[B, V] (float32).

    `logprobs` are of the distribution drawn from (after temperature and filters; 0 for the
    argmax), `raw_logprobs` of the model's own at temperature 1 over the whole vocabulary. bias[B,
    V] is added to the logits for the former only.
    """
    import torch

    raw = torch.log_softmax(logits, -1)
    greedy = params.temperature == 0
    steered = raw if bias is None else raw + bias
    scaled = steered / torch.where(greedy, 1.0, params.temperature)
    if params.any_filter:
        scaled = filtered(scaled, params)
    logprobs = torch.log_softmax(scaled, -1)
    # the token whose interval of the cumulative distribution contains u; of probability > 0
    mass = logprobs.double().exp().cumsum(-1)
    u = torch.as_tensor(uniform, device=logprobs.device, dtype=torch.float64)[:, None]
    tokens = torch.searchsorted(mass, u * mass[:, -1:], right=True)[:, 0]
    tokens.clamp_(max=logprobs.shape[-1] - 1)
    if params.any_greedy:
        tokens = torch.where(greedy[:, 0], steered.argmax(-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    chosen = torch.where(greedy[:, 0], 0.0, chosen) if params.any_greedy else chosen
    return tokens, chosen, raw.gather(1, tokens[:, None])[:, 0]


def likeliest(logits: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` likeliest tokens of each row of logits[B, V] with their log-probabilities at
    temperature 1, in descending order."""
    import torch

    values, ids = torch.log_softmax(logits, -1).topk(min(count, logits.shape[-1]))
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return [list(zip(*pair, strict=True)) for pair in pairs]


def filtered(scaled: torch.Tensor, params: RowParams) -> torch.Tensor:
    """Logits[B, V] with -inf for tokens excluded by top-k, top-p or min-p."""
    import torch

    ordered, index = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)[None]
    keep = (rank < params.top_k) | (params.top_k == 0)
    probability = torch.softmax(ordered.masked_fill(~keep, -torch.inf).double(), -1)
    before = probability.cumsum(-1) - probability
    keep &= (before < params.top_p) | (params.top_p >= 1)
    keep &= ordered >= ordered[:, :1] + params.min_p.log()  # log 0 = -inf keeps all
    keep[:, 0] = True
    kept = torch.zeros_like(keep).scatter_(1, index, keep)
    return scaled.masked_fill(~kept, -torch.inf)
