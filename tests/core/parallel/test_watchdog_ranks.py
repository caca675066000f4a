"""Real ranks in a real collective: the one that hangs, dies or fails is named; all end alike."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

SCRIPT = Path(__file__).parents[2] / "support" / "stuck_rank.py"
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("SABIA_", "SLURM_"))},
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
HERE = os.uname().nodename


def ranks(backend: str, mishap: str, folder: Path, size: int = 2) -> list[tuple[int, str]]:
    """(exit code, output) of processes started as torchrun starts them, without its agent."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [sys.executable, str(SCRIPT), backend, mishap, str(folder)]
    started = []
    for rank in range(size):
        mine = ENVIRONMENT | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(words, env=mine, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        )
    output = [each.communicate(timeout=HANG_S)[0] for each in started]
    return [(each.returncode, text) for each, text in zip(started, output, strict=True)]


def torchrun(mishap: str, folder: Path, size: int) -> subprocess.CompletedProcess:
    start = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}")
    words = [sys.executable, *start, str(SCRIPT), "torch", mishap, str(folder)]
    return subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, timeout=HANG_S)


def test_torchrun_with_a_rank_that_sleeps_inside_a_step(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torchrun starts the processes")
    done = torchrun("hangs", tmp_path, 3)
    line = rf"sabia: rank 1 \({HERE}\) has made no progress for \d+ s at step 3 \(backward\) in "
    assert len(re.findall(line + r"stuck_rank\.py:\d+ meet", done.stderr)) == 3
    assert "the other 2 wait; the state is that of the last checkpoint: run again" in done.stderr
    assert set(re.findall(r"exitcode\s*: (-?\d+)", done.stderr)) == {"75"}
    stacks = (tmp_path / "stacks-0001.txt").read_text()
    assert "in meet" in stacks
    assert "in all_reduce" in (tmp_path / "stacks-0002.txt").read_text()


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    """The others' collective breaks; they name the rank that died, not the transport's error."""
    pytest.importorskip("torch", reason="the torch backend")
    (code, output), (killed, _) = ranks("torch", "dies", tmp_path)
    assert (code, killed) == (75, -9)
    assert f"rank 1 ({HERE}) died, last heartbeat at step 3 (backward); the state is" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_a_rank_that_fails(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the torch backend")
    outcomes = ranks("torch", "fails", tmp_path, 3)
    assert [code for code, _ in outcomes] == [65] * 3
    assert outcomes[1][1].count("shard 5 is cut short") == 1
    for code in (0, 2):
        assert f"rank 1 ({HERE}) failed: shard 5 is cut short" in outcomes[code][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mishap", "codes"),
    [("none", [0, 0]), ("hangs", [75, 75]), ("dies", [75, -9]), ("fails", [65, 65])],
)
def test_jax_processes(tmp_path: Path, mishap: str, codes: list[int]) -> None:
    pytest.importorskip("jax", reason="the jax backend")
    outcomes = ranks("jax", mishap, tmp_path)
    assert [code for code, _ in outcomes] == codes, outcomes
    if mishap == "none":
        assert "work_s_median" in outcomes[0][1]
    else:
        assert f"rank 1 ({HERE})" in outcomes[0][1]
