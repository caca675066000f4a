"""A run that is killed or stopped at any moment ends as one that never was.

CPU, fp32: the final weights are the same bit for bit, and the metrics tell one history.
"""

import json
from pathlib import Path

import pytest
from training_cases import SHAPE, Commands, difference, losses, make_tokens

STEPS = 12
WORDS = ("--shape", SHAPE, "--steps", STEPS, "--batch", 8, "--lr", 1e-2, "--save-every", 3,
         "--peak-flops", "1T", "--mix", "web=2,books=1", "-q")  # fmt: skip


@pytest.fixture(scope="module")
def sabia(tmp_path_factory):
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, sabia: Commands) -> Path:
    """A run that was never interrupted; its folder also holds the token rows."""
    folder = tmp_path_factory.mktemp("whole")
    make_tokens(folder / "tokens")
    done = sabia("pretrain", folder / "tokens", *WORDS, "-o", folder / "run")
    assert done.returncode == 0, done.stderr
    return folder


def words(whole: Path, out: Path, *more: object) -> tuple[object, ...]:
    return ("pretrain", whole / "tokens", *WORDS, "-o", out, *more)


def weights(run: Path) -> bytes:
    return (run / "final" / "model.safetensors").read_bytes()


def same(whole: Path, out: Path) -> None:
    """Nothing shows that the run was interrupted."""
    assert weights(out) == weights(whole / "run")
    assert losses(out) == losses(whole / "run")
    assert list(losses(out)) == list(range(1, STEPS + 1))
    strays = [p for p in (out / "checkpoints").iterdir() if p.name.startswith(".")]
    assert not strays


def test_killed_between_steps(whole: Path, tmp_path: Path, sabia: Commands) -> None:
    command = words(whole, tmp_path / "run")
    killed = sabia(*command, at=("step", 8, "SIGKILL"))
    assert killed.returncode == -9
    assert not (tmp_path / "run" / "final").exists()
    done = sabia(*command)
    assert done.returncode == 0, done.stderr
    same(whole, tmp_path / "run")


def test_killed_again_and_again_while_writing(whole: Path, tmp_path: Path, sabia: Commands) -> None:
    """Each life is killed a few file operations later than the last, until one gets through."""
    command = words(whole, tmp_path / "run")
    codes = []
    while not codes or codes[-1] == -9:
        done = sabia(*command, at=("file", 2 + 5 * len(codes), "SIGKILL"))
        codes.append(done.returncode)
    assert codes[-1] == 0, done.stderr
    assert len(codes) >= 4
    same(whole, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("event", ["file", "step"])
def test_killed_at_every_moment(whole: Path, tmp_path: Path, event: str, sabia: Commands) -> None:
    """For each n: killed at the n-th occurrence, then resumed and never killed again."""
    for number in range(200):
        out = tmp_path / f"run{number}"
        command = words(whole, out)
        killed = sabia(*command, at=(event, number, "SIGKILL"))
        if killed.returncode == 0:
            break
        assert killed.returncode == -9, killed.stderr
        done = sabia(*command)
        assert done.returncode == 0, done.stderr
        same(whole, out)
    assert number >= STEPS


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_signal_saves_and_exits_75(whole: Path, tmp_path: Path, name: str, sabia: Commands) -> None:
    command = words(whole, tmp_path / "run")
    stopped = sabia(*command, at=("step", 7, name))
    assert stopped.returncode == 75
    assert b"stopped at step 8 of 12; state is saved" in stopped.stderr
    assert stopped.stdout == b""
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000006",
        "step-00000008",
    ]
    done = sabia(*command)
    assert done.returncode == 0, done.stderr
    same(whole, tmp_path / "run")


def test_corrupt_checkpoint_is_passed_over(whole: Path, tmp_path: Path, sabia: Commands) -> None:
    command = words(whole, tmp_path / "run")
    stopped = sabia(*command, at=("step", 7, "SIGTERM"))
    assert stopped.returncode == 75
    file = tmp_path / "run" / "checkpoints" / "step-00000008" / "state-00000-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    done = sabia(*command)
    assert done.returncode == 0, done.stderr
    assert b"warning: checkpoint step-00000008: state-00000-00000.safetensors is corrupt" in done.stderr
    same(whole, tmp_path / "run")


@pytest.mark.parametrize("first", ["jax", pytest.param("torch", marks=pytest.mark.slow)])
def test_other_backend_takes_over(whole: Path, tmp_path: Path, first: str, sabia: Commands) -> None:
    pytest.importorskip("jax", reason="the jax backend")
    command, second = words(whole, tmp_path / "run"), {"torch": "jax", "jax": "torch"}[first]
    stopped = sabia(*command, "--backend", first, at=("step", 5, "SIGTERM"))
    assert stopped.returncode == 75, stopped.stderr
    done = sabia(*command, "--backend", second)
    assert done.returncode == 0, done.stderr
    assert difference(whole / "run", tmp_path / "run") <= 1e-5
    path = next((tmp_path / "run" / "checkpoints").glob("step-00000012"))
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["backend"] == second
    assert manifest["data"]["rows"] == STEPS * 8
