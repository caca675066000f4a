"""Several processes or devices make the run of one: losses equal to 1e-5 over 20 steps."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from training_cases import ENVIRONMENT, SHAPE, Commands, difference, make_tokens, sabia, torchrun

WORDS = ("--shape", SHAPE, "--steps", 20, "--batch", 8, "--lr", 1e-2, "-q")


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """A run of one torch process; its folder also holds the token rows."""
    folder = tmp_path_factory.mktemp("one")
    tokens = make_tokens(folder / "tokens")
    done = sabia("pretrain", tokens, *WORDS, "-o", folder / "run", "--validation", tokens)
    assert done.returncode == 0, done.stderr
    return folder


def same(one: Path, out: Path, *more: object, **settings) -> None:
    tokens = one / "tokens"
    done = sabia("pretrain", tokens, *WORDS, "-o", out, "--validation", tokens, *more, **settings)
    assert done.returncode == 0, done.stderr
    assert pq.read_table(io.BytesIO(done.stdout)).num_rows == 22  # and nothing else on stdout
    assert done.stdout[:4] == done.stdout[-4:] == b"PAR1"
    assert difference(one / "run", out) <= 1e-5


def test_two_gloo_processes(one: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torchrun starts the processes")
    same(one, tmp_path / "run", "--mesh", "data=2", launcher=torchrun(2))
    assert (tmp_path / "run" / "final" / "config.json").exists()


def test_eight_jax_devices(one: Path, tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="the jax backend")
    same(one, tmp_path / "run", "--mesh", "data=8", "--backend", "jax")


@pytest.mark.slow
def test_two_jax_processes(one: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torchrun starts the processes")
    pytest.importorskip("jax", reason="the jax backend")
    same(one, tmp_path / "run", "--mesh", "data=2", "--backend", "jax", launcher=torchrun(2))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_two_tasks_of_a_slurm_step(one: Path, tmp_path: Path, backend: str) -> None:
    """With the variables that srun sets; its pipe, which ends in a log, gets no binary."""
    pytest.importorskip(backend, reason=f"the {backend} backend")
    words = [sys.executable, "-m", "sabia.cli.main", "pretrain", one / "tokens", *WORDS, "-o",
             tmp_path / "run", "--validation", one / "tokens", "--backend", backend]  # fmt: skip
    tasks = []
    for rank in range(2):
        given = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2",
                 "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
                 "SLURM_STEP_NODELIST": "127.0.0.1"}  # fmt: skip
        task = subprocess.Popen(
            [str(word) for word in words], env={**ENVIRONMENT, **given}, stdout=subprocess.PIPE
        )
        tasks.append(task)
    said = [task.communicate()[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0]
    assert b"PAR1" not in said[0]
    assert said[1] == b""
    assert difference(one / "run", tmp_path / "run") <= 1e-5


@pytest.mark.slow
def test_another_number_of_processes_goes_on(one: Path, tmp_path: Path) -> None:
    """Stopped as one process, resumed by two: every row once, the same losses."""
    words = ("pretrain", one / "tokens", *WORDS, "--validation", one / "tokens", "-o",
             tmp_path / "run")  # fmt: skip
    commands = Commands(tmp_path)
    stopped = commands(*words, at=("step", 7, "SIGTERM"))
    commands.close()
    assert stopped.returncode == 75, stopped.stderr
    done = sabia(*words, "--mesh", "data=2", launcher=torchrun(2))
    assert done.returncode == 0, done.stderr
    assert difference(one / "run", tmp_path / "run") <= 1e-5
