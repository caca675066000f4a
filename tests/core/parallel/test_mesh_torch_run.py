"""The command on meshes of torchrun's processes: losses of one process, resumed on another mesh."""

from pathlib import Path

import numpy as np
import pytest
from training_cases import Commands, difference, make_tokens, sabia, torchrun

from sabia.core.model.storage.hub import load_model

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
