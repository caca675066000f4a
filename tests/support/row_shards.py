"""Token records drawn at random, the shards that hold them, and their batches."""

from pathlib import Path

import numpy as np
import pyarrow as pa
from sparse_rows import SCHEMA

from sabia.core.shards.inputs import from_path
from sabia.core.shards.token_rows.row_store import open_row_files
from sabia.core.train.token_rows import TokenRows


def records(rng: np.random.Generator, count: int, masks: bool = True) -> pa.Table:
    rows = []
    for number in range(count):
        lengths = rng.integers(0, 9, rng.integers(1, 7)).tolist()
        size = max(1, sum(lengths) + int(rng.integers(0, 4)))
        mask = rng.integers(0, 2, size).astype(bool).tolist() if masks else None
        rows.append(
            {"input_ids": rng.integers(0, 100_000, size).tolist(), "document_lengths": lengths,
             "loss_mask": mask, "source": ["web", "books", "code"][number * number % 3]}
        )  # fmt: skip
    return pa.Table.from_pylist(rows, SCHEMA)


def opened(path: Path, folder: Path, jobs: int = 1) -> TokenRows:
    files = open_row_files(from_path(str(path), "tokens"), folder, jobs, lambda *_: None)
    return TokenRows(tuple(files))


def same_batches(one: TokenRows, other: TokenRows) -> None:
    assert one.source_sizes == other.source_sizes
    assert one.source_names == other.source_names
    assert (one.tokens, one.row_length) == (other.tokens, other.row_length)
    numbers = np.random.default_rng(1).permutation(len(one))
    for length in (None, one.row_length + 3):
        a, b = one.batch(numbers, length), other.batch(numbers, length)
        for name, array in a.items():
            assert array.dtype == b[name].dtype
            assert np.array_equal(array, b[name]), name
