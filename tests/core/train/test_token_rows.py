"""Batches of packed rows, against a plain loop over documents."""

import numpy as np
import pyarrow as pa
import pytest

from sabia.core.errors import BadData
from sabia.core.shards import schemas
from sabia.core.train import token_rows
from sabia.core.train.token_rows import read_token_rows


def record(rows: list[dict]) -> pa.RecordBatch:
    batch = pa.RecordBatch.from_pylist(
        rows, pa.schema([f for f in schemas.KINDS["tokens"] if f.name != "id"])
    )
    return schemas.conform(batch, "tokens")


def random_rows(count: int, seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        lengths = rng.integers(1, 6, rng.integers(1, 5)).tolist()
        size = sum(lengths) + int(rng.integers(0, 3))
        rows.append(
            {
                "input_ids": rng.integers(1, 50, size).tolist(),
                "document_lengths": lengths,
                "loss_mask": rng.integers(0, 2, size).astype(bool).tolist(),
                "source": ["web", "books"][number % 2],
            }
        )
    return rows


def by_hand(row: dict, width: int) -> dict[str, list]:
    """What a batch must hold for a row, token by token."""
    size = len(row["input_ids"])
    segments, positions = [0] * width, [0] * width
    place = 0
    for number, length in enumerate(row["document_lengths"], 1):
        for position in range(length):
            segments[place], positions[place] = number, position
            place += 1
    ids = row["input_ids"] + [0] * (width - size)
    targets, mask = [0] * width, [0.0] * width
    for t in range(width - 1):
        targets[t] = ids[t + 1]
        same = segments[t] == segments[t + 1] and segments[t + 1] > 0
        mask[t] = float(same and t + 1 < size and row["loss_mask"][t + 1])
    return {"input_ids": ids, "targets": targets, "loss_mask": mask, "segments": segments,
            "positions": positions}  # fmt: skip


def test_batches_equal_the_loop() -> None:
    rows = random_rows(40)
    made = read_token_rows([record(rows[:25]), record(rows[25:])])
    ordered = [r for r in rows if r["source"] == "web"] + [r for r in rows if r["source"] != "web"]
    numbers = np.array([3, 39, 0, 20, 21])
    batch = made.batch(numbers)
    width = max(len(ordered[n]["input_ids"]) for n in numbers)
    for b, number in enumerate(numbers):
        for name, wanted in by_hand(ordered[number], width).items():
            assert batch[name][b].tolist() == wanted, name
    assert batch["source"].tolist() == [[1, 0], [0, 1], [1, 0], [0, 1], [0, 1]]


def test_fixed_length_pads_behind() -> None:
    made = read_token_rows([record(random_rows(4))])
    short, long = made.batch(np.arange(4)), made.batch(np.arange(4), 64)
    width = short["input_ids"].shape[1]
    for name in ("input_ids", "loss_mask", "segments", "positions"):
        assert np.array_equal(long[name][:, :width], short[name])
        assert not long[name][:, width:].any()


def test_rows_without_mask_and_source() -> None:
    rows = [{"input_ids": [5, 6, 7], "document_lengths": [3]}]
    made = read_token_rows([record(rows)])
    assert made.batch(np.array([0]))["loss_mask"].tolist() == [[1.0, 1.0, 0.0]]
    assert made.unpacked
    assert made.source_names == ("",)


def test_many_sources_are_reported_as_others() -> None:
    rows = [{"input_ids": [1, 2], "document_lengths": [2], "source": f"s{i}"} for i in range(40)]
    made = read_token_rows([record(rows)])
    assert len(made.reported_sources) == token_rows.SOURCES
    codes = made.batch(np.array([0, 30, 31, 39]))["source"].argmax(1)
    assert codes.tolist() == [0, 30, 31, 31]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [1, 2], "document_lengths": [3]}, "documents of 3 tokens in a row of 2"),
        (
            {"input_ids": [1, 2], "document_lengths": [2], "loss_mask": [True]},
            "not as long as its input_ids",
        ),
        ({"input_ids": [1, 2], "document_lengths": [2, -1]}, "a document of -1 tokens"),
    ],
)
def test_refusals(row: dict, reason: str) -> None:
    with pytest.raises(BadData, match=reason):
        read_token_rows([record([row])])


def test_no_rows() -> None:
    with pytest.raises(BadData, match="no token rows"):
        read_token_rows([])
