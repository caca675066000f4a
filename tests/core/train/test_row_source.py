"""The batches of a run, read ahead by a thread, against those that are read when needed."""

import threading
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from sabia.core.errors import BadData
from sabia.core.shards.order import DataOrder
from sabia.core.train.token_rows import RowSource, TokenRows, read_token_rows

ROWS, BATCH, VOCABULARY = 60, 4, 500


def rows(last_id: int = 1) -> TokenRows:
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 9, ROWS).tolist()
    ids = [rng.integers(0, VOCABULARY, size).tolist() for size in sizes]
    ids[-1][0] = last_id
    columns = [pa.array(ids, pa.list_(pa.int32())), pa.array([[n] for n in sizes])]
    lists = columns[1].cast(pa.list_(pa.int32()))
    names = ["input_ids", "document_lengths"]
    return read_token_rows([pa.RecordBatch.from_arrays([columns[0], lists], names)])


def source(read_ahead: bool, last_id: int = 1, seed: int = 3) -> RowSource:
    stepper = SimpleNamespace(
        row_part=(1, 2), fixed_shapes=False, spec=SimpleNamespace(vocab_size=VOCABULARY)
    )
    made = rows(last_id)
    order = DataOrder(made.source_sizes, seed)
    return RowSource(made, order, BATCH, stepper, read_ahead=read_ahead)  # type: ignore[arg-type]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "next-batch" in thread.name]


def test_batches_that_are_read_ahead_are_the_same() -> None:
    """Also after a rewind, a repeated step, and rows that are skipped meanwhile."""
    plain, ahead = source(False), source(True)
    for step in (0, 1, 2, 2, 3, 1, 2, 3, 9, 10, 11):
        if step == 3:
            entries = [{"row": int(number)} for number in plain.numbers(4)[:3]]
            entries += [{"row": int(plain.numbers(3)[1])}]
            plain.skip(entries)
            ahead.skip(entries)
        a, b = plain.batch(step), ahead.batch(step)
        assert list(a) == list(b)
        for name, array in a.items():
            assert np.array_equal(array, b[name]), (step, name)
    assert threads()
    ahead.close()
    assert not threads()


def test_an_error_is_raised_at_its_step() -> None:
    made = source(True, last_id=VOCABULARY)
    bad = next(step for step in range(ROWS) if ROWS - 1 in made.numbers(step)[1::2])
    for step in range(bad):
        made.batch(step)
    with pytest.raises(BadData, match=f"token id {VOCABULARY} in the rows"):
        made.batch(bad)
    made.close()
    assert not threads()


def test_negative_ids_are_refused() -> None:
    made = source(False, last_id=-7)
    with pytest.raises(BadData, match="token id -7"):
        for step in range(ROWS):
            made.batch(step)
