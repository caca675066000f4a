"""What counts as input in a folder: files below it, names left out, columns from folder names."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sabia.core.errors import UsageError
from sabia.core.shards.inputs import from_path


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            pq.write_table(pa.table({"text": [name]}), folder / name)
        else:
            (folder / name).write_text(json.dumps({"text": name}) + "\n")


def read(folder: Path, given: str = "") -> list[str]:
    sources = from_path(given or str(folder), "document")
    return [t for s in sources for b in s.batches() for t in b.column("text").to_pylist()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    put(tmp_path / "in", "b.parquet", "a.jsonl", "sub/c.parquet", "sub/deeper/d.jsonl", "a/z.jsonl")
    return tmp_path / "in"


EXPECTED = ["a/z.jsonl", "a.jsonl", "b.parquet", "sub/c.parquet", "sub/deeper/d.jsonl"]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_folders_are_read_below_and_names_leave_out(folder: Path, scheme: str, capfd) -> None:
    put(folder, "_x.parquet", ".y.parquet", "_t/e.parquet", ".h/e.parquet", "o.rejects/e.parquet",
        "sub/_u/e.jsonl", "_manifest.json", "_tokenizer/tokenizer.json")  # fmt: skip
    (folder / "notes.txt").write_text("not records")
    assert read(folder, f"{scheme}{folder}") == EXPECTED
    said = capfd.readouterr().err
    for name in ("_x.parquet", "_t/", "o.rejects/", "sub/_u/", "notes.txt"):
        assert name in said
    assert ".y" not in said and "_manifest" not in said and "_tokenizer" not in said


def test_what_earlier_versions_put_beside_shards_is_no_input(folder: Path) -> None:
    put(folder, "out/part-00000.parquet", "out/manifest.json", "out/rejects/part-00000.parquet",
        "out/tokenizer/tokenizer.json", "out/tokenizer/training.json", "o.rejects.parquet",
        "sabia-classify.rejects-77.parquet")  # fmt: skip
    assert read(folder) == sorted([*EXPECTED, "out/part-00000.parquet"], key=lambda p: p.split("/"))


def test_folders_of_such_names_that_are_something_else_are_read(folder: Path) -> None:
    put(folder, "rejects/e.parquet", "tokenizer/f.parquet")
    assert set(read(folder)) == {*EXPECTED, "rejects/e.parquet", "tokenizer/f.parquet"}


def test_a_named_file_is_read_whatever_its_name(folder: Path) -> None:
    put(folder, "o.rejects/_e.parquet")
    assert read(folder / "o.rejects" / "_e.parquet") == ["o.rejects/_e.parquet"]
    with pytest.raises(UsageError, match="no input files in it"):
        read(folder / "o.rejects")


def test_linked_folders_are_read_once(folder: Path, tmp_path: Path) -> None:
    put(tmp_path / "other", "e.jsonl")
    (folder / "link").symlink_to(tmp_path / "other")
    (folder / "sub" / "loop").symlink_to(folder)
    assert sorted(read(folder)) == sorted([*EXPECTED, "e.jsonl"])


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_folder_names_become_columns(tmp_path: Path, form: str) -> None:
    names = ("language=pt/day=3%2F4", "language=__HIVE_DEFAULT_PARTITION__/day=5")
    put(tmp_path / "in", *(f"{name}/x.{form}" for name in names))
    (tmp_path / "in/language=de").mkdir()
    own = pa.table({"text": ["own", "none"], "language": ["en", None]})
    pq.write_table(own, tmp_path / "in/language=de/x.parquet")
    sources = from_path(str(tmp_path / "in"), "document")
    rows = [row for s in sources for b in s.batches() for row in b.to_pylist()]
    said = {(row["language"], row.get("day")) for row in rows}
    assert said == {("pt", "3/4"), (None, "5"), ("en", None), ("de", None)}
    assert len({source.fingerprint() for source in sources}) == 3
    (batch,) = sources[-1].batches(columns=["id", "day"])
    assert batch.column("day").to_pylist() == ["3/4"]


def test_globs_leave_out_what_folders_leave_out(folder: Path) -> None:
    put(folder, "_x.parquet", "o.rejects/e.parquet", "manifest.json", "_tokenizer/t.json")
    assert read(folder, f"{folder}/*.parquet") == ["b.parquet"]
    assert sorted(read(folder, f"{folder}/*")) == sorted([*EXPECTED, "manifest.json"])
    assert read(folder, f"{folder}/_*.parquet") == ["_x.parquet"]
    assert read(folder, f"{folder}/*/c.parquet") == ["sub/c.parquet"]


def test_records_of_token_files_are_not_shards(tmp_path: Path) -> None:
    """tokenize --format arrow and megatron write a record of each part."""
    put(tmp_path / "in", "data-00001.arrow", "part-00001.json", "part-00002.json", "state.json",
        "sub/part-00003.bin", "sub/part-00003.json")  # fmt: skip
    names = [source.name for source in from_path(str(tmp_path / "in"), "document")]
    assert [Path(name).name for name in names] == ["data-00001.arrow", "part-00002.json"]
