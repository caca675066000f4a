"""An output that holds rows of other inputs is refused, never replaced; `--append` adds parts."""

import json
import os
import random
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import Command

from sabia.core.errors import BadData, UsageError
from sabia.core.shards.job import Job
from sabia.core.shards.mapping import run_map

SABIA = Command()


def keep(batches, _context):
    yield from batches


def write(path: Path, texts: list[str], **columns: list) -> str:
    pq.write_table(pa.table({"text": texts} | columns), path)
    return str(path)


def texts_in(out: Path) -> list[str]:
    files = sorted(out.glob("part-*.parquet")) if out.is_dir() else [out]
    return sorted(t for file in files for t in pq.read_table(file).column("text").to_pylist())


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [
        write(tmp_path / f"{name}.parquet", [f"{name}{i}" for i in range(9)]) for name in "abcd"
    ]


@pytest.mark.parametrize("name", ["out", "out.parquet", "out.arrow", "out.jsonl", "out.jsonl.gz"])
def test_rows_of_other_inputs_are_not_replaced(name: str, files, tmp_path: Path) -> None:
    out = tmp_path / name
    job = Job("classify", inputs=(files[0], files[1]), out=str(out), append=False)
    run_map(job, keep)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(UsageError, match=r"--out: .* holds rows .*another .*--force"):
        run_map(replace(job, inputs=(files[2],)), keep)
    with pytest.raises(UsageError, match="--force"):  # fewer inputs would lose rows too
        run_map(replace(job, inputs=(files[0],)), keep)
    with pytest.raises(UsageError, match="holds rows"):
        run_map(replace(job, command="dedup"), keep)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    run_map(replace(job, inputs=(files[2],), force=True), keep)
    if not name.startswith("out.j") and name != "out.arrow":
        assert texts_in(out) == [f"c{i}" for i in range(9)]


def test_the_message_names_append_only_where_it_exists(files, tmp_path: Path) -> None:
    job = Job("dedup", inputs=(files[0],), out=str(tmp_path / "out"))
    run_map(job, keep)
    with pytest.raises(UsageError) as error:
        run_map(replace(job, inputs=(files[1],)), keep)
    assert "--append" not in str(error.value)


def test_files_of_other_programs_are_not_replaced(files, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for path in (tmp_path / "out" / "part-00000.parquet", tmp_path / "mine.parquet"):
        write(path, ["mine"])
        out = path.parent if path.parent.name == "out" else path
        with pytest.raises(UsageError, match="not of sabia"):
            run_map(Job("classify", inputs=(files[0],), out=str(out)), keep)
        assert texts_in(path) == ["mine"]


def test_more_changed_moved_and_renamed_inputs_continue(files, tmp_path: Path) -> None:
    job = Job("classify", inputs=(files[1], files[2]), out=str(tmp_path / "out"))
    run_map(job, keep)
    assert run_map(replace(job, inputs=tuple(files)), keep).rows_out == 36  # the numbers shift
    write(Path(files[1]), ["changed"])
    assert run_map(replace(job, inputs=tuple(files)), keep).rows_out == 28
    moved = [str(Path(file).rename(tmp_path / f"x{i}.parquet")) for i, file in enumerate(files)]
    again = run_map(replace(job, inputs=tuple(moved)), keep)
    assert (again.shards_skipped, again.rows_out) == (4, 28)
    assert len(texts_in(tmp_path / "out")) == 28


def test_standard_input_with_other_content_is_another_input(tmp_path: Path) -> None:
    for text, code in (("a", 0), ("a", 0), ("b", 2)):
        line = f'echo \'{{"text": "{text}"}}\' | {SABIA} classify --no-quality -o out/'
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
    assert texts_in(tmp_path / "out") == ["a"]
    assert "--append" in done.stderr


def test_append_adds_skips_and_redoes(files, tmp_path: Path) -> None:
    job = Job("classify", inputs=(files[0], files[1]), out=str(tmp_path / "out"), append=False)
    run_map(job, keep)
    more = replace(job, inputs=(files[1], files[2], files[2]), append=True)
    first = run_map(more, keep)
    assert (first.shards_skipped, first.shards_done) == (1, 2)  # files[1] has a numbered part
    assert len(texts_in(tmp_path / "out")) == 36
    assert run_map(more, keep).shards_skipped == 3
    assert run_map(replace(more, options={"x": 1}), keep).shards_done == 3
    assert len(texts_in(tmp_path / "out")) == 36
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert sum(shard["rows"] for shard in manifest["shards"]) == 36
    with pytest.raises(UsageError, match="--append"):
        run_map(replace(job, inputs=(files[3],)), keep)


def test_an_input_that_changes_is_added_beside_its_former_rows(tmp_path: Path) -> None:
    today = tmp_path / "today.parquet"
    job = Job("classify", inputs=(str(today),), out=str(tmp_path / "out"), append=True)
    for day in ("monday", "tuesday"):
        write(today, [day])
        run_map(job, keep)
    assert texts_in(tmp_path / "out") == ["monday", "tuesday"]
    with pytest.raises(UsageError, match="holds rows of other inputs"):
        run_map(replace(job, append=False), keep)


def test_appended_parts_have_the_columns_of_the_others(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    job = Job("classify", inputs=(write(tmp_path / "a.parquet", ["a"], n=[1]),), out=out)
    run_map(job, keep)
    fewer = replace(job, append=True, inputs=(write(tmp_path / "b.parquet", ["b"]),))
    run_map(fewer, keep)
    schemas = {pq.read_schema(p).remove_metadata() for p in (tmp_path / "out").glob("part-*")}
    assert len(schemas) == 1
    with pytest.raises(BadData, match="have no m "):
        run_map(replace(fewer, inputs=(write(tmp_path / "c.parquet", ["c"], m=[1]),)), keep)
    scores = write(tmp_path / "d.parquet", ["d"], scores=[{"q": 0.5}])
    with pytest.raises(BadData, match=r"have no scores\['q'\]"):
        run_map(replace(fewer, inputs=(scores,)), keep)
    assert texts_in(tmp_path / "out") == ["a", "b"]


@pytest.mark.parametrize("append", [True, False])
def test_two_calls_at_the_same_time_lose_nothing(append: bool, files, tmp_path: Path) -> None:
    """Both calls have looked at the directory before either writes."""
    both = threading.Barrier(2)
    failed: list[str] = []

    def late(batches, _context):
        both.wait(10)
        yield from batches

    def call(file: str) -> None:
        job = Job("classify", inputs=(file,), out=str(tmp_path / "out"), append=append)
        try:
            run_map(job, late)
        except UsageError:
            failed.append(file)

    threads = [threading.Thread(target=call, args=(file,)) for file in files[:2]]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    assert len(failed) == (0 if append else 1)
    assert len(texts_in(tmp_path / "out")) == 9 * (2 - len(failed))
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert len(manifest["shards"]) == 2 - len(failed)


@pytest.mark.slow
def test_xargs(tmp_path: Path) -> None:
    draw, expected = random.Random(5), []
    (tmp_path / "in").mkdir()
    for i in range(13):
        texts = [f"{i} {j}" for j in range(draw.randint(1, 20))]
        expected += texts
        write(tmp_path / "in" / f"{i}.parquet", texts)
    find = "find in -name '*.parquet' | xargs"
    for flags, code in (("-n 5", 123), ("-n 2 -P 3", 123), ("-n 5 --append", 0),
                        ("-n 2 -P 3 --append", 0), ("-n 13", 0)):  # fmt: skip
        out = f"out{flags.replace(' ', '')}"
        how, _, append = flags.partition(" --")
        line = f"{find} {how} {SABIA} classify --no-quality -o {out} {'--append' * bool(append)}"
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True,
                              text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
        assert done.returncode == code, done.stderr
        if not code:
            assert texts_in(tmp_path / out) == sorted(expected)
