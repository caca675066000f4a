"""Conversations rendered once into token rows, against a plain loop over all of them."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sabia.core.errors import BadData
from sabia.core.generate.chat import render_rows
from sabia.core.recipes import chat_rows as module
from sabia.core.recipes.chat_rows import chat_rows
from sabia.core.shards.inputs import from_path
from sabia.core.shards.token_rows.row_file import RowFile
from sabia.core.text.tokenize.packing import best_fit
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe
from sabia.core.train.token_rows import TokenRows, read_token_rows

LENGTH = 64


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    made = train_bpe([f"{i} and {i} make {2 * i}, said the owl" for i in range(60)], 300)
    made.save(folder := tmp_path_factory.mktemp("tokenizer"))
    return str(folder)


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """Three shards, a third of whose conversations cannot be used, for four reasons."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("chats")
    for shard in range(3):
        lines = []
        for number in range(int(rng.integers(80, 160))):
            turns = [{"role": "user", "content": f"{number} and {shard}" * int(rng.integers(1, 9))}]
            turns += [{"role": "assistant", "content": "make " * int(rng.integers(1, 12))}]
            broken = {"messages": [turns[:1], None, turns, turns][number % 4]}
            lines.append(json.dumps({"messages": turns} if number % 3 else broken))
            if number % 20 == 7:
                lines.append("not JSON")
        (folder / f"{shard}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def plain_loop(chats: Path, path: str, pack: bool, window: int) -> tuple[TokenRows, list]:
    tokenizer, rejected, rendered = load_tokenizer(path), [], []
    for source in from_path(str(chats), "chat"):

        def refuse(row: dict, reason: str, name: str = source.name) -> None:
            rejected.append((json.dumps(row, sort_keys=True), reason, name))

        for batch in source.batches(columns=["id", "messages", "tools"], reject=refuse):
            for row in batch.to_pylist():
                try:
                    pairs = render_rows(row["messages"], tokenizer, row["tools"])
                except BadData as error:
                    refuse(row, str(error))
                    continue
                for ids, mask in pairs:
                    if len(ids) > LENGTH:
                        refuse(row, f"{len(ids)} tokens (expected at most --length {LENGTH})")
                    else:
                        rendered.append((ids, mask))
    batches = []
    for start in range(0, len(rendered), window):
        part = rendered[start : start + window]
        bins = best_fit([len(ids) for ids, _ in part], LENGTH) if pack else [
            [number] for number in range(len(part))
        ]  # fmt: skip
        columns = {
            "input_ids": [[t for i in one for t in part[i][0]] for one in bins],
            "document_lengths": [[len(part[i][0]) for i in one] for one in bins],
            "loss_mask": [[t > 0 for i in one for t in part[i][1]] for one in bins],
        }
        named = [module.ROWS.field(name) for name in columns]  # without addresses
        batches.append(pa.RecordBatch.from_pydict(columns, schema=pa.schema(named)))
    return read_token_rows(batches), rejected


def made(chats: Path, tokenizer: str, folder: Path, pack: bool = True, jobs: int = 1) -> tuple:
    rejected: list[tuple] = []

    def keep(row: dict, reason: str, shard: str) -> None:
        rejected.append((json.dumps(row, sort_keys=True), reason, shard))

    sources = from_path(str(chats), "chat")
    return chat_rows(sources, tokenizer, LENGTH, pack, folder, jobs, keep), rejected


@pytest.mark.parametrize("pack", [True, False])
def test_rows_and_rejects_are_those_of_a_loop(
    chats: Path, tokenizer: str, tmp_path: Path, monkeypatch, pack: bool
) -> None:
    monkeypatch.setattr(module, "WINDOW", 32)
    file, rejected = made(chats, tokenizer, tmp_path / "rows", pack)
    rows, expected = plain_loop(chats, tokenizer, pack, 32)
    assert rejected == expected
    assert len({reason.partition(" ")[0] for _, reason, _ in rejected}) >= 4
    numbers = np.random.default_rng(1).permutation(len(rows))
    one, other = TokenRows((file,)).batch(numbers), rows.batch(numbers)
    for name, array in other.items():
        assert np.array_equal(one[name], array), name
    batches = range(len(file.index.first_row) - 1)
    conversations = sum(int(file.batch(number).bounds[-1]) for number in batches)
    predicted = sum(
        int(mask.sum())
        for number in batches
        for _, _, mask in file.read(number, range(len(file.batch(number).at)))
    )
    assert file.index.about == {"conversations": conversations, "predicted": predicted}


def test_a_second_start_renders_nothing(
    chats: Path, tokenizer: str, tmp_path: Path, monkeypatch
) -> None:
    _, first = made(chats, tokenizer, tmp_path / "rows")
    monkeypatch.setattr(module, "render_rows", None)
    file, again = made(chats, tokenizer, tmp_path / "rows")
    assert again == first
    with pytest.raises(TypeError):  # other rows
        made(chats, tokenizer, tmp_path / "rows", pack=False)
    assert [path.suffix for path in (tmp_path / "rows").iterdir()] == [".arrow"]
    assert len(file)


@pytest.mark.slow
def test_workers_make_the_same_file(chats: Path, tokenizer: str, tmp_path: Path) -> None:
    for jobs in (1, 2):
        made(chats, tokenizer, tmp_path / f"{jobs}", jobs=jobs)
    one, other = (next((tmp_path / f"{jobs}").iterdir()).read_bytes() for jobs in (1, 2))
    assert one == other


@pytest.mark.slow
def test_memory_does_not_grow_with_the_conversations(
    tokenizer: str, tmp_path: Path, monkeypatch
) -> None:
    ids = list(range(400))
    monkeypatch.setattr(module, "render_rows", lambda *_: [(ids, ids)])
    monkeypatch.setattr(module, "WINDOW", 1000)  # so that all batches end with a window
    line = json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n"
    peaks = []
    for count in (4_000, 40_000):
        (tmp_path / f"{count}.jsonl").write_text(line * count)
        sources = from_path(str(tmp_path / f"{count}.jsonl"), "chat")
        tracemalloc.start()
        file = chat_rows(sources, tokenizer, 4096, True, tmp_path / "rows", 1, print)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert isinstance(file, RowFile)
        assert file.index.about["conversations"] == count
    assert peaks[1] < 1.1 * peaks[0], peaks
