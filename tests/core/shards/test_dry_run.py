"""`--dry-run`: nothing is written, and the estimates are those of the stage's own transform."""

import json
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sabia.core.shards import dry_run
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import run_map


def documents(path: Path, rows: int) -> str:
    texts = [f"Page {n} about the weather of day {n * 7 % 365}." * 20 for n in range(rows)]
    pq.write_table(pa.table({"text": texts}), path)
    return str(path)


def busy(batches, _context, loops: int):
    for batch in batches:
        for _ in range(batch.num_rows * loops):
            pass
        yield batch


def plan_of(capsys, *paths: str, out: str | None, loops: int = 0) -> dict:
    job = Job("rewrite", inputs=paths, out=out, dry_run=True, json=True)
    run_map(job, partial(busy, loops=loops))
    return json.loads(capsys.readouterr().out)


def test_reads_and_writes_are_named_and_nothing_is_done(tmp_path, capsys) -> None:
    paths = [documents(tmp_path / f"{n}.parquet", 10 * n + 5) for n in range(3)]
    plan = plan_of(capsys, *paths, out=str(tmp_path / "out"))
    assert [one["name"] for one in plan["reads"]] == paths
    assert [one["bytes"] for one in plan["reads"]] == [Path(p).stat().st_size for p in paths]
    assert [one["action"] for one in plan["writes"]] == ["write"] * 3
    assert not (tmp_path / "out").exists()


def test_finished_shards_are_kept_and_not_estimated(tmp_path, capsys) -> None:
    paths = [documents(tmp_path / f"{n}.parquet", 50) for n in range(2)]
    out = str(tmp_path / "out")
    run_map(Job("rewrite", inputs=tuple(paths), out=out), partial(busy, loops=0))
    capsys.readouterr()
    plan = plan_of(capsys, *paths, out=out)
    assert [one["action"] for one in plan["writes"]] == ["keep", "keep"]
    assert plan["cpu_seconds"] == 0 and plan["bytes_written"] == 0


def test_bytes_are_those_that_will_be_written(tmp_path, capsys) -> None:
    path = documents(tmp_path / "in.parquet", 3_000)
    out = tmp_path / "out.parquet"
    plan = plan_of(capsys, path, out=str(out))
    run_map(Job("rewrite", inputs=(path,), out=str(out)), partial(busy, loops=0))
    assert plan["bytes_written"] == pytest.approx(out.stat().st_size, rel=0.4)


def test_time_grows_with_the_work_and_the_rows(tmp_path, capsys) -> None:
    path = documents(tmp_path / "in.parquet", 1_000)
    twice = documents(tmp_path / "twice.parquet", 4_000)
    light = plan_of(capsys, path, out="-", loops=200)["cpu_seconds"]
    heavy = plan_of(capsys, path, out="-", loops=20_000)["cpu_seconds"]
    assert heavy > 5 * light
    assert plan_of(capsys, twice, out="-", loops=20_000)["cpu_seconds"] > 2 * heavy


def test_a_sample_ends_early_whatever_the_size(tmp_path) -> None:
    path = documents(tmp_path / "in.parquet", 5_000)
    (source,) = open_inputs(Job("rewrite", inputs=(path,)), "document")
    assert dry_run.first_rows(source)[0] == dry_run.SAMPLE_ROWS
    for wanted in (1, 7, 2_000, 2_001):
        batches = dry_run.Sample(source, wanted).batches()
        assert sum(batch.num_rows for batch in batches) == wanted


def test_lines_scale_by_their_bytes(tmp_path, capsys) -> None:
    line = json.dumps({"text": "The weather is fine today. " * 10}) + "\n"
    one, many = tmp_path / "one.jsonl", tmp_path / "many.jsonl"
    one.write_text(line * 100)
    many.write_text(line * 20_000)
    small = plan_of(capsys, str(one), out="-")["bytes_written"]
    both = plan_of(capsys, str(one), str(one), out="-")["bytes_written"]
    assert both == pytest.approx(2 * small, rel=0.05)
    assert plan_of(capsys, str(many), out="-")["basis"].startswith("the first 1,000 rows")


def test_text_says_what_json_says(tmp_path, capsys) -> None:
    path = documents(tmp_path / "in.parquet", 20)
    run_map(Job("rewrite", inputs=(path,), dry_run=True), partial(busy, loops=0))
    shown = capsys.readouterr().out
    assert f"read {path} (" in shown and "write stdout from 1 shards" in shown
    for word in ("CPU time: about", "memory: about", "bytes written: about", "estimated from"):
        assert word in shown
