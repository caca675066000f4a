"""World: this process among the processes of a run, as the launcher's variables describe it.

torchrun is recognised by RANK and WORLD_SIZE, srun by SLURM_PROCID with more than one task and a
step id (a batch script also has a SLURM_PROCID, but it is no job step and has one task), a TPU pod
by TPU_WORKER_HOSTNAMES with more than one name (one process per host). `detect` reads the
environment only; `process_group` joins the processes.

`hosts_of_ranks` reads Slurm's compact notation of hosts and task counts. A host list names hosts
with ranges in brackets: `a[1-3,7],b[01-10]x,rack[1-2]n[1-4]` (widths are kept, several brackets
multiply, the last one varies fastest). `SLURM_STEP_TASKS_PER_NODE` is like `2(x3),1`.
`SLURM_DISTRIBUTION` assigns ranks to nodes in blocks or cyclically; for other distributions the
hosts count as unknown. Source: the manual pages of scontrol and srun.
"""

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sabia.core.errors import UsageError

MAX_HOSTS = 100_000


def expand_hosts(nodes: str) -> list[str]:
    """All names of a Slurm host list, in order; raises UsageError if it is malformed."""
    hosts: list[str] = []
    # cut at the commas outside brackets
    patterns = re.findall(r"(?:\[[^\[\]]*\]|[^\[\],])+", nodes)
    if not patterns or ",".join(patterns) != nodes:
        raise _not_a_list(nodes)
    for pattern in patterns:
        parts = re.split(r"\[([^\]]*)\]", pattern)  # text, ranges, text, ranges, …, text
        choices = [list(_range(part, nodes)) if n % 2 else [part] for n, part in enumerate(parts)]
        # one more than allowed, so that a huge range is noticed without being expanded
        hosts += itertools.islice(map("".join, itertools.product(*choices)), MAX_HOSTS + 1)
        if len(hosts) > MAX_HOSTS:
            raise UsageError(f"host list {nodes[:80]!r}: more than {MAX_HOSTS:,} hosts")
    return hosts


def _range(ranges: str, nodes: str) -> Iterator[str]:
    """'01-03,7' → 01 02 03 7."""
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match or (match[2] and int(match[2]) - int(match[1]) not in range(MAX_HOSTS)):
            raise _not_a_list(nodes)
        first, last = int(match[1]), int(match[2] or match[1])
        yield from (f"{number:0{len(match[1])}d}" for number in range(first, last + 1))


def _not_a_list(nodes: str) -> UsageError:
    return UsageError(f"host list {nodes[:80]!r} (expected Slurm's form, such as gpu[01-04,7],x)")


def expand_counts(text: str) -> list[int]:
    """'2(x3),1' → [2, 2, 2, 1]; raises UsageError."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match or int(match[2] or 1) > MAX_HOSTS:
            raise UsageError(f"tasks per node {text[:80]!r} (expected Slurm's form, such as 2(x3))")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def hosts_of_ranks(environment: Mapping[str, str], size: int) -> dict[int, str]:
    """Rank → host, where the variables of a Slurm step or a TPU pod give it; {} elsewhere.

    Never raises: the names only make error messages better.
    """
    if environment.get("TPU_WORKER_HOSTNAMES") and "SLURM_STEP_ID" not in environment:
        return dict(enumerate(environment["TPU_WORKER_HOSTNAMES"].split(",")))
    try:
        hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST", ""))
        counts = expand_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    except UsageError:
        return {}
    if len(hosts) != len(counts) or sum(counts) != size:  # torchrun numbers its ranks itself
        return {}
    kind = re.split("[:,]", environment.get("SLURM_DISTRIBUTION", "block"))[0]
    if kind not in ("block", "cyclic") and max(counts) > 1:
        return {}
    nodes = [[host] * count for host, count in zip(hosts, counts, strict=True)]
    # cyclic: one task on each node in turn, until a node has all of its tasks
    groups = itertools.zip_longest(*nodes) if kind == "cyclic" else nodes
    return dict(enumerate(host for group in groups for host in group if host))


def describe_ranks(ranks: Sequence[int], hosts: Mapping[int, str], limit: int = 12) -> str:
    """'rank 7 (gpu003)' or 'ranks 3, 8-15 (gpu001, gpu002)'; only the first `limit` are listed."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []  # of consecutive ranks: [first, last]
    for rank in ordered:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    spans = [f"{a}" if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in runs]
    names = list(dict.fromkeys(hosts[rank] for rank in ordered if hosts.get(rank)))
    on_hosts = f" ({_first(names, limit)})" if names else ""
    return f"rank{'s' if len(ordered) > 1 else ''} {_first(spans, limit)}{on_hosts}"


def _first(words: Sequence[str], limit: int) -> str:
    more = len(words) - limit
    return ", ".join(words[:limit]) + (f" and {more} more" if more > 0 else "")


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
