"""On a real Slurm of one node: an array that shares shards, a trainer that is requeued.

Skipped, with a word why, where a Slurm cannot be started. Takes about two minutes.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from little_run import losses, tokens_once
from one_node import OneNode, ask, job_state, start_again, wait_until

ROOT = Path(__file__).parent.parent.parent
SBATCH = ROOT / "examples" / "slurm"
pytestmark = pytest.mark.slurm


def test_array_processes_every_shard_once(node: OneNode, tmp_path: Path) -> None:
    shards = tmp_path / "in"
    shards.mkdir()
    for s in range(10):
        texts = [f"The house number {i} of street {s} has seven windows." for i in range(20)]
        pq.write_table(pa.table({"text": texts}), shards / f"{s}.parquet")
    words = ["sbatch", "--wait", "--array=0-3", f"--output={tmp_path}/log-%a.txt",
             str(SBATCH / "data_array.sbatch"), "classify", str(shards), "-o",
             str(tmp_path / "out")]  # fmt: skip
    assert subprocess.run(words, cwd=tmp_path).returncode == 0
    parts = sorted((tmp_path / "out").glob("part-*.parquet"))
    assert len(parts) == 10
    assert [pq.read_metadata(p).num_rows for p in parts] == [20] * 10
    logs = [(tmp_path / f"log-{i}.txt").read_text() for i in range(4)]
    taken = sum(int(log.partition("slice ")[2].split(": ")[1].split(" of")[0]) for log in logs)
    assert taken == 10
    assert not any("already done" in log for log in logs)


def train_words(folder: Path, out: str, *more: str) -> list[str]:
    return ["pretrain", str(tokens_once(folder)), "--shape", "d=64,layers=2,heads=2", "--steps",
            "300", "--batch", "8", "-o", str(folder / out), *more]  # fmt: skip


def test_trainer_is_requeued_and_ends_with_the_same_loss(node: OneNode, tmp_path: Path) -> None:
    subprocess.run(["sabia", *train_words(tmp_path, "whole")], check=True, cwd=tmp_path)
    job = ask("sbatch", "--parsable", f"--output={tmp_path}/train.log", f"--chdir={tmp_path}",
              str(SBATCH / "train.sbatch"), *train_words(tmp_path, "cut"))  # fmt: skip
    metrics = tmp_path / "cut" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 5, 120)
    ask("scancel", "--signal=USR1", "--batch", job)
    wait_until(lambda: job_state(job) in ("PENDING", "COMPLETED"), 60)
    assert job_state(job) == "PENDING"
    start_again(job)
    assert "restart 1" in (tmp_path / "train.log").read_text()
    assert losses(tmp_path / "cut")[-1] == losses(tmp_path / "whole")[-1]


def test_srun_starts_two_processes_that_equal_one(node: OneNode, tmp_path: Path) -> None:
    subprocess.run(["sabia", *train_words(tmp_path, "one")], check=True, cwd=tmp_path)
    words = ["sbatch", "--wait", "--ntasks=2", f"--output={tmp_path}/train.log",
             str(SBATCH / "train.sbatch"),
             *train_words(tmp_path, "two", "--mesh", "data=2")]  # fmt: skip
    done = subprocess.run(words, cwd=tmp_path)
    assert done.returncode == 0, (tmp_path / "train.log").read_text()
    pairs = zip(losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True)
    assert max(abs(a - b) for a, b in list(pairs)[:20]) <= 1e-5


def test_a_killed_task_is_named_and_the_job_goes_on(node: OneNode, tmp_path: Path) -> None:
    """From an environment that was broadcast as an archive."""
    archive = small_environment(tmp_path / "environment")
    words = train_words(tmp_path, "run", "--mesh", "data=2", "--save-every", "5")
    job = ask("sbatch", "--parsable", "--ntasks=2", f"--output={tmp_path}/train.log",
              f"--chdir={tmp_path}", f"--export=ALL,SABIA_ENV={archive}",
              str(SBATCH / "train.sbatch"), *words)  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 12, 180)
    os.kill(task_pid(job, "1"), signal.SIGKILL)
    wait_until(lambda: job_state(job) == "PENDING", 90)
    log = (tmp_path / "train.log").read_text()
    assert f"rank 1 ({os.uname().nodename.split('.')[0]}" in log and "died, last heartbeat" in log
    start_again(job)
    assert "resuming at step" in (tmp_path / "train.log").read_text()
    assert losses(tmp_path / "run")[-1] > 0
    assert not Path(f"/tmp/sabia-environment-{job}").exists()


def small_environment(folder: Path) -> Path:
    """An archive of an environment that borrows this one's packages."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    if sys.prefix != sys.base_prefix:
        shutil.copy(Path(sys.prefix) / "pyvenv.cfg", folder)
    archive = folder.with_suffix(".tar")
    subprocess.run(["tar", "-cf", str(archive), "-C", str(folder), "."], check=True)
    return archive


def task_pid(job: str, rank: str) -> int:
    """The process of a task of a job's training step."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            said = (process / "environ").read_bytes().split(b"\0")
            program = (process / "cmdline").read_bytes()
        except OSError:
            continue
        mine = {f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode()} <= set(said)
        if mine and b"sabia.cli.main" in program and b"srun" not in program:
            return int(process.name)
    raise ProcessLookupError(f"no task {rank} of job {job}")
