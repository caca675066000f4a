"""Runs that go on elsewhere: on another number of processes, another mesh, the other backend.

Three mixed sources, fp32: losses within 1e-5 of the run of one torch process that was never
stopped, and the same list of what was read. Of several processes any may be stopped or killed.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_cases import ENVIRONMENT, Commands, difference, losses, make_tokens, sabia, torchrun
from waiting import HANG_S

pytest.importorskip("torch", reason="torchrun starts the processes")
SCRIPT = Path(__file__).parents[2] / "support" / "interrupted.py"
SHAPE = "d=36,layers=2,heads=6,kv=2,ffn=44,tied=false"
WORDS = ("--shape", SHAPE, "--steps", 20, "--batch", 8, "--lr", 3e-3, "--save-every", 3,
         "--mix", "web=3,books=2,notes=1", "--then", "60%:notes=1,web=1", "--peak-flops", "1T",
         "-q")  # fmt: skip
HERE = os.uname().nodename
OPTIMIZERS = ("adamw", "muon")


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> Iterator[Commands]:
    found = Commands(tmp_path_factory.mktemp("commands"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, commands: Commands) -> Path:
    """Runs of one torch process that were never stopped, by optimizer; and the token rows."""
    folder = tmp_path_factory.mktemp("whole")
    make_tokens(folder / "tokens", 24, ("web", "books", "web", "notes"))
    for optimizer in OPTIMIZERS:
        done = commands(*words(folder, folder / optimizer, "--optimizer", optimizer))
        assert done.returncode == 0, done.stderr
    return folder


def words(whole: Path, out: Path, *more: object) -> tuple[object, ...]:
    return ("pretrain", whole / "tokens", *WORDS, "-o", out, *more)


def newest(out: Path) -> int:
    """Step of the newest checkpoint."""
    return max(int(path.name[5:]) for path in (out / "checkpoints").glob("step-*"))


def check(whole: Path, out: Path, commands: Commands, optimizer: str = "adamw") -> None:
    """The run has ended as the one of one process, and has read the same."""
    assert list(losses(out)) == list(range(1, 21))
    gap = difference(whole / optimizer, out)
    print(f"largest difference of a loss: {gap:.1e}")
    assert gap <= 1e-5
    asked = ("--optimizer", optimizer, "--list-read", "--to", "jsonl")
    lists = [commands(*words(whole, run, *asked)).stdout for run in (whole / optimizer, out)]
    assert lists[0] == lists[1]
    samples = [json.loads(line)["sample"] for line in lists[0].splitlines()]
    assert samples == list(range(20 * 8))


def mortal(size: int, at: tuple[str, int, str], ranks: str) -> tuple[str, ...]:
    """Words for torchrun's processes, of which some meet a mishap."""
    event, number, mishap = at
    return (*torchrun(size)[:-2], str(SCRIPT), event, str(number), mishap, ranks)


def together(
    size: int, at: tuple[str, int, str], ranks: str, *given: object
) -> list[tuple[int, str]]:
    """(exit code, stderr) of processes as torchrun starts them, without its agent."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
        world["MASTER_PORT"] = str(probe.getsockname()[1])
    start = [sys.executable, str(SCRIPT), at[0], str(at[1]), at[2], ranks, *map(str, given)]
    started = [
        subprocess.Popen(
            start,
            env=ENVIRONMENT | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    said = [each.communicate(timeout=HANG_S)[1] for each in started]
    return [(each.returncode, text) for each, text in zip(started, said, strict=True)]


def lines(text: str) -> list[str]:
    """What sabia said, without the transport's own words."""
    return [line for line in text.splitlines() if line.startswith("sabia")]


# -- another number of processes


@pytest.mark.slow
def test_four_one_two_processes(whole: Path, tmp_path: Path, commands: Commands) -> None:
    """Killed with -9 on each, in mid-run; each goes on from the last checkpoint."""
    command = words(whole, tmp_path / "run")
    start = mortal(4, ("step", 7, "SIGKILL"), "0,1,2,3")
    killed = sabia(*command, "--mesh", "data=4", launcher=start)
    assert killed.returncode != 0
    assert newest(tmp_path / "run") in (3, 6)
    killed = commands(*command, at=("step", 6, "SIGKILL"))
    assert killed.returncode == -9
    assert newest(tmp_path / "run") in (9, 12)
    done = sabia(*command, "--mesh", "fsdp=2", launcher=torchrun(2))
    assert done.returncode == 0, done.stderr
    check(whole, tmp_path / "run", commands)


# -- the other backend

EIGHT = "fsdp=2,tensor=2,context=2"


@pytest.mark.parametrize(
    ("optimizer", "first", "mesh"),
    [
        ("muon", "jax", EIGHT),
        pytest.param("adamw", "jax", EIGHT, marks=pytest.mark.slow),
        pytest.param("adamw", "jax", "", marks=pytest.mark.slow),
        pytest.param("muon", "jax", "", marks=pytest.mark.slow),
        pytest.param("adamw", "torch", "", marks=pytest.mark.slow),
        pytest.param("muon", "torch", "", marks=pytest.mark.slow),
    ],
)
def test_ten_steps_on_each_backend(
    whole: Path, tmp_path: Path, optimizer: str, first: str, mesh: str, commands: Commands
) -> None:
    pytest.importorskip("jax", reason="the jax backend")
    command = words(whole, tmp_path / "run", "--optimizer", optimizer)
    place = ("--mesh", mesh) if mesh else ()
    stopped = commands(*command, "--backend", first, *place, at=("step", 9, "SIGTERM"))
    assert stopped.returncode == 75, stopped.stderr
    assert newest(tmp_path / "run") == 10
    done = commands(*command, "--backend", {"jax": "torch", "torch": "jax"}[first])
    assert done.returncode == 0, done.stderr
    check(whole, tmp_path / "run", commands, optimizer)


# -- stopped and killed ranks


@pytest.mark.slow
@pytest.mark.parametrize("who", ["0", "1", "0,1"])
def test_a_signal_to_any_rank_stops_all(
    whole: Path, tmp_path: Path, who: str, commands: Commands
) -> None:
    command = words(whole, tmp_path / "run")
    stopped = together(2, ("step", 7, "SIGTERM"), who, *command, "--mesh", "fsdp=2")
    assert [code for code, _ in stopped] == [75, 75], stopped
    assert newest(tmp_path / "run") == 8
    for _, said in stopped:
        assert len(lines(said)) == 1, said
        assert "stopped at step 8 of 20; the state is saved" in said
    done = commands(*command)
    assert done.returncode == 0, done.stderr
    check(whole, tmp_path / "run", commands)


@pytest.mark.slow
@pytest.mark.parametrize("event", [("step", 7), ("file", 9)])
@pytest.mark.parametrize("who", [0, 1])
def test_a_killed_rank_ends_all(
    whole: Path, tmp_path: Path, event: tuple[str, int], who: int, commands: Commands
) -> None:
    """Between steps, and while its files of the second checkpoint become durable."""
    command = words(whole, tmp_path / "run")
    number = event[1] + 19 * (event[0] == "file" and who == 0)  # the leader does more with files
    found = together(2, (event[0], number, "SIGKILL"), str(who), *command, "--mesh", "data=2")
    assert found[who][0] == -9, found
    code, said = found[1 - who]
    assert code == 75, said
    assert len(lines(said)) == 1, said
    assert f"rank {who} ({HERE if who else '127.0.0.1'}) died" in said
    assert "run again to resume" in said
    assert newest(tmp_path / "run") >= 3
    done = commands(*command)
    assert done.returncode == 0, done.stderr
    check(whole, tmp_path / "run", commands)


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_whose_disk_is_full_ends_all(
    whole: Path, tmp_path: Path, who: int, commands: Commands
) -> None:
    command = words(whole, tmp_path / "run")
    number = 28 if who == 0 else 9
    found = together(2, ("file", number, "ENOSPC"), str(who), *command, "--mesh", "fsdp=2")
    assert [code for code, _ in found] == [1, 1], found
    for _, said in found:
        assert len(lines(said)) == 1, said
        assert "No space left on device" in said
    assert newest(tmp_path / "run") >= 3
    done = commands(*command)
    assert done.returncode == 0, done.stderr
    check(whole, tmp_path / "run", commands)
