"""Types and constants of the search for repeats; `interface` defines the repeats."""

from typing import NamedTuple

import numpy as np

BASE = 0x9E3779B97F4A7C55  # B; odd, so that it has an inverse modulo 2**64
RECORD = np.dtype([("value", "u8"), ("start", "i8"), ("count", "i8")])


class Repeats(NamedTuple):
    """Runs of repeats: windows start[i] … start[i] + count[i] - 1 first occurred from first[i]."""

    start: np.ndarray
    count: np.ndarray  # type: ignore[assignment]  # the field hides tuple.count
    first: np.ndarray


def gram_length(span: int) -> int:
    """k, the length of the units by which windows of `span` units are filed."""
    return max(span // 2, 1)
