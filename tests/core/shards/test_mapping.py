"""The map stage: outputs, idempotence, slices, workers, rejects, interruption."""

import json
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from sabia.core import notes
from sabia.core.errors import BadData, Failed, UsageError
from sabia.core.shards import inputs
from sabia.core.shards.job import Job, chosen_shard, slurm_slice
from sabia.core.shards.mapping import run_map


def upper(batches, context, fail_on: str = ""):
    """Upper-case texts; rejects empty ones; a stage in small."""
    for batch in batches:
        text = batch.column("text")
        empty = pc.equal(text, "")
        if pc.any(empty).as_py():
            context.reject(batch.filter(empty), "empty text")
            batch = batch.filter(pc.invert(empty))
        if fail_on and fail_on in batch.column("text").to_pylist():
            raise BadData("asked to fail")
        context.count("seen", batch.num_rows)
        yield batch.set_column(1, "text", pc.utf8_upper(batch.column("text")))


def make_inputs(folder: Path, shards: int = 3, rows: int = 100) -> Path:
    folder.mkdir()
    for s in range(shards):
        texts = [f"shard {s} row {i}" for i in range(rows)]
        pq.write_table(pa.table({"text": texts}), folder / f"{s}.parquet")
    return folder


def kill_on(batches, context, text: str):
    """Upper-case texts; the process kills itself at one text, as the kernel does for memory."""
    for batch in upper(batches, context):
        if text.upper() in batch.column("text").to_pylist():
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


def test_a_shard_that_kills_its_worker_is_named_and_the_others_are_done(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stats = tmp_path / "stats.json"
    workers = replace(job, jobs=2, stats=str(stats))
    with pytest.raises(Failed, match=r"1 of 3 shards .*/1\.parquet; run again"):
        run_map(workers, partial(kill_on, text="shard 1 row 7"))
    assert "1 shards lost" in capsys.readouterr().err
    assert json.loads(stats.read_text())["shards_lost"] == [str(tmp_path / "in" / "1.parquet")]
    assert rows(tmp_path / "out") == [f"SHARD {s} ROW {i}" for s in (0, 2) for i in range(100)]
    again = run_map(workers, partial(kill_on, text="no such text"))
    assert (again.shards_done, again.shards_skipped) == (1, 2)
    with pytest.raises(Failed, match="worker process died twice"):
        one = replace(workers, out=str(tmp_path / "one.parquet"))
        run_map(one, partial(kill_on, text="shard 1 row 7"))
    assert not (tmp_path / "one.parquet").exists()


def rows(path: Path) -> list[str]:
    files = sorted(path.glob("part-*.parquet")) if path.is_dir() else [path]
    return [t for f in files for t in pq.read_table(f).column("text").to_pylist()]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job("classify", inputs=(str(make_inputs(tmp_path / "in")),), out=str(tmp_path / "out"))


def test_directory_file_and_workers_give_the_same_rows(job: Job, tmp_path: Path) -> None:
    run_map(job, upper)
    one = replace(job, out=str(tmp_path / "one.parquet"))
    run_map(one, upper)
    two = replace(job, out=str(tmp_path / "two.parquet"), jobs=2)
    run_map(two, upper)
    expected = rows(tmp_path / "out")
    assert len(expected) == 300 and expected[0] == "SHARD 0 ROW 0"
    assert rows(tmp_path / "one.parquet") == expected == rows(tmp_path / "two.parquet")
    assert not list(tmp_path.rglob(".*"))


def test_second_run_skips_and_a_changed_option_redoes(job: Job, tmp_path: Path) -> None:
    assert run_map(job, upper).shards_done == 3
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("part*")}
    again = run_map(job, upper)
    assert (again.shards_done, again.shards_skipped, again.rows_out) == (0, 3, 300)
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("part*")}
    assert run_map(replace(job, options={"x": 1}), upper).shards_done == 3
    assert run_map(replace(job, options={"x": 1}, force=True), upper).shards_done == 3


def test_a_changed_or_damaged_shard_is_redone(job: Job, tmp_path: Path) -> None:
    run_map(job, upper)
    pq.write_table(pa.table({"text": ["new"]}), tmp_path / "in" / "1.parquet")
    (tmp_path / "out" / "part-00002.parquet").write_bytes(b"PAR1broken")
    done = run_map(job, upper)
    assert (done.shards_done, done.shards_skipped) == (2, 1)
    assert "NEW" in rows(tmp_path / "out")


def test_parts_of_an_earlier_larger_run_are_removed_with_force(job: Job, tmp_path: Path) -> None:
    run_map(job, upper)
    (tmp_path / "in" / "2.parquet").unlink()
    with pytest.raises(UsageError, match=r"holds rows of other inputs .*--force"):
        run_map(job, upper)
    assert len(list((tmp_path / "out").glob("part-*.parquet"))) == 3
    run_map(replace(job, force=True), upper)
    assert len(list((tmp_path / "out").glob("part-*.parquet"))) == 2
    listed = json.loads((tmp_path / "out" / "_manifest.json").read_text())["shards"]
    assert [s["rows"] for s in listed] == [100, 100]


def test_slices_cover_every_shard_once(tmp_path: Path) -> None:
    folder = make_inputs(tmp_path / "in", shards=10, rows=5)
    job = Job("classify", inputs=(str(folder),), out=str(tmp_path / "out"))
    done = [run_map(replace(job, shard=(i, 4)), upper).shards_done for i in range(4)]
    assert done == [3, 3, 2, 2]
    assert len(rows(tmp_path / "out")) == 50
    with pytest.raises(UsageError, match="directory"):
        run_map(replace(job, shard=(0, 4), out=str(tmp_path / "x.parquet")), upper)


def test_slurm_array_names_the_slice() -> None:
    names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP")
    task = dict(zip(names, ("7", "3", "2"), strict=True)) | {"SLURM_ARRAY_TASK_COUNT": "4"}
    assert slurm_slice(task) == (2, 4)
    assert slurm_slice({}) is None
    step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"}
    assert slurm_slice(step) == (1, 3) and slurm_slice(task | step) == (7, 12)
    assert chosen_shard("auto", task) == (2, 4) and chosen_shard("auto", {}) is None
    for environment in (task, step):
        assert chosen_shard("all", environment) is None
        assert chosen_shard("1/3", environment) == (1, 3)
        with pytest.raises(UsageError, match=r"--shard auto .*--shard all .*--shard I/N"):
            chosen_shard(None, environment)
    # a batch script with several tasks runs once, and so does a step of one task
    one = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert chosen_shard(None, one) is None
    for text in ("4/4", "x", "1", "-1/2"):
        with pytest.raises(UsageError, match=r"--shard: .*auto, all, or I/N"):
            chosen_shard(text, {})


def test_rejects_are_kept_with_reason_and_count(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "fine"}\n{"text": ""}\n{broken\n')
    job = Job("classify", inputs=(str(folder),), out=str(tmp_path / "out"))
    summary = run_map(job, upper)
    assert (summary.rows_in, summary.rows_out, summary.rejected) == (3, 1, 2)
    kept = pq.read_table(tmp_path / "out.rejects" / "part-00000.parquet").to_pylist()
    assert {row["reason"].split(":")[0] for row in kept} == {"empty text", "not JSON"}
    (folder / "a.jsonl").write_text('{"text": "fine"}\n')
    run_map(job, upper)
    assert not (tmp_path / "out.rejects").exists()


def test_rejects_of_workers_come_back(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.jsonl").write_text('{"text": "fine"}\n{"text": ""}\n')
    job = Job("classify", inputs=(str(folder),), out=str(tmp_path / "o.parquet"), jobs=2)
    assert run_map(job, upper).rejected == 2
    assert pq.read_metadata(tmp_path / "o.rejects.parquet").num_rows == 2


def test_failure_leaves_no_output_file(job: Job, tmp_path: Path) -> None:
    one = replace(job, out=str(tmp_path / "one.parquet"))
    with pytest.raises(BadData):
        run_map(one, partial(upper, fail_on="shard 2 row 9"))
    assert not list(tmp_path.glob("*.parquet")) and not list(tmp_path.glob(".*"))
    with pytest.raises(BadData):
        run_map(job, partial(upper, fail_on="shard 2 row 9"))
    assert len(list((tmp_path / "out").glob("part-*.parquet"))) == 2


def test_dry_run_touches_nothing(job: Job, tmp_path: Path, capsys) -> None:
    run_map(replace(job, dry_run=True), upper)
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr().out.count("write ") == 3


def test_unknown_columns_are_carried_through(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "odd": [[1, 2]]}), tmp_path / "a.parquet")
    out = tmp_path / "o.parquet"
    run_map(Job("classify", inputs=(str(tmp_path / "a.parquet"),), out=str(out)), upper)
    assert pq.read_table(out).column("odd").to_pylist() == [[1, 2]]


def test_all_shards_have_the_columns_of_all_inputs(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["a"]}), folder / "a.parquet")
    pq.write_table(pa.table({"text": ["b"], "late": [1]}), folder / "b.parquet")
    (folder / "c.jsonl").write_text('{"text": "c", "late": 2.5, "more": "x"}\n')
    job = Job("classify", inputs=(str(folder),), out=str(tmp_path / "o.parquet"))
    run_map(job, upper)
    run_map(replace(job, out=str(tmp_path / "out")), upper)
    for out in ("o.parquet", "out"):
        found = pq.read_table(tmp_path / out, columns=["text", "late", "more"]).to_pylist()
        assert [tuple(row.values()) for row in found] == [
            ("A", None, None), ("B", 1.0, None), ("C", 2.5, "x"),
        ]  # fmt: skip
    (folder / "d.jsonl").write_text('{"text": "d", "late": "never"}\n')
    with pytest.raises(BadData, match=r"column 'late' is string, but double in .*c\.jsonl"):
        run_map(job, upper)


def test_no_rows_still_gives_a_readable_file(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    out = tmp_path / "o.parquet"
    run_map(Job("classify", inputs=(str(tmp_path / "a.parquet"),), out=str(out)), upper)
    assert pq.read_table(out).num_rows == 0 and "text" in pq.read_schema(out).names


def test_url_outputs_through_fsspec(job: Job, tmp_path: Path) -> None:
    remote = replace(job, out=f"file://{tmp_path}/remote")
    assert run_map(remote, upper).shards_done == 3
    assert run_map(remote, upper).shards_skipped == 3
    assert len(rows(tmp_path / "remote")) == 300


def test_memory_stays_flat_on_large_inputs(tmp_path: Path) -> None:
    """A 400 MB shard passes in well under 300 MB more than a small one needs."""
    writer = pq.ParquetWriter(tmp_path / "big.parquet", pa.schema([("text", pa.string())]))
    texts = [os.urandom(2000).hex() for _ in range(2000)]
    for _ in range(50):
        writer.write_table(pa.table({"text": texts}))
    writer.close()
    used = []
    for name in ("small", "big"):
        if name == "small":
            pq.write_table(pa.table({"text": texts[:10]}), tmp_path / "small.parquet")
        job = Job("classify", inputs=(str(tmp_path / f"{name}.parquet"),),
                  out=str(tmp_path / f"{name}-out.parquet"))  # fmt: skip
        used.append(_peak_mib(job))
    assert used[1] - used[0] < 300


def _peak_mib(job: Job) -> float:
    import subprocess
    import sys

    code = (
        "import resource, sys, importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('m', {__file__!r})\n"
        "m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)\n"
        f"m.run_map(m.{job!r}, m.upper)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_time_spent_waiting_for_the_producer_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(notes, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    before = notes.waited_s()
    reader, writer = os.pipe()
    os.write(writer, b'{"text": "one"}\n{"text": "two"}\n')
    os.close(writer)

    def select(files, *_):
        clock[0] += 300
        return files, [], []

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: reader))
    monkeypatch.setattr(inputs, "select", SimpleNamespace(select=select))

    def works(batches, context):
        for batch in batches:
            clock[0] += 3
            yield batch

    job = Job("classify", out=str(tmp_path / "o.parquet"), stats=str(tmp_path / "s.json"))
    summary = run_map(job, works)
    assert (summary.rows_in, summary.seconds) == (2, 3.0)
    assert summary.waited_seconds - before == 600  # the text and the end
    assert "(3s, and 10m waiting for input)" in capsys.readouterr().err
    assert json.loads((tmp_path / "s.json").read_text())["waited_seconds"] == before + 600
