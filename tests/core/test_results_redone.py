"""A new version of a stage's results makes exactly its outputs again; nothing else does."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sabia.core.results import RESULTS
from sabia.core.shards import manifest
from sabia.core.shards.atomic import read_json, write_json
from sabia.core.shards.job import Job
from sabia.core.shards.outputs import read_metadata
from sabia.core.train.run_directory import RunDirectory
from tests.support.in_process import stage

SHARDS = 3
STAGES = {
    "classify": {"quality": True},
    "dedup": {"method": "exact"},
    "rewrite": {},
    "tokenize": {"vocab_size": 300, "length": 64},
}


def write_documents(folder: Path) -> Path:
    folder.mkdir()
    for shard in range(SHARDS):
        texts = [f"Shard {shard}, document {n}. " + "some words of it " * n for n in range(40)]
        pq.write_table(pa.table({"text": texts}), folder / f"{shard}.parquet")
    return folder


def times(folder: Path) -> dict[str, int]:
    """When each file of an output was written; the manifest, which is always written, left out."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    kept = [path for path in paths if path.name not in ("_manifest.json", ".huggingface.yaml")]
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in kept}


@pytest.mark.parametrize("command", STAGES)
def test_only_a_new_number_makes_outputs_again(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, out = write_documents(tmp_path / "in"), tmp_path / "out"

    def run() -> dict[str, int]:
        stage(command, inputs=str(documents), out=f"{out}/", **STAGES[command])
        return times(out)

    first = run()
    monkeypatch.setattr(manifest, "_version", lambda _name: "9.9.9")  # another release
    assert run() == first
    others = {name: number + 1 for name, number in RESULTS.items() if name != command}
    for name, number in others.items():
        monkeypatch.setitem(RESULTS, name, number)
    assert run() == first
    raised = RESULTS[command] + 1
    monkeypatch.setitem(RESULTS, command, raised)
    second = run()
    shards = [name for name in first if name.startswith("part-")]
    assert len(shards) == SHARDS and all(second[name] > first[name] for name in shards)
    if command == "tokenize":
        assert second["_tokenizer/tokenizer.json"] > first["_tokenizer/tokenizer.json"]
    assert (read_metadata(str(out / "part-00000.parquet")) or {})["result"] == raised
    assert run() == second


def test_sketches_of_earlier_results_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, scratch = write_documents(tmp_path / "in"), tmp_path / "scratch"

    def sketches() -> int:
        stage("dedup", inputs=str(documents), out=f"{tmp_path}/out/", scratch=str(scratch))
        return len(list(scratch.glob("sketch-*")))

    assert sketches() == SHARDS
    monkeypatch.setitem(RESULTS, "dedup", 2)
    assert sketches() == 2 * SHARDS


def test_fingerprints_of_results_1_are_those_of_the_first_release() -> None:
    options = {"threshold": 0.8, "tokenizer": "x/_tokenizer"}
    job, schema = Job("dedup", options=options, seed=3), pa.schema([("text", pa.string())])
    made = manifest.provenance(job, "document", ["a", "b"], "s", schema, ["o1", "o2"])
    assert made["fingerprint"] == "cc1d83f862254a59a46d2803e29e28e6"
    assert "result" not in made  # its bytes are those of the first release, too


def make_run(path: Path, finished: bool) -> tuple[RunDirectory, dict[str, str]]:
    run, identity = RunDirectory(path), {"command": "pretrain", "inputs": "a"}
    run.begin(identity, force=False)
    (run.checkpoints / "kept").write_text("")
    if finished:
        run.final.mkdir()
        (run.final / "config.json").write_text("{}")
        run.finish(identity)
        assert run.finished(identity)
    return run, identity


def test_a_finished_run_of_earlier_results_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RESULTS, "pretrain", 1)
    run, identity = make_run(tmp_path, finished=True)
    record = read_json(run.record)
    assert record.pop("result") == 1
    write_json(run.record, record)  # as releases before wrote it
    assert run.finished(identity)
    monkeypatch.setitem(RESULTS, "pretrain", 2)
    assert not run.finished(identity)
    run.begin(identity, force=False)
    assert not os.listdir(run.checkpoints) and not run.final.exists()
    assert json.loads(run.record.read_text())["result"] == 2


def test_an_unfinished_run_of_earlier_results_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(RESULTS, "pretrain", 1)
    run, identity = make_run(tmp_path, finished=False)
    monkeypatch.setitem(RESULTS, "pretrain", 2)
    run.begin(identity, force=False)
    assert (run.checkpoints / "kept").exists()
    assert "--force" in capsys.readouterr().err
    run.finish(identity)
    assert json.loads(run.record.read_text())["result"] == 1
