"""`--keep RULE`: which document of a cluster is kept, as a priority of each row.

Rules: longest, first (in input order), newest (crawl_time), or best:SCORE. The row of highest
priority is kept, the earlier of equals; a missing time or score has the lowest. The length of a
text is the number of characters that are compared: of its words and punctuation, as folded
(sabia.kernels.text.folding), without white space. So neither white space nor the Unicode form of
accents or full-width letters makes a text longer, and exact duplicates are equally long.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from sabia.core.errors import BadData
from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.text.score_column import score_values
from sabia.kernels.text.reference import compared_characters

MEASURE = 2  # changes with the priorities of a rule; 1: the length was in bytes
_COLUMN = {"longest": "text", "newest": "crawl_time", "best": "scores"}


def columns(rule: str) -> list[str]:
    """The columns that a rule reads besides `id`."""
    name = rule.partition(":")[0]
    return [_COLUMN[name]] if name in _COLUMN else []


def priorities(
    batch: pa.RecordBatch, rule: str, characters: np.ndarray | None = None
) -> np.ndarray:
    """Priorities float64[rows]; -inf where a time or score is missing. characters: the lengths of
    the texts, int64[rows], where they are known."""
    name, _, score = rule.partition(":")
    if name == "longest":
        if characters is not None:
            return characters.astype(float)
        return compared_characters(*text_buffers(batch.column("text"))).astype(float)
    if name == "first":
        return np.zeros(batch.num_rows)
    if name == "best":
        values = score_values(batch.column("scores"), score)
    else:
        micros = batch.column("crawl_time").cast(pa.int64())
        values = micros.to_numpy(zero_copy_only=False).astype(float)  # null becomes NaN
    return np.where(np.isnan(values), -np.inf, values)


def check_some(priorities: Iterable[np.ndarray], rule: str) -> None:
    """Raise BadData if there are rows and none has the time or score."""
    missing = [bool(np.isneginf(part).all()) for part in priorities if len(part)]
    if missing and all(missing):
        what = "crawl_time" if rule == "newest" else "this score; sabia classify adds scores"
        raise BadData(f"--keep {rule}: no document has {what}")
