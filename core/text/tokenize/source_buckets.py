"""Sources split by a score, so that a mix can weight good and poor documents differently.

With the edges 1 and 3 of the score edu, a document of the source web gets the source web/edu0
(below 1), web/edu1 (from 1 to below 3), web/edu2 (3 and more), or web/edu-none (no such score).
Mix weights, repeat limits and the stages of a run apply to these names as to any others.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

from sabia.core.errors import UsageError
from sabia.core.text.removed_rows import put_column
from sabia.core.text.score_column import score_values


@dataclass(frozen=True)
class Buckets:
    """A score's name, and its edges in ascending order."""

    score: str
    edges: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Buckets | None":
        """'edu=1,3' → buckets, '' → None; raises UsageError."""
        if not text:
            return None
        name, sign, numbers = text.partition("=")
        try:
            edges = tuple(float(part) for part in numbers.split(","))
        except ValueError:
            edges = ()
        ascending = all(a < b for a, b in pairwise(edges))
        if not (name and sign and edges and ascending):
            raise UsageError(f"--by: {text!r} (expected SCORE=EDGE,… with ascending edges)")
        return cls(name, edges)

    def split(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with the bucket appended to `source`."""
        values = score_values(batch.column("scores"), self.score)
        bucket = np.searchsorted(np.array(self.edges), values, side="right")
        names = np.array([*(f"/{self.score}{i}" for i in range(len(self.edges) + 1)),
                          f"/{self.score}-none"], object)  # fmt: skip
        suffixes = names[np.where(np.isnan(values), len(names) - 1, bucket)]
        sources = batch.column("source").to_pylist()
        split = [
            f"{source or ''}{suffix}" for source, suffix in zip(sources, suffixes, strict=True)
        ]
        return put_column(batch, "source", pa.array(split, pa.string()))
