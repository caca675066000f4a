"""World: this process among the processes of a run, as the launcher's variables describe it.

torchrun is recognised by RANK and WORLD_SIZE, srun by SLURM_PROCID with more than one task and a
step id (a batch script also has a SLURM_PROCID, but it is no job step and has one task), a TPU pod
by TPU_WORKER_HOSTNAMES with more than one name (one process per host). `detect` reads the
environment only; `process_group` joins the processes.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from sabia.core.errors import UsageError
from sabia.core.parallel.slurm_hosts import expand_hosts

BASE_TIMEOUT_S = 300
TIMEOUT_S_PER_PROCESS = 2
POD_PORT = 28476


@dataclass(frozen=True)
class World:
    """Rank and number of processes, this process's number on its host, the address of rank 0."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launcher: str = "bare"  # bare, torchrun, srun or pod
    host: str = ""
    port: int = 0

    @property
    def leads(self) -> bool:
        """True for the one process that writes checkpoints and rows."""
        return self.rank == 0

    @property
    def timeout_s(self) -> int:
        """How long to wait for the other processes."""
        return BASE_TIMEOUT_S + TIMEOUT_S_PER_PROCESS * self.size


def detect(environment: Mapping[str, str] = os.environ) -> World:
    """The world that the launcher's variables describe; raises UsageError if they are malformed."""

    def number(name: str, default: str | None = None) -> int:
        value = environment.get(name, default)
        if value is None or not value.isdigit():
            raise UsageError(f"{name}: {value!r} in the environment (expected a number)")
        return int(value)

    coordinator = environment.get("SABIA_COORDINATOR")
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return World(
            rank=number("RANK"),
            size=number("WORLD_SIZE"),
            local_rank=number("LOCAL_RANK", "0"),
            launcher="torchrun",
            host=environment.get("MASTER_ADDR", "127.0.0.1"),
            port=number("MASTER_PORT", "29500"),
        )
    if int(environment.get("SLURM_NTASKS") or 1) > 1 and "SLURM_STEP_ID" in environment:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
        job, step = number("SLURM_JOB_ID"), number("SLURM_STEP_ID")
        return World(
            rank=number("SLURM_PROCID"),
            size=number("SLURM_NTASKS"),
            local_rank=number("SLURM_LOCALID", "0"),
            launcher="srun",
            host=coordinator or expand_hosts(nodes)[0],
            # below the kernel's range of ephemeral ports, and different for each job and step
            port=20000 + (job * 64 + step % 64) % 12000,
        )
    if "," in environment.get("TPU_WORKER_HOSTNAMES", "") and "TPU_WORKER_ID" in environment:
        hosts = environment["TPU_WORKER_HOSTNAMES"].split(",")
        rank, host = number("TPU_WORKER_ID"), coordinator or hosts[0]
        return World(rank=rank, size=len(hosts), launcher="pod", host=host, port=POD_PORT)
    return World()
