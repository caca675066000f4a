"""Rotary position embeddings as data: the inverse frequency of each rotated pair.

`default`: theta^(-2i/N) (Su et al. 2021, arXiv 2104.09864). `linear`: all frequencies divided by
a factor (position interpolation, arXiv 2306.15595). `llama3`: wavelengths beyond the original
context divided by the factor, short ones kept, a linear blend between (Llama 3, arXiv 2407.21783).
Computed in double precision; pairs are (i, i + N/2), the layout of the files on the hub.
"""

import math
from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True)
class Rope:
    """Rotation of a head's `dim` leading dimensions; fields not used by `kind` keep their 0."""

    dim: int
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_length: float = 0.0


def _llama3(frequency: float, rope: Rope) -> float:
    turns = rope.original_length * frequency / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    if span == 0:
        return frequency if turns > rope.low_freq_factor else frequency / rope.factor
    kept = min(1.0, max(0.0, (turns - rope.low_freq_factor) / span))
    return kept * frequency + (1 - kept) * frequency / rope.factor


def inverse_frequencies(rope: Rope) -> tuple[float, ...]:
    """Radians per position of each of the dim/2 pairs."""
    plain = tuple(rope.theta ** (-2 * pair / rope.dim) for pair in range(rope.dim // 2))
    if rope.kind == "llama3":
        return tuple(_llama3(frequency, rope) for frequency in plain)
    return tuple(frequency / rope.factor for frequency in plain)
