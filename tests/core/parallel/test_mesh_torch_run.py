"""The command on meshes of torchrun's processes: losses of one process, resumed on another mesh."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from training_cases import Commands, difference, make_tokens, sabia, torchrun

from sabia.core.model.storage.hub import load_model
from sabia.core.train.telemetry import metrics_path, read_rows

pytest.importorskip("torch", reason="torchrun starts the processes")
SHAPE = "d=36,layers=2,heads=6,kv=2,ffn=44,tied=false"
WORDS = ("--shape", SHAPE, "--steps", 20, "--batch", 8, "--lr", 3e-3, "-q")


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """A run of one process; its folder also holds the token rows."""
    folder = tmp_path_factory.mktemp("one")
    tokens = make_tokens(folder / "tokens")
    done = sabia("pretrain", tokens, *WORDS, "-o", folder / "run", "--validation", tokens)
    assert done.returncode == 0, done.stderr
    return folder


def words_for(one: Path, out: Path) -> tuple[object, ...]:
    return ("pretrain", one / "tokens", *WORDS, "-o", out, "--validation", one / "tokens")


def check(one: Path, out: Path) -> None:
    assert difference(one / "run", out) <= 1e-5
    (spec, found), (_, wanted) = load_model(out / "final"), load_model(one / "run" / "final")
    for tensor in spec.tensors():
        np.testing.assert_allclose(found[tensor.name], wanted[tensor.name], atol=1e-3)


SLOW = [pytest.param(f"{axis}=2", marks=pytest.mark.slow) for axis in ("tensor", "context", "pipe")]


@pytest.mark.parametrize("mesh", ["fsdp=2", *SLOW])
def test_two_processes(one: Path, tmp_path: Path, mesh: str) -> None:
    done = sabia(*words_for(one, tmp_path / "run"), "--mesh", mesh, launcher=torchrun(2))
    assert done.returncode == 0, done.stderr
    check(one, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "processes"), [("pipe=2", 2), ("fsdp=2,tensor=2", 4)])
def test_another_mesh_goes_on(one: Path, tmp_path: Path, mesh: str, processes: int) -> None:
    """Stopped on one device, resumed on a mesh: each shard reads its own box."""
    words, commands = words_for(one, tmp_path / "run"), Commands(tmp_path)
    stopped = commands(*words, at=("step", 7, "SIGTERM"))
    commands.close()
    assert stopped.returncode == 75, stopped.stderr
    done = sabia(*words, "--mesh", mesh, launcher=torchrun(processes))
    assert done.returncode == 0, done.stderr
    check(one, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "said"),
    [("fsdp=3", b"needs 3 devices, there are 1"), ("wide=2", b"expected AXIS=N")],
)
def test_refused_meshes(one: Path, tmp_path: Path, mesh: str, said: bytes) -> None:
    done = sabia(*words_for(one, tmp_path / "run"), "--mesh", mesh)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["torchrun", "a rank"])
def test_torchrun_returns_1_where_its_ranks_return_75(one: Path, tmp_path: Path, whom: str) -> None:
    """A SIGTERM to torchrun or to a rank: all ranks save the same step, which a run resumes."""
    out, endless = tmp_path / "run", ("--steps", 1_000_000)
    words = [*torchrun(2), *words_for(one, out), *endless, "--mesh", "data=2", "--peak-flops", "1T"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    started = subprocess.Popen([str(word) for word in words], text=True, **pipes)
    while len(read_rows(metrics_path(out))) < 5:
        assert started.poll() is None
        time.sleep(0.1)
    ranks = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    os.kill(started.pid if whom == "torchrun" else int(ranks[1]), signal.SIGTERM)
    _, messages = started.communicate(timeout=120)
    assert started.returncode == 1
    (step,) = set(re.findall(r"stopped at step (\d+) of 1,000,000; the state is saved", messages))
    assert [x.name for x in (out / "checkpoints").iterdir()] == [f"step-{int(step):08d}"]
    if whom == "a rank":
        assert set(re.findall(r"exitcode\s*: (-?\d+)", messages)) == {"75"}
