"""The settings of deduplication, checked, and the bands that follow from them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.text import lsh
from sabia.kernels.minhash import SketchConfig

METHODS = ("minhash", "exact")


@dataclass(frozen=True)
class DedupConfig:
    """The options of the command; `keep` is longest, first or best:NAME of a score.

    `threshold` is a Jaccard similarity of sets of word n-grams. With `verify` every candidate is
    compared exactly, so false candidates cost little and bands are chosen for recall.
    """

    method: str = "minhash"
    threshold: float = 0.7
    ngram: int = 5
    permutations: int = 128
    keep: str = "longest"
    verify: bool = True
    engine: str = "auto"

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "DedupConfig":
        """The command's options that are settings of this method; None leaves the default."""
        given = {each.name: options[each.name] for each in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def check(self) -> None:
        """Raise UsageError for values that make no sense."""
        if self.method not in METHODS:
            raise UsageError(f"--method: {self.method!r} (expected {' or '.join(METHODS)})")
        if not 0 < self.threshold <= 1:
            raise UsageError(f"--threshold: {self.threshold} (expected above 0, at most 1)")
        if self.ngram < 1 or not 1 <= self.permutations <= 4096:
            raise UsageError("--ngram: expected at least 1; --permutations: from 1 to 4096")
        best = self.keep.startswith("best:") and self.score
        if self.keep not in ("longest", "first") and not best:
            raise UsageError(f"--keep: {self.keep!r} (expected longest, first or best:SCORE)")

    @property
    def score(self) -> str:
        """The score that `--keep best:` names, or an empty string."""
        return self.keep.partition(":")[2]

    def sketch(self, seed: int) -> SketchConfig:
        """Bands and rows for the threshold; no bands for the exact method."""
        if self.method == "exact":
            return SketchConfig(self.ngram, 0, 1, seed)
        weight = lsh.MISS_WEIGHT_VERIFIED if self.verify else lsh.MISS_WEIGHT_UNVERIFIED
        bands, rows = lsh.choose_bands(self.threshold, self.permutations, weight)
        return SketchConfig(self.ngram, bands, rows, seed)
