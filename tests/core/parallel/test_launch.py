"""The world that each launcher's variables describe, and joining it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sabia.core.errors import UsageError
from sabia.core.parallel.process_group import (
    join_torch,
    keep_caches_apart,
    keep_offline,
    limit_jax_threads,
)
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


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, "3"),
        ({"OMP_NUM_THREADS": "4,2"}, "4"),
        ({"OMP_NUM_THREADS": "3", "NPROC": "7"}, "7"),
        ({"OMP_NUM_THREADS": "0"}, None),
        ({"OMP_NUM_THREADS": "all"}, None),
        ({}, None),
    ],
)
def test_jax_has_the_threads_of_openmp(given: dict[str, str], threads: str | None) -> None:
    environment = dict(given)
    limit_jax_threads(environment)
    assert environment.get("NPROC") == threads


def test_virtual_devices_have_threads_for_collectives() -> None:
    environment = {"OMP_NUM_THREADS": "1"}
    limit_jax_threads(environment, devices=4)
    assert environment["NPROC"] == "8"


JAX_PROCESS = """
import os
import jax
from sabia.core.parallel.process_group import join_jax
from sabia.core.parallel.world import World

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
with join_jax(World()):
    jax.jit(lambda x: x @ x + 1)(jax.numpy.ones((300, 300))).block_until_ready()
tasks = os.listdir("/proc/self/task")
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in tasks]
print(names.count("tf_XLAEigen"), hits.count("/jax/compilation_cache/cache_hits") > 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
def test_a_second_jax_process_compiles_nothing(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="the JAX backend")
    names = ("NPROC", "JAX_COMPILATION_CACHE_DIR")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "3"}
    environment |= {"JAX_PLATFORMS": "cpu"}
    lines = [
        subprocess.run(
            [sys.executable, "-c", JAX_PROCESS],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for _ in range(2)
    ]
    assert lines == [["3", "False"], ["3", "True"]]
    assert list((tmp_path / "sabia" / "jax").iterdir())
