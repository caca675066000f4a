"""An output directory holds shards only, whatever an earlier version had put into it."""

import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from sabia.core.errors import UsageError
from sabia.core.shards.arrow_arrays import MAP
from sabia.core.shards.inputs import from_path
from sabia.core.shards.job import Job
from sabia.core.shards.layout import adopt_rejects, adopt_tokenizer
from sabia.core.shards.mapping import run_map
from sabia.core.shards.outputs import with_metadata
from sabia.core.shards.rejects import SCHEMA, reject_path


def refuse_empty(batches, context):
    """A stage in small: rejects empty texts."""
    for batch in batches:
        empty = pc.equal(batch.column("text"), "")
        if pc.any(empty).as_py():
            context.reject(batch.filter(empty), "empty text")
        yield batch.filter(pc.invert(empty))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "in").mkdir()
    for name in "ab":
        (tmp_path / "in" / f"{name}.jsonl").write_text('{"text": "fine"}\n{"text": ""}\n')
    return Job("classify", inputs=(str(tmp_path / "in"),), out=str(tmp_path / "out"))


def as_before(out: Path) -> None:
    """What earlier versions put beside shards, and a shard with scores as a map."""
    (out / "rejects").mkdir(parents=True)
    (out / "manifest.json").write_text(json.dumps({"command": "classify", "shards": []}))
    for part in range(2):
        rows = pa.table({"text": ["old"], "scores": pa.array([[("a", 1.0)]], MAP)})
        source = from_path(str(out.parent / "in" / f"{'ab'[part]}.jsonl"), "document")[0]
        made = {"command": "classify", "inputs": [source.fingerprint()], "version": "0"}
        rows = rows.cast(with_metadata(rows.schema, made))
        pq.write_table(rows, out / f"part-{part:05d}.parquet")
    for part in (0, 7):
        odd = pa.table([["why"], ["shard"], ["{}"]], schema=SCHEMA)
        pq.write_table(odd, out / "rejects" / f"part-{part:05d}.parquet")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_run_leaves_shards_and_a_hidden_manifest(job: Job, tmp_path: Path) -> None:
    run_map(job, refuse_empty)
    assert names(tmp_path / "out") == {"part-00000.parquet", "part-00001.parquet", "_manifest.json"}
    assert names(tmp_path / "out.rejects") == {"part-00000.parquet", "part-00001.parquet"}
    assert pq.read_table(tmp_path / "out").column("text").to_pylist() == ["fine", "fine"]


def test_a_directory_of_an_earlier_version_is_made_over(job: Job, tmp_path: Path) -> None:
    as_before(tmp_path / "out")
    assert run_map(job, refuse_empty).shards_done == 2
    assert names(tmp_path / "out") == {
        "part-00000.parquet", "part-00001.parquet", "_manifest.json",
    }  # fmt: skip
    kept = pq.read_table(tmp_path / "out.rejects").column("reason").to_pylist()
    assert kept == ["empty text", "empty text", "why"]  # that of part 7, of no shard of this run
    assert pq.read_table(tmp_path / "out").num_rows == 2


def test_a_dry_run_moves_nothing(job: Job, tmp_path: Path) -> None:
    as_before(tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    run_map(replace(job, dry_run=True), refuse_empty)
    assert sorted(tmp_path.rglob("*")) == before


def test_only_what_is_ours_is_moved(job: Job, tmp_path: Path) -> None:
    out = tmp_path / "out"
    as_before(out)
    (out / "manifest.json").write_text(json.dumps({"somebody": "else's"}))
    pq.write_table(pa.table({"text": ["mine"]}), out / "rejects" / "part-00003.parquet")
    run_map(job, refuse_empty)
    assert names(out) >= {"manifest.json", "rejects"}
    assert names(out / "rejects") == {"part-00003.parquet"}


def test_a_trainer_moves_rejects_alone(job: Job, tmp_path: Path) -> None:
    as_before(tmp_path / "out")
    adopt_rejects(job)
    assert names(tmp_path / "out") >= {"manifest.json", "part-00000.parquet"}
    assert names(tmp_path / "out.rejects") == {"part-00000.parquet", "part-00007.parquet"}


def test_a_tokenizer_moves_unless_another_is_there(job: Job, tmp_path: Path, capfd) -> None:
    before, after = tmp_path / "out" / "tokenizer", tmp_path / "out" / "_tokenizer"
    for folder, text in ((before, "{}"), (after, '{"another": 1}')):
        folder.mkdir(parents=True)
        (folder / "tokenizer.json").write_text(text)
    adopt_tokenizer(job)
    assert before.exists() and "is among the shards" in capfd.readouterr().err
    (after / "tokenizer.json").write_text("{}")
    adopt_tokenizer(job)
    assert not before.exists() and after.exists()
    after.rename(before)
    adopt_tokenizer(job)
    assert not before.exists() and (after / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("place", ["out/rejects", "out/sub/_r", "out"])
def test_rejects_do_not_lie_among_the_shards(job: Job, tmp_path: Path, place: str) -> None:
    with pytest.raises(UsageError, match="is in the directory of -o"):
        run_map(replace(job, rejects=str(tmp_path / place)), refuse_empty)
    run_map(replace(job, rejects=str(tmp_path / "out-rejects")), refuse_empty)
    assert pq.read_table(tmp_path / "out").num_rows == 2


def test_places_of_rejects(tmp_path: Path, monkeypatch) -> None:
    job = Job("dedup")
    mine = f"{socket.gethostname()}-{os.getpid()}.parquet"
    assert reject_path(job) == f"sabia-dedup.rejects/{mine}"
    assert reject_path(replace(job, out="a/b.parquet")) == "a/b.rejects.parquet"
    assert reject_path(replace(job, out="a/b/"), 3) == "a/b.rejects/part-00003.parquet"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert reject_path(replace(job, out=".")) == f"{tmp_path}/here.rejects/part-00000.parquet"
    assert reject_path(replace(job, out="s3://a/b"), 3) == "s3://a/b.rejects/part-00003.parquet"


def test_rejects_of_stdout_are_named(job: Job, tmp_path: Path, monkeypatch, capfdbinary) -> None:
    monkeypatch.chdir(tmp_path)
    run_map(replace(job, out=None, to="jsonl"), refuse_empty)
    (path,) = (tmp_path / "sabia-classify.rejects").iterdir()
    assert (
        f"2 rejected → sabia-classify.rejects/{path.name}".encode() in capfdbinary.readouterr().err
    )
    assert pq.read_metadata(path).num_rows == 2
