"""The plan of a mix of sources by weight: the number of rows of each source, and their order.

The budget is split by the weights. No source gives more than `max_repeat` times its rows; the
others share what is missing in proportion to their weights. The order is a deterministic weighted
interleave: the k-th of a source's n rows is at position (k + 1/2)/n of the output, so every section
of the output has the proportions of the whole. The seed shuffles each pass over a source.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from sabia.core.errors import UsageError
from sabia.core.shards.order import Permutation, apportion, fill, key64

CHUNK = 4096  # rows whose order is computed at once


@dataclass(frozen=True)
class Share:
    """The planned and the actual number of rows of one source."""

    source: str
    weight: float  # of all weights; they sum to 1
    available: int  # rows
    planned: int  # rows by weight alone
    rows: int  # rows within max_repeat

    @property
    def repeats(self) -> float:
        """How often each row is read, on average."""
        return self.rows / self.available if self.available else 0.0


def parse_mix(text: str) -> dict[str, float]:
    """'web=0.6,edu=0.4' → weights that sum to 1; raises UsageError."""
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, sign, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if not sign or not name or name in weights or not 0 < weight < float("inf"):
            raise UsageError(f"--mix: {part!r} (expected SOURCE=WEIGHT,… each once, weights > 0)")
        weights[name] = weight
    if not weights:
        raise UsageError(f"--mix: {text!r} (expected SOURCE=WEIGHT,…)")
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def plan_mix(
    weights: Mapping[str, float], available: Mapping[str, int], rows: int | None, max_repeat: float
) -> list[Share]:
    """Rows to take of each source for a budget of `rows` (None: as many as there are).

    Raises UsageError for a source that has no rows.
    """
    empty = [name for name in weights if not available.get(name)]
    if empty:
        known = ", ".join(sorted(name for name, n in available.items() if n)) or "none"
        raise UsageError(f"--mix: no documents of source {empty[0]!r} (sources found: {known})")
    budget = sum(available[name] for name in weights) if rows is None else rows
    caps = {name: int(max_repeat * available[name]) for name in weights}
    planned = apportion(weights, budget)
    taken = fill(weights, caps, budget)
    return [
        Share(name, weight, available[name], planned[name], taken[name])
        for name, weight in weights.items()
    ]


def interleave(counts: list[int]) -> np.ndarray:
    """int64[Σ counts]: the source of each row of the output; source s has counts[s] evenly spread
    rows."""
    positions = np.concatenate([(np.arange(n) + 0.5) / n for n in counts if n] or [np.empty(0)])
    sources = np.repeat(np.arange(len(counts)), counts)
    return sources[np.argsort(positions, kind="stable")]


def passes(source: str, available: int, rows: int, seed: int) -> Iterator[int]:
    """Row numbers to read: passes over all rows of the source, each in another order."""
    name = int.from_bytes(hashlib.blake2b(source.encode(), digest_size=8).digest(), "little")
    for start in range(0, rows, CHUNK):
        numbers, index = np.divmod(np.arange(start, min(rows, start + CHUNK)), available)
        for number in np.unique(numbers):
            order = Permutation(available, key64(seed, name, int(number)))
            yield from order(index[numbers == number]).tolist()
