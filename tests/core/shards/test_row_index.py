"""Indexes of token rows: those that stages write, and those of scans."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from row_shards import opened, records, same_batches
from sparse_rows import SCHEMA

from sabia.core.errors import BadData
from sabia.core.shards import schemas
from sabia.core.shards.outputs import FILES, STREAMS
from sabia.core.shards.token_rows import arrow_messages, row_index, row_store
from sabia.core.shards.token_rows.arrow_messages import NotInPlace
from sabia.core.shards.token_rows.row_index import scan, stored_index
from sabia.core.train.token_rows import read_token_rows


def test_a_large_batch_is_located_in_chunks(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(row_index, "CHUNK", 8)
    (folder := tmp_path / "source=news").mkdir()
    rng = np.random.default_rng(3)
    for number in range(10):
        count = int(rng.integers(1, 200))
        table = records(rng, count, masks=bool(number % 2))
        names = [[None, "web", "books"][n] for n in rng.integers(0, 3, count)]
        table = table.set_column(3, "source", pa.array(names, pa.string()))
        with pa.ipc.new_stream(path := folder / f"{number}.arrow", SCHEMA) as stream:
            stream.write_table(table)  # as one batch
        made = opened(path, tmp_path / "cache")
        assert len(made.files[0].index.first_row) == 1 + -(-count // 8)
        filled = table.set_column(3, "source", pa.array([name or "news" for name in names]))
        same_batches(made, read_token_rows(filled.to_batches()))


@pytest.mark.parametrize("formats", [FILES, STREAMS])
def test_stages_write_the_index(formats: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """It is that of a scan, and a first start makes none."""
    rng = np.random.default_rng(0)
    for number in range(6):
        table = records(rng, int(rng.integers(1, 900)), masks=bool(number % 2))
        if number % 3 == 0:
            table = table.set_column(3, "source", pa.array(["a", None] * 800)[: len(table)])
        table = with_ids(table)
        path = str(tmp_path / f"{number}.arrow")
        write_stage(formats, path, table, int(rng.integers(1, 900)))
        shard = arrow_messages.FileBytes(path)
        stored, scanned = stored_index(shard), scan(shard, "web")
        assert stored is not None
        assert np.array_equal(stored.entries, scanned.entries)
        assert [name or "web" for name in stored.sources] == list(scanned.sources)
        for name in ("tokens", "row_length", "single"):
            assert getattr(stored, name) == getattr(scanned, name)
        with monkeypatch.context() as patch:
            patch.setattr(row_store, "scan", None)
            same_batches(
                opened(Path(path), tmp_path / "cache"), read_token_rows(table.to_batches())
            )


def with_ids(table: pa.Table) -> pa.Table:
    """Token records with ids, and without addresses."""
    table = table.add_column(0, "id", pa.array([f"{n}" for n in range(len(table))]))
    batches = table.combine_chunks().to_batches()
    return pa.Table.from_batches([schemas.conform(batch, "tokens") for batch in batches])


def write_stage(formats: Any, path: str, table: pa.Table, rows: int) -> None:
    """An Arrow file (FILES) or stream (STREAMS) as stages write it, given `rows` at a time."""
    with open(path, "wb") as file:
        writer = formats["arrow"](file, table.schema)
        for batch in table.to_batches(max_chunksize=rows):
            writer.write(batch)
        writer.close()


def test_index_of_damaged_and_joined_streams(tmp_path: Path, monkeypatch: Any) -> None:
    """The index of a stream counts only for that stream alone; ids may look like messages."""
    monkeypatch.setattr(arrow_messages, "FIRST_BYTES", 256)  # less than an index
    rng, paths = np.random.default_rng(1), []
    for number in range(3):
        table = with_ids(records(rng, 1500, masks=bool(number % 2)))
        write_stage(STREAMS, path := str(tmp_path / f"{number}.arrow"), table, 700)
        assert len(stored_index(arrow_messages.FileBytes(path)).entries) >= 3
        paths.append(Path(path))
    data = [path.read_bytes() for path in paths]
    joined = tmp_path / "joined.arrow"
    joined.write_bytes(data[0] + data[2])
    shard = arrow_messages.FileBytes(str(joined))
    assert stored_index(shard) is None
    parts = [opened(path, tmp_path / "cache") for path in (paths[0], paths[2])]
    assert scan(shard, "web").tokens == sum(part.tokens for part in parts)
    for size in rng.integers(1, len(data[0]), 20).tolist():
        joined.write_bytes(data[0][:size])
        with pytest.raises((BadData, NotInPlace, OSError)):
            opened(joined, tmp_path / "cache")
    for at in rng.integers(0, 6000, 200).tolist():
        changed = bytearray(data[0])
        changed[-at - 1] ^= 1 << int(rng.integers(8))
        joined.write_bytes(changed)
        with contextlib.suppress(BadData, ValueError):
            index = stored_index(arrow_messages.FileBytes(str(joined)))
            expected = stored_index(arrow_messages.FileBytes(str(paths[0])))
            assert index is None or np.array_equal(index.entries, expected.entries)
