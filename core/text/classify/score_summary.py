"""Report of a `classify` run: histograms of the scores, share of rows kept, cost.

Each score is counted in bins, as counters `NAME[LOW]`, which add up over workers: twenty bins of
0.05 over [0, 1], one for each power of two above, and one for values below 0. The cost is the CPU
time, reading and writing included, per document read, scaled to 10^9 documents.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from sabia.core import notes
from sabia.core.shards.mapping import ShardContext
from sabia.core.shards.summary import Summary
from sabia.core.text.plain_table import sparkline

UNIT = 20  # bins over [0, 1]
EDGES = np.array([-np.inf, *(i / UNIT for i in range(UNIT)), *(2.0**i for i in range(41))])
CPU = "cpu seconds"
_BILLION = 1e9


def count_scores(context: ShardContext, scores: Mapping[str, np.ndarray]) -> None:
    """Add a batch's scores, float[n] by name, to the counters of its shard, without NaN."""
    for name, values in scores.items():
        present = values[~np.isnan(values)]
        present = np.where(present == 1, 1 - 1e-9, present)  # 1 belongs to the last bin of [0, 1]
        bins = np.bincount(np.searchsorted(EDGES, present, "right") - 1, minlength=len(EDGES))
        for index in np.flatnonzero(bins).tolist():
            context.count(f"{name}[{EDGES[index]:g}]", int(bins[index]))


def histogram(summary: Summary, name: str) -> np.ndarray:
    """int[len(EDGES)] of one score."""
    counts = (summary.counters.get(f"{name}[{low:g}]", 0) for low in EDGES)
    return np.fromiter(counts, float, len(EDGES))


def report_scores(summary: Summary, shown: Sequence[str], price: float = 0.0) -> None:
    """Note the histograms of the shown scores; add the share kept and the cost to the summary.

    price: US dollars per core-hour; 0: no cost in dollars.
    """
    for name in shown:
        bins = histogram(summary, name)
        if bins.sum():
            notes.note(f"{name} {_spread(bins)}")
    seconds = summary.counters.get(CPU, 0)
    if not summary.rows_in or not seconds:
        return
    hours = seconds / summary.rows_in * _BILLION / 3600
    summary.counters["cpu hours per 1e9"] = hours
    summary.counters["docs per second"] = summary.rows_in / max(summary.seconds, 1e-9)
    summary.counters["share kept"] = summary.rows_out / summary.rows_in
    if price:
        summary.counters["usd per 1e9"] = hours * price


def _spread(bins: np.ndarray) -> str:
    """A sparkline over [0, 1] if it holds all values, else over the bins in use."""
    inside = bins[1 : UNIT + 1]
    if inside.sum() == bins.sum():
        return f"0 {sparkline(inside.tolist())} 1"
    used = np.flatnonzero(bins)
    low, high = int(used[0]), int(used[-1])
    top = EDGES[high + 1] if high + 1 < len(EDGES) else np.inf
    return f"{EDGES[low]:g} {sparkline(bins[low : high + 1].tolist())} {top:g}"
