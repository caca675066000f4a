"""Sampling: logits → tokens with log-probabilities, and random numbers that depend on names only.

Top-p filters what the temperature has made. Of tokens with equal logits the one with the smaller id
goes first; the token that crosses the top-p mass is kept. Temperature 0 is the argmax. The uniform
number of a draw is a hash of (seed, request id, sample, position) and nothing else, and the token
is where it falls in the cumulative distribution, so a token depends neither on the batch nor on its
slot nor on where a run resumed.
Sources: SplitMix64 (Steele, Lea, Flood 2014, DOI 10.1145/2714064.2660195); nucleus sampling (arXiv
1904.09751).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from sabia.core.errors import UsageError

if TYPE_CHECKING:
    import torch

COLUMNS = ("temperature", "top_p")
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn; the defaults are the model's own distribution (top_p 1: all of it)."""

    temperature: float = 1.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UsageError(f"sampling: temperature {self.temperature} (expected 0 or more)")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"sampling: top-p {self.top_p} (expected above 0, at most 1)")


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
    """Numbers[B] in [0, 1) with 52 random bits, for keys[B] and positions[B] (tokens drawn yet)."""
    with np.errstate(over="ignore"):
        bits = mix64(keys + GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(12)) * 2.0**-52  # 52: u times the total stays below the total


@dataclass(frozen=True)
class RowParams:
    """SamplingParams of B rows as columns [B, 1] on the logits' device."""

    temperature: torch.Tensor
    top_p: torch.Tensor
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
            column("top_p", torch.float64),
            any(row.top_p < 1 for row in rows),
            any(row.temperature == 0 for row in rows),
        )

    def joined(self, other: RowParams) -> RowParams:
        """The parameters of these rows and, behind them, of others."""
        import torch

        whole = {n: torch.cat((getattr(self, n), getattr(other, n))) for n in COLUMNS}
        any_filter = self.any_filter or other.any_filter
        any_greedy = self.any_greedy or other.any_greedy
        return RowParams(**whole, any_filter=any_filter, any_greedy=any_greedy)

    def take(self, rows: torch.Tensor) -> RowParams:
        """The parameters of some rows, in the order given."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})


def draw(
    logits: torch.Tensor, params: RowParams, uniform: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens[B], logprobs[B], raw_logprobs[B]) of one draw a row from logits[B, V] (float32).

    `logprobs` are of the distribution drawn from (after temperature and filters; 0 for the
    argmax), `raw_logprobs` of the model's own at temperature 1 over the whole vocabulary.
    """
    import torch

    raw = torch.log_softmax(logits, -1)
    greedy = params.temperature == 0
    scaled = raw / torch.where(greedy, 1.0, params.temperature)
    if params.any_filter:
        scaled = filtered(scaled, params)
    logprobs = torch.log_softmax(scaled, -1)
    tokens = _inverse_cdf(logprobs, uniform)
    if params.any_greedy:
        tokens = torch.where(greedy[:, 0], raw.argmax(-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    chosen = torch.where(greedy[:, 0], 0.0, chosen) if params.any_greedy else chosen
    return tokens, chosen, raw.gather(1, tokens[:, None])[:, 0]


def _inverse_cdf(logprobs: torch.Tensor, uniform: np.ndarray) -> torch.Tensor:
    """The token whose share of the cumulative distribution holds u; one of probability > 0."""
    import torch

    mass = logprobs.double().exp().cumsum(-1)
    u = torch.as_tensor(uniform, device=logprobs.device, dtype=torch.float64)[:, None]
    return torch.searchsorted(mass, u * mass[:, -1:], right=True)[:, 0].clamp_(
        max=logprobs.shape[-1] - 1
    )


def filtered(scaled: torch.Tensor, params: RowParams) -> torch.Tensor:
    """Logits[B, V] with -inf where top-p leaves a token out."""
    import torch

    ordered, index = torch.sort(scaled, dim=-1, descending=True, stable=True)
    probability = torch.softmax(ordered.double(), -1)
    before = probability.cumsum(-1) - probability
    keep = (before < params.top_p) | (params.top_p >= 1)
    keep[:, 0] = True
    kept = torch.zeros_like(keep).scatter_(1, index, keep)
    return scaled.masked_fill(~kept, -torch.inf)
