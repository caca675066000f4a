"""One token row of a shard, with the addresses of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sabia.core.digests import open_parquet
from sabia.core.errors import BadData
from sabia.core.shards.sources import Source
from sabia.core.shards.token_rows.row_index import RowIndex
from sabia.core.shards.token_rows.row_store import index_in_place

ADDRESS_HINT = (
    "run the same tokenize command again with --force: its rows stay the same, and get addresses"
)


def piece_bounds(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """The tokens [start, end) of each document of a row, by the lengths of these."""
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [(end - size, end) for end, size in zip(ends, lengths, strict=True)]


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of a row, which are those of a document from number `offset` on; document
    is None where the row has no addresses."""

    start: int
    end: int
    document: str | None
    offset: int


@dataclass(frozen=True)
class TokenRow:
    """A row of a shard; id: None if it has none."""

    shard: str
    number: int
    id: str | None
    source: str
    ids: np.ndarray
    pieces: Sequence[Piece]

    @classmethod
    def of(cls, shard: str, number: int, row: pa.Table) -> "TokenRow":
        """The row of a table of one row."""
        columns = {name: row.column(name)[0] for name in row.schema.names}
        lengths = columns["document_lengths"].as_py()
        names, offsets = (
            columns[name].as_py() if name in columns else None
            for name in ("document_ids", "document_offsets")
        )
        if names is None or offsets is None:
            names, offsets = [None] * len(lengths), [0] * len(lengths)
        if not len(names) == len(offsets) == len(lengths):
            raise BadData(f"{shard}: row {number} has {len(lengths)} documents, but "
                          f"{len(names)} document_ids and {len(offsets)} document_offsets "
                          "(expected as many)")  # fmt: skip
        pieces = [
            Piece(start, end, name, offset)
            for (start, end), name, offset in zip(
                piece_bounds(lengths), names, offsets, strict=True
            )
        ]
        row_id = columns["id"].as_py() if "id" in columns else None
        source = columns["source"].as_py() if "source" in columns else None
        ids = columns["input_ids"].values.to_numpy()
        return cls(shard, number, row_id, source or "", ids, pieces)

    def piece_at(self, position: int) -> Piece | None:
        """The piece that a token is in; None: it is padding. Raises BadData outside of the row."""
        if not 0 <= position < len(self.ids):
            raise BadData(f"position {position} of a row of {len(self.ids)} tokens (expected 0 to "
                          f"{len(self.ids) - 1})")  # fmt: skip
        return next((p for p in self.pieces if p.start <= position < p.end), None)


def read_row(source: Source, number: int) -> TokenRow:
    """Row `number` of a shard, of which little else is read. Raises BadData if there is none."""
    with source.reading():
        if source.form == "parquet":
            return TokenRow.of(source.name, number, _of_parquet(source, number))
        if (index := index_in_place(source)) is not None:
            return TokenRow.of(source.name, number, _of_arrow(source.name, index, number))
        first = 0
        for batch in source.batches():
            if number < first + batch.num_rows:
                row = pa.Table.from_batches([batch.slice(number - first, 1)])
                return TokenRow.of(source.name, number, row)
            first += batch.num_rows
    raise BadData(f"{source.name}: no row {number} (it has {first:,})")


def _of_parquet(source: Source, number: int) -> pa.Table:
    with source.open() as file:
        parquet = open_parquet(file, source.name, say=False)
        first = 0
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if number < first + rows:
                return parquet.read_row_group(group).slice(number - first, 1)
            first += rows
    raise BadData(f"{source.name}: no row {number} (it has {first:,})")


def _of_arrow(path: str, index: RowIndex, number: int) -> pa.Table:
    if not 0 <= number < index.first_row[-1]:
        raise BadData(f"{path}: no row {number} (it has {index.first_row[-1]:,})")
    chunk = int(np.searchsorted(index.first_row, number, side="right")) - 1
    at, start = index.entries[index.first_entry[chunk], :2].tolist()
    with pa.memory_map(path) as file:
        opens = pa.ipc.open_file if file.read(6) == b"ARROW1" else pa.ipc.open_stream
        file.seek(0)
        schema = opens(file).schema
        file.seek(at)
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(file), schema)
        return pa.Table.from_batches([batch.slice(start + number - int(index.first_row[chunk]), 1)])
