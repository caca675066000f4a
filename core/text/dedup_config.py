"""The settings of deduplication, checked, and the bands that follow from them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.text import keep, lsh
from sabia.kernels.minhash import SketchConfig

MIN_MEM = 1 << 20
SIGNATURES = ("sabia", "datasketch")
METHODS = ("minhash", "exact")


@dataclass(frozen=True)
class DedupConfig:
    """The options of the command; `keep` is a rule of sabia.core.text.keep.

    `threshold` is a Jaccard similarity of sets of word n-grams. With `verify` every candidate is
    compared exactly, so false candidates cost little and bands are chosen for recall.
    `mem` bytes are for sorting a band, beside about 100 bytes a document.
    """

    method: str = "minhash"
    threshold: float = 0.7
    ngram: int = 5
    permutations: int = 128
    keep: str = "longest"
    verify: bool = True
    engine: str = "auto"
    mem: float = 1 << 30
    signatures: str = "sabia"

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
        keep.check(self.keep)
        if self.signatures not in SIGNATURES:
            known = " or ".join(SIGNATURES)
            raise UsageError(f"--signatures: {self.signatures!r} (expected {known})")
        if self.mem < MIN_MEM:
            raise UsageError(f"--mem: {self.mem:g} (expected at least {MIN_MEM >> 20}MiB)")

    @property
    def with_shingles(self) -> bool:
        """True when candidates will be compared."""
        return self.method == "minhash" and self.verify

    def sketch(self, seed: int) -> SketchConfig:
        """Bands and rows for the threshold; no bands for the exact method."""
        if self.method == "exact":
            return SketchConfig(self.ngram, 0, 1, seed)
        weight = lsh.MISS_WEIGHT_VERIFIED if self.verify else lsh.MISS_WEIGHT_UNVERIFIED
        bands, rows = lsh.choose_bands(self.threshold, self.permutations, weight)
        return SketchConfig(self.ngram, bands, rows, seed, self.signatures, self.permutations)
