"""Rows that dedup keeps between its passes: the same output, each shard decoded once."""

import json
import os
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import stage
from planted import make_texts

from sabia.core.errors import BadData
from sabia.core.shards.inputs import from_path
from sabia.core.shards.sources import Source
from sabia.core.text import recorded_rows


def shards(folder: Path) -> list[str]:
    """Parquet with more columns, JSON lines, Parquet with rows that are rejected, Arrow."""
    folder.mkdir()
    texts = make_texts(random.Random(3), 400, 300)[0]
    cut = len(texts) // 4
    parts = [texts[i * cut : (i + 1) * cut] for i in range(4)]
    for number, part in enumerate(parts[:2]):
        kind = pa.array([text[:1] for text in part])
        kind = kind.dictionary_encode() if number else kind
        table = pa.table({"text": part, "kind": kind, "n": range(cut)})
        pq.write_table(table, folder / f"a{number}.parquet", row_group_size=33)
    pq.write_table(pa.table({"text": [*parts[2], None]}), folder / "b.parquet")
    lines = [json.dumps({"text": text, "n": n, "x": [1, n]}) for n, text in enumerate(parts[3])]
    (folder / "c.jsonl").write_text("\n".join([*lines, "{", ""]))
    with pa.ipc.new_stream(str(folder / "d.arrows"), pa.schema([("text", pa.string())])) as writer:
        writer.write_batch(pa.record_batch({"text": texts[:50]}))
    return [str(folder / name) for name in sorted(os.listdir(folder))]


@pytest.mark.parametrize("most", [0, 60_000, 1 << 30])
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"jobs": 2}, marks=pytest.mark.slow), {"keep": "first"}, {"method": "exact"}],
    ids=str,
)
def test_the_same_rows_and_rejects_whatever_is_kept(
    options: dict, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, made = shards(tmp_path / "in"), []
    for limit in (-1, most):
        monkeypatch.setattr(recorded_rows, "MOST_BYTES", limit)
        (folder := tmp_path / f"limit{limit}").mkdir()
        stage("dedup", inputs=paths, out=folder / "out", removed=folder / "gone.parquet",
              rejects=folder / "rejects", engine="numpy", **options)  # fmt: skip
        files = sorted(folder.rglob("*.parquet"))
        made.append([(str(path.relative_to(folder)), pq.read_table(path)) for path in files])
    assert len(made[0]) >= 8
    assert [name for name, _ in made[0]] == [name for name, _ in made[1]]
    assert all(one.equals(two) for (_, one), (_, two) in zip(*made, strict=True))


def test_each_shard_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, reads, raw = shards(tmp_path / "in"), Counter[str](), Source.raw

    def counted(self: Source, *words: object, **options: object) -> object:
        reads[os.path.basename(self.name)] += 1
        return raw(self, *words, **options)

    monkeypatch.setattr(Source, "raw", counted)
    stage("dedup", inputs=paths[:1], out=tmp_path / "out.parquet", engine="numpy")
    assert reads == {"a0.parquet": 1}


def test_damaged_rows_are_refused(tmp_path: Path) -> None:
    path = shards(tmp_path / "in")[0]
    recorder = recorded_rows.RowRecorder(from_path(path, "document"), ["id", "text"])
    rows = [row for batch in recorder.first_pass[0].batches() for row in batch.to_pylist()]
    again = recorder.again()[0]
    assert [row for batch in again.batches() for row in batch.to_pylist()] == rows
    assert [row["id"] for batch in again.batches(["id"]) for row in batch.to_pylist()] == [
        row["id"] for row in rows
    ]
    file = recorder._spool.file
    for at in random.Random(1).sample(range(file.seek(0, 2)), 20):
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 4]))
        file.flush()
        with pytest.raises(BadData, match=r"temporary file are damaged; run again"):
            list(again.batches())
        file.seek(at)
        file.write(byte)
        file.flush()
