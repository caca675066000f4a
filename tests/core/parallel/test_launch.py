"""Whom the launchers say we are, and which meshes this version runs."""

import pytest

from sabia.core.errors import UsageError
from sabia.core.parallel.launch import World, detect, first_host, join_torch

SLURM = {
    "SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[07-08,11]",
}  # fmt: skip


def test_bare() -> None:
    assert detect({}) == World()
    assert World().leads


def test_torchrun() -> None:
    found = detect({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "h",
                    "MASTER_PORT": "1234"})  # fmt: skip
    assert found == World(2, 4, 0, "torchrun", "h", 1234)
    assert not found.leads


def test_srun() -> None:
    found = detect(SLURM)
    assert (found.rank, found.size, found.local_rank) == (3, 4, 1)
    assert (found.launcher, found.host) == ("srun", "gpu07")
    assert 20000 <= found.port < 32768
    assert detect(SLURM | {"SLURM_STEP_ID": "2"}).port != found.port


def test_batch_script_is_alone() -> None:
    """A batch script has SLURM_PROCID and even several tasks, but no step."""
    batch = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}
    assert detect(batch) == World()
    assert detect(SLURM | {"SLURM_NTASKS": "1"}) == World()


def test_broken_environment_is_said() -> None:
    with pytest.raises(UsageError, match="WORLD_SIZE: 'many'"):
        detect({"RANK": "0", "WORLD_SIZE": "many"})
    with pytest.raises(UsageError, match="SLURM_PROCID"):
        detect({k: v for k, v in SLURM.items() if k != "SLURM_PROCID"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[003-006,9],x", "gpu003"), ("a[1-2]-ib,b", "a1-ib")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_waits_longer_for_more_processes() -> None:
    assert World(size=2000).timeout_s > World(size=8).timeout_s >= 300


def test_one_process_joins_nobody() -> None:
    torch = pytest.importorskip("torch", reason="the torch backend")
    with join_torch(World()) as device:
        assert device.type in ("cpu", "cuda")
        assert not torch.distributed.is_initialized()
