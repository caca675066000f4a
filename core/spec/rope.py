"""Rotary position embeddings as data: the inverse frequency of each rotated pair.

`default`: theta^(-2i/N) (Su et al. 2021, arXiv 2104.09864). `linear`: all frequencies divided by
a factor (position interpolation, arXiv 2306.15595). `llama3`: wavelengths beyond the original
context are divided by the factor, short ones kept, with a linear blend between (Llama 3, arXiv
2407.21783). `yarn`: pairs with more than beta_fast rotations in the original context are kept,
those with less than beta_slow divided by the factor, with a linear blend between, and cos and sin
multiplied by `amplitude` (arXiv 2309.00071). `dynamic` (NTK-aware scaling): in documents of L
tokens beyond the original context the base is theta·(factor·L/original - factor + 1)^(N/(N-2)).
`longrope`: each frequency is divided by a number of its own, of `long_factor` in documents longer
than the original context and of `short_factor` in others (arXiv 2402.13753).
Computed in double precision; pairs are (i, i + N/2), the layout of the files on the hub.
"""

import math
from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope"]


@dataclass(frozen=True)
class Rope:
    """Rotation of a head's `dim` leading dimensions; fields not used by `kind` keep their value.

    truncate: the blend begins and ends at whole pairs. mscale_all_dim: in DeepSeek's families it
    scales the attention scores (`score_factor`), not the rotation. short_factor, long_factor: one
    number for each pair.
    """

    dim: int
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_length: float = 0.0
    beta_fast: float = 0.0
    beta_slow: float = 0.0
    truncate: bool = True
    amplitude: float = 1.0
    mscale_all_dim: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def by_length(self) -> bool:
        """Whether the angles of a document depend on its length."""
        return self.kind == "dynamic" or self.short_factor != self.long_factor


def _llama3(frequency: float, rope: Rope) -> float:
    rotations = rope.original_length * frequency / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    if span == 0:
        return frequency if rotations > rope.low_freq_factor else frequency / rope.factor
    kept = min(1.0, max(0.0, (rotations - rope.low_freq_factor) / span))
    return kept * frequency + (1 - kept) * frequency / rope.factor


def _yarn(plain: tuple[float, ...], rope: Rope) -> tuple[float, ...]:
    def pair_with(rotations: float) -> float:
        rotations_of_first = rope.original_length / (2 * math.pi)
        return rope.dim * math.log(rotations_of_first / rotations) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    span = high - low or 0.001
    stretched = [min(1.0, max(0.0, (pair - low) / span)) for pair in range(len(plain))]
    return tuple(
        frequency * (1 - share + share / rope.factor)
        for frequency, share in zip(plain, stretched, strict=True)
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1·mscale·ln(factor) + 1, the growth of the scores that YaRN compensates."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def score_factor(rope: Rope) -> float:
    """The factor of the attention scores in DeepSeek's families."""
    return yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2 if rope.mscale_all_dim else 1.0


def inverse_frequencies(rope: Rope, long: bool = False) -> tuple[float, ...]:
    """Radians per position of each of the dim/2 pairs; long: longrope's of long documents.

    Those of `dynamic` are of documents within the original context.
    """
    plain = tuple(rope.theta ** (-2 * pair / rope.dim) for pair in range(rope.dim // 2))
    if rope.kind == "llama3":
        return tuple(_llama3(frequency, rope) for frequency in plain)
    if rope.kind == "yarn":
        return _yarn(plain, rope)
    if rope.kind == "dynamic":
        return plain
    if rope.kind == "longrope":
        factors = rope.long_factor if long else rope.short_factor
        return tuple(f / factor for f, factor in zip(plain, factors, strict=True))
    return tuple(frequency / rope.factor for frequency in plain)
