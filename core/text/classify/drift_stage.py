"""`classify drift`: compare the distributions of the scores of two runs.

Every score is counted in 65,536 cells by its first 16 bits as a float32 (sign, exponent and seven
bits of fraction: cells 0.8 % wide), in the order of values, so runs of any size need the same
memory. PSI, the population stability index, is the sum of (q - p) ln(q / p) over ten bins that hold
equal shares of the first run, with half a document added to each bin; customary limits are 0.1 for
some drift and 0.25 for much. KS is the largest distance between the two cumulative distributions
(Kolmogorov-Smirnov), exact up to ties inside a cell.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from sabia.core import stop
from sabia.core.errors import BadData
from sabia.core.shards.inputs import from_path
from sabia.core.shards.job import Job
from sabia.core.text.classify.score_calibration import values_of
from sabia.core.text.plain_table import plain, table
from sabia.core.text.score_column import score_names

CELLS = 1 << 16
BINS = 10
SOME, MUCH = 0.1, 0.25


@dataclass(frozen=True)
class Drift:
    """The drift of one score; before and after: the number of documents with the score."""

    score: str
    before: int
    after: int
    mean_before: float
    mean_after: float
    psi: float
    ks: float
    verdict: str


@dataclass
class ScoreDistribution:
    """The distribution of one score in one run: counts by cell, and the sum."""

    cells: np.ndarray = field(default_factory=lambda: np.zeros(CELLS, np.int64))
    total: float = 0.0

    def add(self, values: np.ndarray) -> None:
        """Count values[n], without NaN."""
        values = values[~np.isnan(values)].astype(np.float32)
        bits = (values + np.float32(0)).view(np.uint32)  # -0 becomes 0
        order = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)) >> 16
        self.cells += np.bincount(order, minlength=CELLS)
        self.total += float(values.sum(dtype=np.float64))


def run(job: Job, names: Sequence[str]) -> None:
    """Compare the job's two inputs; the report goes to stdout. Raises UsageError, BadData."""
    before, after = (_read(path, names) for path in job.inputs)
    shared = [name for name in before if name in after]
    if not shared:
        raise BadData("the two inputs have no score in common")
    rows = [compare(name, before[name], after[name]) for name in shared]
    if job.json:
        print(json.dumps(plain([asdict(row) for row in rows])))
        return
    head = ("score", "before", "after", "mean before", "mean after", "PSI", "KS", "drift")
    print(table(head, [tuple(asdict(row).values()) for row in rows]), end="")


def _read(path: str, names: Sequence[str]) -> dict[str, ScoreDistribution]:
    scores: dict[str, ScoreDistribution] = {}
    for source in from_path(path, "document"):
        for number, batch in enumerate(source.batches()):
            stop.check()
            for name in names or sorted(score_names(batch.column("scores"))):
                values = values_of(batch, name, "--score", bool(names) and number == 0)
                scores.setdefault(name, ScoreDistribution()).add(values)
    return scores


def compare(name: str, before: ScoreDistribution, after: ScoreDistribution) -> Drift:
    """PSI and KS of two runs that both have the score."""
    n, m = int(before.cells.sum()), int(after.cells.sum())
    if not n or not m:
        raise BadData(f"{name}: no values to compare")
    below, above = np.cumsum(before.cells) / n, np.cumsum(after.cells) / m
    edges = np.unique(np.searchsorted(below, np.arange(1, BINS) / BINS))
    p, q = (_shares(run.cells, edges) for run in (before, after))
    psi = float(((q - p) * np.log(q / p)).sum())
    verdict = "much" if psi >= MUCH else "some" if psi >= SOME else "none"
    ks = float(np.abs(below - above).max())
    return Drift(name, n, m, before.total / n, after.total / m, psi, ks, verdict)


def _shares(cells: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Share of each bin; bin i ends with cell edges[i]."""
    ends = np.append(np.cumsum(cells)[edges], cells.sum())
    bins = np.diff(ends, prepend=0) + 0.5
    return bins / bins.sum()
