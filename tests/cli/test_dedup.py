"""`sabia dedup` as a user runs it: pipes, signals, kills and re-runs, refusals."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import Command
from in_process import sabia
from waiting import HANG_S, until

SABIA = Command("dedup")
PLAIN = [sys.executable, "-m", "sabia.cli.main", "dedup"]
WORDS = [f"w{i}" for i in range(2000)]


def dedup(*words, **settings) -> subprocess.CompletedProcess:
    settings = {"capture_output": True, "timeout": 60} | settings
    return subprocess.run([*SABIA, *map(str, words)], **settings)


def documents(count: int, length: int, seed: int = 0) -> pa.Table:
    """Every fifth document is an edited or equal copy of an earlier one."""
    draw = random.Random(seed)
    texts: list[list[str]] = []
    for i in range(count):
        if i % 5 == 4:
            words = list(draw.choice(texts))
            for _ in range(draw.randrange(3)):
                words[draw.randrange(len(words))] = draw.choice(WORDS)
            texts.append(words)
        else:
            texts.append(draw.choices(WORDS, k=length))
    return pa.table({"id": [f"d{i}" for i in range(count)], "text": [" ".join(t) for t in texts]})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all.parquet and the same rows as shards/; kept.parquet and removed.parquet of a run."""
    root = tmp_path_factory.mktemp("dedup")
    table = documents(500, 80)
    pq.write_table(table, root / "all.parquet", row_group_size=64)
    (root / "shards").mkdir()
    for part in range(4):
        pq.write_table(table.slice(part * 125, 125), root / "shards" / f"s{part}.parquet")
    done = dedup(root / "all.parquet", "-o", root / "kept.parquet", "--removed",
                 root / "removed.parquet")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stdout and b"near duplicates" in done.stderr
    return root


def rows(path: Path) -> list[dict]:
    names = sorted(path.glob("part-*.parquet")) if path.is_dir() else [path]
    return [row for name in names for row in pq.read_table(name).to_pylist()]


def test_what_is_kept_and_what_is_removed(world: Path) -> None:
    kept, removed = rows(world / "kept.parquet"), rows(world / "removed.parquet")
    assert len(kept) == 400 and len(removed) == 100
    assert {row["reason"] for row in removed} == {"exact", "near"}
    names = {row["id"] for row in kept}
    assert all(row["kept_id"] in names for row in removed)
    near = [row["similarity"] >= 0.7 for row in removed]  # a chain may end below the threshold
    assert sum(near) > 90
    assert sum(row["cluster_size"] for row in kept) == 500


def test_pipes_lists_and_workers_give_the_rows_of_a_file(world: Path, tmp_path: Path) -> None:
    expected = rows(world / "kept.parquet")
    line = f"cat {world}/all.parquet | {SABIA} > {tmp_path}/pipe.parquet"
    subprocess.run(["bash", "-o", "pipefail", "-c", line], check=True, capture_output=True)
    paths = "\n".join(map(str, sorted((world / "shards").iterdir()))).encode()
    dedup("-o", tmp_path / "list.parquet", input=paths, check=True)
    dedup(world / "shards", "-o", tmp_path / "parts", "-j", 2, "--engine", "numpy", check=True)
    for name in ("pipe.parquet", "list.parquet", "parts"):
        assert rows(tmp_path / name) == expected, name
    again = dedup(world / "shards", "-o", tmp_path / "parts", "-j", 2, "--engine", "numpy")
    assert b"4 shards already done" in again.stderr


def test_a_closed_pipe_is_silent(world: Path) -> None:
    line = f"{SABIA} -q {world}/all.parquet | head -c 10 > /dev/null"
    line += "; echo ${PIPESTATUS[0]}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.stdout == "141\n" and done.stderr == ""


def test_a_stream_cut_short_leaves_nothing(world: Path, tmp_path: Path) -> None:
    whole = (world / "all.parquet").read_bytes()
    cut = dedup("-o", tmp_path / "o.parquet", input=whole[: len(whole) // 2])
    assert cut.returncode == 65 and len(cut.stderr.splitlines()) <= 3
    assert not list(tmp_path.iterdir())


def test_an_array_task_is_refused(world: Path) -> None:
    refused = dedup(world / "all.parquet", env=os.environ | {"SLURM_ARRAY_TASK_COUNT": "4"})
    assert refused.returncode == 2 and b"as one job" in refused.stderr


def test_dry_run_touches_nothing(world: Path, tmp_path: Path) -> None:
    told = dedup(world / "shards", "-o", tmp_path / "o", "--dry-run")
    assert told.returncode == 0 and told.stdout.count(b"write") == 4
    assert not (tmp_path / "o").exists()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Shards that take the plain engine a while, and their rows."""
    root = tmp_path_factory.mktemp("large")
    (root / "in").mkdir()
    table = documents(8000, 120, seed=3)
    for part in range(4):
        pq.write_table(table.slice(part * 2000, 2000), root / "in" / f"{part}.parquet")
    dedup(root / "in", "-o", root / "whole", check=True)
    return root, rows(root / "whole")


def start(large: Path, out: Path) -> subprocess.Popen:
    words = [*PLAIN, large / "in", "-o", out, "--engine", "numpy", "--removed", f"{out}.r.parquet"]
    return subprocess.Popen([str(w) for w in words], stderr=subprocess.PIPE)


def test_sigterm_ends_with_75_soon_and_a_rerun_finishes(
    large: tuple[Path, list[dict]], tmp_path: Path
) -> None:
    root, expected = large
    process = start(root, tmp_path / "o")
    begun = process.stderr.readline()
    if b"no digests" in begun:  # of the inputs, which another program wrote
        begun = process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == 75, begun + said
    assert b"engine numpy" in begun and b"run the same command to resume" in said
    assert not list((tmp_path / "o").glob("part-*"))  # it did not first finish
    dedup(root / "in", "-o", tmp_path / "o", check=True)
    assert rows(tmp_path / "o") == expected


@pytest.mark.parametrize(
    "delay_s", [None, *(pytest.param(d / 5, marks=pytest.mark.slow) for d in range(1, 16))]
)
def test_kill_leaves_no_unreadable_file_and_a_rerun_the_same_rows(
    large: tuple[Path, list[dict]], tmp_path: Path, delay_s: float | None
) -> None:
    """After that delay, or as soon as the first shard is there."""
    root, expected = large
    process = start(root, tmp_path / "o")
    if delay_s is None:
        until((tmp_path / "o" / "part-00000.parquet").exists, process)
    else:
        time.sleep(delay_s)
    process.kill()
    process.communicate()
    for path in tmp_path.rglob("*.parquet"):
        if not path.name.startswith("."):
            pq.read_table(path)
    dedup(root / "in", "-o", tmp_path / "o", "--removed", tmp_path / "o.r.parquet", check=True)
    assert rows(tmp_path / "o") == expected
    assert len(rows(tmp_path / "o.r.parquet")) == 8000 - len(expected)


def test_a_method_takes_its_own_options_only(world: Path) -> None:
    refused = dedup(world / "all.parquet", "--method", "exact", "--ngram", 3)
    assert refused.returncode == 2 and b"--ngram: only with --method minhash" in refused.stderr
    refused = dedup(world / "all.parquet", "--method", "fuzzy")
    assert refused.returncode == 2 and b"expected minhash, exact" in refused.stderr
    refused = dedup(world / "all.parquet", "--method", "url", "--ngram", 5)  # as it is by default
    assert refused.returncode == 2 and b"--ngram: only with" in refused.stderr


def test_phases_of_an_array_give_the_bytes_of_one_job(world: Path, tmp_path: Path) -> None:
    """Tasks as Slurm starts them: their slice comes from its variables."""
    dedup(world / "shards", "-o", tmp_path / "one", check=True)

    def array(phase: str) -> None:
        for task in (1, 0):
            slurm = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_MIN": "0",
                     "SLURM_ARRAY_TASK_STEP": "1", "SLURM_ARRAY_TASK_COUNT": "2"}  # fmt: skip
            dedup(world / "shards", "-o", tmp_path / "array", "--scratch", tmp_path / "s",
                  "--phase", phase, "--shard", "auto", check=True,
                  env=os.environ | slurm)  # fmt: skip

    array("sketch")
    again = dedup(world / "shards", "--scratch", tmp_path / "s", "--phase", "compare",
                  env=os.environ | {"SLURM_ARRAY_TASK_COUNT": "2"})  # fmt: skip
    assert again.returncode == 2 and b"in phases" in again.stderr
    dedup(world / "shards", "--scratch", tmp_path / "s", "--phase", "compare", check=True)
    array("write")
    one, other = (sorted((tmp_path / name).glob("part-*.parquet")) for name in ("one", "array"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]


def test_decisions_tell_of_every_document_and_write_no_text(tmp_path):
    rows = [{"id": f"d{n}", "text": f"text number {n // 2} " * 9} for n in range(8)]
    with open(tmp_path / "in.jsonl", "w") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    words = ["dedup", str(tmp_path / "in.jsonl"), "--decisions", "-q"]
    one, two = tmp_path / "one.parquet", tmp_path / "two.parquet"
    for out, more in ((one, ()), (two, ("--method", "exact", "-j", "2"))):
        done = sabia(*words, *more, "-o", out)
        assert done.exit_code == 0, done.output
        told = pq.read_table(out)
        assert told.column_names == [
            "id", "cluster", "cluster_size", "kept", "reason", "similarity",
        ]  # fmt: skip
        assert told.column("kept").to_pylist() == [True, False] * 4
        assert told.column("cluster").to_pylist() == [f"d{n // 2 * 2}" for n in range(8)]
        assert told.column("reason").to_pylist() == ["kept", "exact"] * 4
    done = sabia(*words, "--method", "url", "-o", one)
    assert done.exit_code == 2 and "--decisions" in done.output
