"""JSON lines record what they were made from, so that an equal call finds them complete."""

import gzip
import json
from pathlib import Path

import pytest
from in_process import sabia

CALLS = {"dedup": ["dedup", "--engine", "numpy"], "classify": ["classify", "--where", "id >= '3'"]}
REMOVED = ["", "r/", "r.parquet", "r.arrow", "r.jsonl", "r.jsonl.gz", "r.jsonl.zst"]


def write(path: Path, rows: range) -> Path:
    """Documents of which every fourth repeats another."""
    texts = ({"id": str(i), "text": f"the {i // 4 * 4 if i % 2 else i} fox jumps"} for i in rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in texts))
    return path


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    """The bytes and the time of the last change of all outputs, without the list of a folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns)
            for path in paths if path.name not in ("a.jsonl", "_manifest.json")}  # fmt: skip


@pytest.mark.parametrize("command", CALLS)
@pytest.mark.parametrize("removed", REMOVED)
@pytest.mark.parametrize("out", ["o.parquet", "o.jsonl", "o.jsonl.gz", "o/"])
def test_an_equal_call_is_complete(command: str, removed: str, out: str, tmp_path: Path) -> None:
    words = [*CALLS[command], write(tmp_path / "a.jsonl", range(40)), "-o", f"{tmp_path}/{out}"]
    words += ["--removed", f"{tmp_path}/{removed}"] if removed else []
    assert sabia(*words).exit_code == 0
    before = state(tmp_path)
    again = sabia(*words)
    assert (again.exit_code, "1 shards already done" in again.output) == (0, True), again.output
    assert state(tmp_path) == before
    write(tmp_path / "a.jsonl", range(44))
    assert sabia(*words).exit_code == 0
    after = state(tmp_path)
    assert before.keys() == after.keys() and all(before[path] != after[path] for path in after)


@pytest.mark.parametrize("command", CALLS)
@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_other_removed_rows_are_not_replaced(command: str, name: str, tmp_path: Path) -> None:
    removed, call = tmp_path / name, CALLS[command]
    first = [write(tmp_path / "a.jsonl", range(40)), "-o", tmp_path / "o.parquet"]
    assert sabia(*call, *first, "--removed", removed).exit_code == 0
    data = removed.read_bytes()
    other = write(tmp_path / "b.jsonl", range(60, 90))
    refused = sabia(*call, other, "-o", tmp_path / "p.parquet", "--removed", removed)
    assert refused.exit_code == 2 and "holds rows of other inputs" in refused.output
    assert removed.read_bytes() == data
    text = data if name == "r.jsonl" else gzip.decompress(data)
    changed = text.replace(b"fox", b"cat")
    removed.write_bytes(changed if name == "r.jsonl" else gzip.compress(changed))
    refused = sabia(*call, *first, "--removed", removed)
    assert refused.exit_code == 2 and "without a record of its inputs" in refused.output
    removed.unlink()
    assert sabia(*call, *first, "--removed", removed).exit_code == 0
    assert removed.read_bytes() == data


def test_the_record_says_nothing_of_a_damaged_or_foreign_file(tmp_path: Path) -> None:
    words = ["classify", write(tmp_path / "a.jsonl", range(9)), "-o", tmp_path / "o.jsonl"]
    assert sabia(*words).exit_code == 0
    record = tmp_path / ".o.jsonl.sabia.json"
    for data in (record.read_bytes()[:-40], b"[]", b'{"rows": 3}', b""):
        record.write_bytes(data)
        refused = sabia(*words)
        assert refused.exit_code == 2 and "without a record" in refused.output
    assert sabia(*words, "--force").exit_code == 0
    assert "already done" in sabia(*words).output


def test_the_record_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    words = ["classify", write(tmp_path / "a.jsonl", range(9)), "-o", tmp_path / "in" / "o.jsonl"]
    assert sabia(*words).exit_code == 0
    read = sabia("classify", tmp_path / "in", "-o", tmp_path / "p.jsonl")
    assert read.exit_code == 0 and "9 rows in" in read.output and "left out" not in read.output
