"""Token rows with random access, and batches of them.

The rows are those of row files (core.shards.token_rows), of which a batch reads its own rows and
what locates them. Row numbers go through the sources in turn: source by source, in each
file by file, in the order of the shards. Batches are built with array operations: segments number
the documents of a row from 1 (0 is padding), positions restart in each, and a token's target is the
next token of the same document; a token's `loss_mask` says whether that token is a target.
"""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from sabia.core.errors import BadData
from sabia.core.shards.token_rows.arrow_messages import BufferBytes
from sabia.core.shards.token_rows.row_file import RowFile
from sabia.core.shards.token_rows.row_writer import RowWriter

SOURCES = 32  # losses are reported for this many sources, the last of which holds all others
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class TokenRows:
    """The rows of all files; raises BadData if there are none."""

    files: tuple[RowFile, ...]

    def __post_init__(self) -> None:
        if not self.tokens:
            raise BadData("no token rows (expected at least one row of tokens)")

    def __len__(self) -> int:
        return sum(self.source_sizes)

    @cached_property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return sum(file.index.tokens for file in self.files)

    @cached_property
    def row_length(self) -> int:
        """Length of the longest row."""
        return max(file.index.row_length for file in self.files)

    @cached_property
    def unpacked(self) -> bool:
        """True if no row holds more than one document."""
        return all(file.index.single for file in self.files)

    @cached_property
    def largest_id(self) -> int:
        """The largest token id of the files that know theirs; see `check_ids` for the others."""
        return max(file.index.largest_id or 0 for file in self.files)

    @cached_property
    def source_names(self) -> tuple[str, ...]:
        """The sources, in the order of their first rows."""
        return tuple(dict.fromkeys(name for file in self.files for name in file.sources))

    @cached_property
    def source_sizes(self) -> tuple[int, ...]:
        """Rows of each source."""
        ends = np.concatenate([[0], self._runs[0]])
        code = self._runs[1]
        return tuple(np.bincount(code, np.diff(ends), len(self.source_names)).astype(int).tolist())

    @cached_property
    def _runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """For each run of rows of a source in a chunk, in the order of row numbers: the
        number after the last row, the source, the file, the chunk in it, and how many rows of the
        chunk are before the first one if those are ordered by source; int64[runs] each."""
        code = {name: number for number, name in enumerate(self.source_names)}
        parts = []
        for number, file in enumerate(self.files):
            *_, source, rows = file.index.entries.T
            sources = np.array([code[name] for name in file.sources], np.int64)
            chunk, before = file.index.chunk_of_entry, np.cumsum(rows) - rows
            before = before - file.index.first_row[chunk]
            parts.append([sources[source], np.full(len(rows), number), chunk, before, rows])
        code_of, of_file, batch, before, rows = np.concatenate(parts, 1, dtype=np.int64)
        order = np.argsort(code_of, kind="stable")
        columns = (code_of, of_file, batch, before)
        return np.cumsum(rows[order]), *(column[order] for column in columns)

    def _located(self, numbers: np.ndarray) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
        """The rows by chunk: (file, chunk in it, the rows' numbers in the chunk, which of
        `numbers` they are)."""
        ends, _, of_file, batch, before = self._runs
        numbers = np.asarray(numbers, np.int64)
        run = np.searchsorted(ends, numbers, side="right")
        starts = np.concatenate([[0], ends[:-1]])
        position = before[run] + numbers - starts[run]
        order = np.lexsort((batch[run], of_file[run]))
        keys = np.stack([of_file[run], batch[run]])[:, order]
        changes = 1 + np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(0))
        for which in np.split(order, changes):
            if len(which):
                file, number = int(of_file[run[which[0]]]), int(batch[run[which[0]]])
                rows = self.files[file].batch(number).order[position[which]]
                yield file, number, rows, which

    def located(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The file of each row number, and the row's number in its shard, int64[B] each."""
        of_file, in_shard = np.zeros((2, len(numbers)), np.int64)
        for file, batch, rows, which in self._located(numbers):
            of_file[which], in_shard[which] = file, self.files[file].index.first_row[batch] + rows
        return of_file, in_shard

    def row_sizes(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of each row, int64[B]."""
        sizes = np.zeros(len(numbers), np.int64)
        for file, batch, rows, which in self._located(numbers):
            sizes[which] = self.files[file].batch(batch).size[rows]
        return sizes

    @property
    def reported_sources(self) -> tuple[str, ...]:
        """Names for the columns of a batch's `source`."""
        if len(self.source_names) <= SOURCES:
            return self.source_names
        return (*self.source_names[: SOURCES - 1], "(others)")

    def batch(self, rows: np.ndarray, length: int | None = None) -> Batch:
        """The rows (numbers in source order) as a batch of arrays [B, T], T the longest of them.

        input_ids, targets, segments, positions int32; loss_mask float32 (1 where the target
        counts); source float32 [B, S], one-hot.
        """
        located = list(self._located(rows))
        width = 1
        for file, number, local, _ in located:  # all reads begin before the first is waited for
            part = self.files[file].batch(number)
            width = max(width, int(part.size[local].max()))
            for row in local.tolist():
                part.will_need(row)
        width = length or width
        ids = np.zeros((len(rows), width), np.int32)
        counts = np.ones((len(rows), width), bool)  # whether a token's loss counts
        documents = [np.zeros(0, np.int32)] * len(rows)
        for file, number, local, which in located:
            read = self.files[file].read(number, local.tolist())
            for index, (tokens, lengths, mask) in zip(which.tolist(), read, strict=True):
                ids[index, : len(tokens)] = tokens[:width]
                documents[index] = lengths
                if mask is not None:
                    counts[index, : len(tokens)] = mask[:width]
        segments, positions = _documents(documents, width)
        targets, has_target = np.zeros_like(ids), np.zeros(ids.shape, bool)
        targets[:, :-1] = ids[:, 1:]
        # the next token is in the same document, which is not padding
        has_target[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        has_target[:, :-1] &= counts[:, 1:]
        batch = {"input_ids": ids, "targets": targets, "loss_mask": has_target.astype(np.float32)}
        return batch | {"segments": segments, "positions": positions, "source": self._one_hot(rows)}

    def source_of(self, rows: np.ndarray) -> np.ndarray:
        """Index of each row's source."""
        return np.searchsorted(np.cumsum(self.source_sizes), rows, side="right")

    def _one_hot(self, rows: np.ndarray) -> np.ndarray:
        code = np.minimum(self.source_of(rows), SOURCES - 1)
        return np.eye(len(self.reported_sources), dtype=np.float32)[code]


def _documents(documents: list[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
    """(segments, positions) [B, width] of rows of these document lengths; 0 after the last one."""
    counts = np.array([len(lengths) for lengths in documents], np.int64)  # [B]
    row = np.repeat(np.arange(len(counts)), counts)  # [documents of the batch]
    lengths = np.concatenate([np.zeros(0, np.int64), *documents]).astype(np.int64)
    total = np.cumsum(lengths)
    # [B] tokens of the rows before
    tokens_before = np.concatenate([[0], total])[np.cumsum(counts) - counts]
    begins = total - lengths - tokens_before[row]  # column at which each document starts
    ends = np.zeros(len(counts), np.int64)  # [B] end of each row's last document
    np.maximum.at(ends, row, begins + lengths)
    starts_at = np.zeros((len(counts), width + 1), np.int32)
    # [B, T + 1]: how many documents start at a column; empty ones do not count
    np.add.at(starts_at, (row, np.minimum(begins, width)), (lengths > 0).astype(np.int32))
    column = np.arange(width)
    in_document = column < ends[:, None]
    segments = np.where(in_document, np.cumsum(starts_at[:, :width], 1), 0).astype(np.int32)
    # [B, T]: start of the document that a column is in
    origin = np.maximum.accumulate(np.where(starts_at[:, :width] > 0, column, 0), 1)
    return segments, np.where(in_document, column - origin, 0).astype(np.int32)


def read_token_rows(batches: Iterable[pa.RecordBatch]) -> TokenRows:
    """Token records as rows in memory; raises BadData if lengths do not match."""
    held = io.BytesIO()
    writer = RowWriter(held)
    for batch in batches:
        writer.add(batch)
    writer.close()
    return TokenRows((RowFile.of_bytes(BufferBytes(held.getbuffer(), "token rows")),))


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raise BadData if an id of a batch is not in the model's vocabulary."""
    lowest, largest = int(ids.min(initial=0)), int(ids.max(initial=0))
    if lowest < 0 or largest >= vocab_size:
        raise BadData(
            f"token id {largest if lowest >= 0 else lowest} in the rows (expected below the model's"
            f" vocabulary of {vocab_size}; were the rows made by another tokenizer? A model gets "
            "new tokens only from a tokenizer that tokenize --extend made of its own)"
        )
