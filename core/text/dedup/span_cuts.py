"""Duplicated parts of documents: the bytes that are cut, and where the kept copy is.

A cut is a range of bytes [start, stop) of the text of a row, both at character boundaries, and the
row and byte where the kept copy starts. Cuts of a row are disjoint and ascending. They are passed
to other processes through files, as decisions about whole documents are (removal_pass).
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.shards.atomic import atomic_directory
from sabia.core.shards.mapping import ShardContext
from sabia.core.shards.sources import Source
from sabia.core.shards.spools import IdSpool, Spool
from sabia.core.text.dedup.phases import Decision
from sabia.core.text.dedup.removal_pass import (
    OpenSpools,
    numbered,
    read_record,
    write_record,
    write_table,
)
from sabia.core.text.removed_rows import Repeatable, put_column, put_columns
from sabia.core.text.score_column import with_scores

CUT = np.dtype([("row", "i8"), ("start", "i8"), ("stop", "i8"), ("kept", "i8"), ("from", "i8")])
PLAN_FILES = "cuts", "ids"
SCORE = "duplicate_share"
_PIECE = 1 << 20  # cuts read at a time
_SPAN = pa.struct(
    [("start", pa.int64()), ("length", pa.int64()),
     ("kept_id", pa.string()), ("kept_start", pa.int64())]
)  # fmt: skip


@dataclass(frozen=True)
class CutPolicy:
    """What happens to documents with duplicated spans; `reason` is that of the removed rows.

    cut: spans are removed, and so are documents of which more than `share` of the bytes are
    duplicated, or of which only white space would be left. drop: documents above `share` are
    removed, others are unchanged. mark: nothing is removed; spans and share become columns.
    """

    action: str
    share: float
    reason: str


@dataclass(frozen=True)
class Cuts:
    """All cuts by row, and the ids of the rows with the kept copies, readable by path."""

    path: str
    count: int
    ids_path: str
    starts: tuple[int, ...]  # the first row of each source
    policy: CutPolicy
    open_spools: OpenSpools

    @classmethod
    def write(
        cls, spool: Spool, count: int, ids: IdSpool, policy: CutPolicy, directory: Path | None
    ) -> "Cuts":
        """From `count` cuts in a spool, by rising row and start; `kept` holds row numbers.

        Written into the directory (atomically) or into unnamed files.
        """
        spool.file.flush()
        kept = spool.array(CUT, (count,))["kept"]
        parts = [np.unique(kept[low : low + _PIECE]) for low in range(0, count, _PIECE)]
        rows = np.unique(np.concatenate([np.empty(0, np.int64), *parts]))
        columns = {"row": pa.array(rows), "id": ids.take(rows)}
        starts = tuple(ids.starts.tolist())
        if directory is None:
            named = Spool()
            write_table(named, **columns)
            return cls(spool.path, count, named.path, starts, policy, OpenSpools(spool, named))
        with atomic_directory(directory) as temporary:
            shutil.copyfile(spool.path, temporary / "cuts")
            write_table(Spool(str(temporary / "ids")), **columns)
            write_record(temporary / "cuts.json", PLAN_FILES, count=count, starts=starts)
        return cls.open(directory, policy)

    @classmethod
    def open(cls, directory: Path, policy: CutPolicy) -> "Cuts":
        """Cuts that were written into a directory; see `read_record`."""
        record = read_record(directory / "cuts.json", PLAN_FILES)
        cuts, ids = (str(directory / name) for name in PLAN_FILES)
        return cls(cuts, record["count"], ids, tuple(record["starts"]), policy, OpenSpools())

    def decision(self, sources: Sequence[Source]) -> Decision:
        """What the policy does with the documents; see phases.Plan."""
        parts = {
            index: Repeatable(partial(_removed, source, self, index))
            for index, source in enumerate(sources)
            if len(self.of_rows(*self.starts[index : index + 2]))
        }
        return Decision(partial(transform, cuts=self), parts)

    def of_rows(self, first: int, last: int) -> np.ndarray:
        """CUT[c] of rows first … last - 1."""
        if not self.count:
            return np.empty(0, CUT)
        everything = np.memmap(self.path, CUT, "r", shape=(self.count,))
        low, high = np.searchsorted(everything["row"], (first, last))
        return np.array(everything[low:high])

    def kept_ids(self, rows: np.ndarray) -> pa.Array:
        """Ids of rows that keep copies."""
        named = pa.ipc.open_file(pa.memory_map(self.ids_path)).get_batch(0)
        return named.column("id").take(pa.array(np.searchsorted(named.column("row"), rows)))


@dataclass(frozen=True)
class _CutBatch:
    """A batch, its cuts with row numbers within the batch, and which rows are removed whole."""

    batch: pa.RecordBatch
    cuts: np.ndarray
    share: np.ndarray
    whole: np.ndarray
    left: pa.Array | None  # the texts without their cuts, if any are to be cut

    @property
    def parts(self) -> np.ndarray:
        """Cuts of rows that are not removed whole."""
        return self.cuts[~self.whole[self.cuts["row"]]]


def _cut_batches(
    batches: Iterator[pa.RecordBatch], cuts: Cuts, index: int, name: str
) -> Iterator[_CutBatch]:
    (low, high), policy = cuts.starts[index : index + 2], cuts.policy
    for first, batch in numbered(batches, low, high, name):
        mine = cuts.of_rows(first, first + batch.num_rows)
        mine["row"] -= first
        check_cuts(batch.column("text"), mine, f"{name}, rows from {first - low}")
        sizes = np.diff(text_buffers(batch.column("text"))[1])
        removed = np.bincount(mine["row"], mine["stop"] - mine["start"], minlength=batch.num_rows)
        share = removed / np.maximum(sizes, 1)
        whole, left = np.zeros(batch.num_rows, bool), None
        if policy.action != "mark" and len(mine):
            whole = share > policy.share
        if policy.action == "cut" and len(mine):
            left = without(batch.column("text"), mine)
            blank = pc.equal(pc.binary_length(pc.utf8_ltrim_whitespace(left)), 0)
            whole |= (removed > 0) & np.asarray(blank)
        yield _CutBatch(batch, mine, share, whole, left)


def check_cuts(texts: pa.Array, cuts: np.ndarray, name: str) -> None:
    """Raise AssertionError unless every cut is a range of whole characters of its text, after the
    cut before it. Anything else would corrupt documents: it is an error of this program."""
    data, bounds = text_buffers(texts)
    row, start, stop = cuts["row"], cuts["start"], cuts["stop"]
    size = np.diff(bounds)[row]
    bad = (start < 0) | (start >= stop) | (stop > size)
    bad[1:] |= (row[1:] < row[:-1]) | ((row[1:] == row[:-1]) & (start[1:] < stop[:-1]))
    for edge in (start, stop):
        inside = np.flatnonzero(~bad & (edge < size))
        bad[inside] = (data[(bounds[row] + edge)[inside]] & 0xC0) == 0x80
    if bad.any():
        number = int(np.flatnonzero(bad)[0])
        cut = f"bytes {start[number]} to {stop[number]} of a text of {size[number]} bytes"
        raise AssertionError(
            f"{name}: the cut {cut} (row {row[number]}) is not a range of whole characters after"
            " the cut before it; nothing of this shard was written"
        )


def without(texts: pa.Array, cuts: np.ndarray) -> pa.Array:
    """The texts without the cut bytes."""
    data, bounds = text_buffers(texts)
    stays = ~_inside(bounds, cuts)
    removed_bytes = np.bincount(cuts["row"], cuts["stop"] - cuts["start"], minlength=len(texts))
    ends = np.concatenate(([0], np.cumsum(np.diff(bounds) - removed_bytes.astype(np.int64))))
    return _strings(data[bounds[0] : bounds[-1]][stays], ends)


def _pieces(texts: pa.Array, cuts: np.ndarray) -> pa.Array:
    """The bytes of each cut as a string."""
    data, bounds = text_buffers(texts)
    ends = np.concatenate(([0], np.cumsum(cuts["stop"] - cuts["start"])))
    return _strings(data[bounds[0] : bounds[-1]][_inside(bounds, cuts)], ends)


def _inside(bounds: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """bool[bytes]: True where a byte of the texts between bounds[n + 1] is cut."""
    edges = np.empty(2 * len(cuts) + 2, np.int64)
    edges[0], edges[-1] = bounds[0], bounds[-1]
    edges[1:-1:2] = bounds[cuts["row"]] + cuts["start"]
    edges[2:-1:2] = bounds[cuts["row"]] + cuts["stop"]
    return np.repeat(np.arange(len(edges) - 1) % 2 == 1, np.diff(edges))


def _strings(data: np.ndarray, bounds: np.ndarray) -> pa.Array:
    offsets, text = pa.py_buffer(bounds.astype(np.int32)), pa.py_buffer(np.ascontiguousarray(data))
    return pa.Array.from_buffers(pa.string(), len(bounds) - 1, [None, offsets, text])


def transform(
    batches: Iterator[pa.RecordBatch], context: ShardContext, cuts: Cuts
) -> Iterator[pa.RecordBatch]:
    """Documents without duplicated spans, or with columns that describe them, by the policy."""
    policy = cuts.policy
    for judged in _cut_batches(batches, cuts, context.index, context.name):
        batch = judged.batch
        spans = judged.cuts if policy.action == "mark" else judged.parts
        if len(spans) and policy.action != "drop":
            context.count("spans", len(spans))
            context.count("bytes in spans", int((spans["stop"] - spans["start"]).sum()))
        if judged.whole.any():
            sizes = np.diff(text_buffers(batch.column("text"))[1])
            context.count("documents removed", int(judged.whole.sum()))
            context.count("bytes removed with them", int(sizes[judged.whole].sum()))
        if policy.action == "mark":
            yield _marked(judged, cuts)
            continue
        if judged.left is not None:
            batch = put_column(batch, "text", judged.left)
        yield batch.filter(pa.array(~judged.whole))


def _marked(judged: _CutBatch, cuts: Cuts) -> pa.RecordBatch:
    """`duplicate_spans` (bytes, and where the copy is kept) and the share among the scores."""
    own, rows = judged.cuts, judged.batch.num_rows
    start, length = pa.array(own["start"]), pa.array(own["stop"] - own["start"])
    columns = [start, length, cuts.kept_ids(own["kept"]), pa.array(own["from"])]
    spans = pa.StructArray.from_arrays(columns, fields=list(_SPAN))
    ends = np.concatenate(([0], np.cumsum(np.bincount(own["row"], minlength=rows))))
    lists = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), spans)
    scores = with_scores(judged.batch.column("scores"), {SCORE: judged.share})
    return put_columns(judged.batch, {"duplicate_spans": lists, "scores": scores})


def _removed(source: Source, cuts: Cuts, index: int) -> Iterator[pa.RecordBatch]:
    """The removed rows of one source: one for each cut, its text the bytes cut, and one for each
    document that is removed whole."""
    for one in _cut_batches(source.batches(), cuts, index, source.name):
        rows = _removed_rows(one, cuts)
        if rows.num_rows:
            yield rows


def _removed_rows(one: _CutBatch, cuts: Cuts) -> pa.RecordBatch:
    policy = cuts.policy
    parts = one.parts if policy.action == "cut" else one.cuts[:0]
    whole = np.flatnonzero(one.whole)
    texts = one.batch.column("text")
    sizes = np.diff(text_buffers(texts)[1])[whole]
    order = np.argsort(np.concatenate((parts["row"], whole)), kind="stable")
    nothing = pa.nulls(len(whole), pa.string())
    reasons = [policy.reason] * len(parts) + [f"{policy.reason} document"] * len(whole)
    columns: dict[str, Any] = {
        "text": pa.concat_arrays([_pieces(texts, parts), texts.take(pa.array(whole))]),
        "reason": pa.array(reasons, pa.string()),
        "start": pa.array(np.concatenate((parts["start"], np.zeros(len(whole), np.int64)))),
        "length": pa.array(np.concatenate((parts["stop"] - parts["start"], sizes))),
        "kept_id": pa.concat_arrays([cuts.kept_ids(parts["kept"]), nothing]),
        "kept_start": pa.concat_arrays([pa.array(parts["from"]), nothing.cast(pa.int64())]),
    }
    rows = one.batch.take(pa.array(np.concatenate((parts["row"], whole))))
    return put_columns(rows, columns).take(pa.array(order))
