"""The world that each launcher's variables describe, and joining it."""

import os
from pathlib import Path

import pytest

from sabia.core.errors import UsageError
from sabia.core.parallel.job_environment import keep_caches_apart, keep_offline
from sabia.core.parallel.process_group import join_torch
from sabia.core.parallel.world import World, detect

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


def test_tpu_pod() -> None:
    pod = {"TPU_WORKER_HOSTNAMES": "t0,t1,t2", "TPU_WORKER_ID": "2"}
    found = detect(pod)
    assert (found.rank, found.size, found.launcher, found.host) == (2, 3, "pod", "t0")
    assert detect(pod | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}) == World()


def test_nothing_is_fetched_and_caches_are_apart(tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path), "SLURM_JOB_ID": "12", "TRITON_CACHE_DIR": "/mine"}
    keep_offline(environment)
    keep_caches_apart(tmp_path / "run", environment)
    assert environment["HF_HUB_OFFLINE"] == environment["TRANSFORMERS_OFFLINE"] == "1"
    assert environment["TRITON_CACHE_DIR"] == "/mine"  # what the user has set stays
    node = tmp_path / f"sabia-{os.getuid()}" / "12"
    assert node.stat().st_mode & 0o777 == 0o700
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(node / "inductor")
    assert environment["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "run" / ".cache" / "jax")


def test_broken_environment_is_said() -> None:
    with pytest.raises(UsageError, match="WORLD_SIZE: 'many'"):
        detect({"RANK": "0", "WORLD_SIZE": "many"})
    with pytest.raises(UsageError, match="SLURM_PROCID"):
        detect({k: v for k, v in SLURM.items() if k != "SLURM_PROCID"})


def test_waits_longer_for_more_processes() -> None:
    assert World(size=2000).timeout_s > World(size=8).timeout_s >= 300


def test_one_process_joins_nobody() -> None:
    torch = pytest.importorskip("torch", reason="the torch backend")
    with join_torch(World()) as device:
        assert device.type in ("cpu", "cuda")
        assert not torch.distributed.is_initialized()
