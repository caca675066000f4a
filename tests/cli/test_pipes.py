"""Commands in pipes, as a shell runs them: same rows as over files, closed pipes, cut streams,
signals. Every check goes through real processes and real pipes."""

import json
import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import waiting
from waiting import HANG_S, until

from sabia.core.shards.atomic import is_abandoned

BIN = Path(sys.executable).parent
ENVIRONMENT = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
SUBJECTS = ("house", "river", "teacher", "garden", "train", "market", "song", "letter", "bridge")
VERBS = ("keeps", "opens", "follows", "remembers", "paints", "measures", "crosses", "builds")


def shell(line: str, folder: Path, **settings) -> subprocess.CompletedProcess:
    words = ["bash", "-o", "pipefail", "-c", line]
    return subprocess.run(words, cwd=folder, env=ENVIRONMENT, capture_output=True, **settings)


def sentences(seed: int) -> str:
    choice = random.Random(seed)
    made = (f"The {choice.choice(SUBJECTS)} {choice.choice(VERBS)} the {choice.choice(SUBJECTS)}"
            f" on day {choice.randrange(1000)}." for _ in range(30))  # fmt: skip
    return " ".join(made)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """a.parquet: 300 texts, every tenth a copy of an earlier one."""
    made = tmp_path_factory.mktemp("pipes")
    with open(made / "a.jsonl", "w") as file:
        for i in range(300):
            seed = i - 5 if i % 10 == 9 else i
            file.write(json.dumps({"text": sentences(seed), "id": f"d{i}"}) + "\n")
    assert shell("sabia classify a.jsonl -o a.parquet", made).returncode == 0
    return made


def rows(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def test_a_pipeline_gives_the_rows_of_files(folder: Path) -> None:
    for words in ("classify a.parquet -o c.parquet", "dedup c.parquet -o d.parquet",
                  "tokenize d.parquet -o t1.parquet"):  # fmt: skip
        waiting.run(*words.split(), cwd=folder, check=True)
    lines = {
        "t2": "sabia classify < a.parquet | sabia dedup | sabia tokenize -o t2.parquet",
        "t3": "cat a.parquet | sabia classify | sabia dedup"
        " | sabia tokenize --save-tokenizer t3-tokenizer > t3.parquet",
        "t4": "export SABIA_PIPE=arrow; cat a.parquet | sabia classify | sabia dedup"
        " | sabia tokenize --save-tokenizer t4-tokenizer --to parquet > t4.parquet",
        "t5": "ls a.parquet | sabia classify --to jsonl | sabia dedup | sabia tokenize"
        " -o t5.parquet",
    }
    for line in lines.values():
        done = shell(line, folder)
        assert done.returncode == 0, done.stderr.decode()
    first = rows(folder / "t1.parquet")
    assert len(rows(folder / "d.parquet")) == 270
    assert first and all(rows(folder / f"{name}.parquet") == first for name in lines)


@pytest.mark.parametrize("stage", ["classify", "dedup", "rewrite"])
def test_closed_pipe_is_silent_141(folder: Path, stage: str) -> None:
    done = shell(f"sabia {stage} -q a.parquet | head -c 10; exit ${{PIPESTATUS[0]}}", folder)
    assert done.returncode == 141
    assert not done.stderr and len(done.stdout) == 10 and done.stdout[:4] == b"PAR1"


@pytest.mark.parametrize("stage", ["classify", "dedup", "rewrite", "tokenize"])
def test_cut_parquet_exits_65_and_leaves_nothing(folder: Path, stage: str, tmp_path: Path) -> None:
    size = (folder / "a.parquet").stat().st_size
    cut = f"head -c {size * 2 // 3} {folder}/a.parquet"
    assert shell(f"{cut} > cut.parquet", tmp_path).returncode == 0
    for done in (waiting.run(stage, "cut.parquet", "-o", "o.parquet", cwd=tmp_path),
                 shell(f"{cut} | sabia {stage} -o o.parquet", tmp_path)):  # fmt: skip
        assert done.returncode == 65, done.stderr.decode()
        assert len(done.stderr.splitlines()) <= 3
        assert {p.name for p in tmp_path.iterdir()} <= {"cut.parquet"}


@pytest.mark.parametrize("stage", ["classify", "dedup", "rewrite", "tokenize"])
def test_dead_producer_exits_65(stage: str, tmp_path: Path) -> None:
    done = shell(f"false | sabia {stage} -o o.parquet", tmp_path)
    assert done.returncode == 65 and not list(tmp_path.iterdir())


def start(words: list[str], folder: Path) -> subprocess.Popen:
    """A command as a terminal starts it: a shell's background job would ignore SIGINT."""
    heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([BIN / "sabia", *words], cwd=folder, env=ENVIRONMENT,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, preexec_fn=heeded)  # fmt: skip


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """Six shards, enough work for a signal to arrive in the middle."""
    made = tmp_path_factory.mktemp("large")
    (made / "in").mkdir()
    for shard in range(6):
        with open(made / "in" / f"{shard}.jsonl", "w") as file:
            for i in range(800):
                file.write(json.dumps({"text": sentences(shard * 10_000 + i) * 2}) + "\n")
    return made


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGUSR2, 75), (signal.SIGINT, 130)],
)
def test_signal_keeps_finished_shards_and_the_rest_follows(large: Path, number, code) -> None:
    out = large / f"out-{number}"
    process = start(["classify", "in", "-o", str(out)], large)
    until(lambda: list(out.glob("part-*.parquet")), process)
    process.send_signal(number)
    assert process.wait(HANG_S) == code, process.stderr.read().decode()
    parts = list(out.glob("part-*.parquet"))
    assert 1 <= len(parts) < 6 and not list(out.glob(".*"))
    done = waiting.run("classify", "in", "-o", out, cwd=large)
    assert done.returncode == 0 and b"already done" in done.stderr
    assert sum(pq.read_metadata(p).num_rows for p in out.glob("part-*.parquet")) == 4_800


def test_kill_leaves_no_unreadable_file_and_the_rerun_is_whole(large: Path) -> None:
    out = large / "killed"
    for pattern, count in ((".part-*", 1), ("part-*.parquet", 1), ("part-*.parquet", 3)):
        process = start(["classify", "in", "-o", str(out), "-j", "2"], large)
        until(lambda p=pattern, n=count: len(list(out.glob(p))) >= n, process)
        process.kill()
        process.wait()
        for part in out.glob("part-*.parquet"):
            pq.read_table(part)
        until(
            lambda: all(map(is_abandoned, out.glob(".*.tmp")))
        )  # its workers end when they miss it
    for place in (out, "whole"):
        assert waiting.run("classify", "in", "-o", place, cwd=large).returncode == 0
    whole = sorted((large / "whole").glob("part-*.parquet"))
    assert [rows(p) for p in sorted(out.glob("part-*.parquet"))] == [rows(p) for p in whole]
    assert not list(out.glob(".part*"))
