"""How tokens are drawn: parameters of requests and counter-based random numbers.

The draw itself is that of a backend, in core/generate/runner. Order of the filters, each applied to
the result of the one before: temperature, top-k, top-p, min-p. Of tokens with equal logits the one
with the smaller id comes first; the token that crosses the top-p mass is kept. Temperature 0 is the
argmax. The uniform number of a draw is a hash of (seed, request id, sample, position) only, and the
token is found by inverting the cumulative distribution, so a token does not depend on the batch, on
its slot or on where a run resumed.
Sources: SplitMix64 (Steele, Lea, Flood 2014, DOI 10.1145/2714064.2660195); nucleus sampling (arXiv
1904.09751); min-p (arXiv 2407.01082).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sabia.core.errors import UsageError

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
DRAFT, KEEP = 1, 2  # purposes of numbers: to propose a token, and to keep it


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


def purpose_keys(keys: np.ndarray, purpose: int) -> np.ndarray:
    """Keys[B] of other numbers of the same samples, for a purpose above 0."""
    with np.errstate(over="ignore"):
        return mix64(keys + GOLDEN * np.uint64(purpose)) ^ GOLDEN


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Numbers[B] in [0, 1) with 52 random bits, for keys[B] and positions[B] (tokens drawn so
    far)."""
    with np.errstate(over="ignore"):
        bits = mix64(keys + GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(12)) * 2.0**-52  # 52: u times the total stays below the total


@dataclass(frozen=True)
class RowParams:
    """SamplingParams of B rows as columns [B]."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[SamplingParams]) -> RowParams:
        """Columns of the rows' parameters."""
        return cls(
            np.array([row.temperature for row in rows], np.float32),
            np.array([row.top_k for row in rows], np.int32),
            np.array([row.top_p for row in rows], np.float64),
            np.array([row.min_p for row in rows], np.float32),
        )

    def __len__(self) -> int:
        return len(self.temperature)

    @cached_property
    def plain(self) -> bool:
        """Whether all rows draw from the model's own distribution."""
        return bool((self.temperature == 1).all()) and not self.filters

    @cached_property
    def filters(self) -> bool:
        """Whether a row excludes part of the vocabulary."""
        return bool(((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)).any())

    @cached_property
    def greedy(self) -> bool:
        """Whether a row takes the argmax."""
        return bool((self.temperature == 0).any())

    @property
    def columns(self) -> tuple[np.ndarray, ...]:
        """temperature, top_k, top_p, min_p."""
        return self.temperature, self.top_k, self.top_p, self.min_p

    def joined(self, other: RowParams) -> RowParams:
        """The parameters of these rows followed by those of others."""
        pairs = zip(self.columns, other.columns, strict=True)
        return RowParams(*(np.concatenate(pair) for pair in pairs))

    def take(self, rows: np.ndarray) -> RowParams:
        """The parameters of some rows, in the order given."""
        return RowParams(*(column[rows] for column in self.columns))
