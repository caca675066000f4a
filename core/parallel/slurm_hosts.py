"""Slurm's short way to write hosts and task counts, and which host each rank is to run on.

A host list names hosts with ranges in brackets: `a[1-3,7],b[01-10]x,rack[1-2]n[1-4]` (widths are
kept, several brackets multiply, the last one runs fastest). `SLURM_STEP_TASKS_PER_NODE` counts
`2(x3),1`. Ranks are dealt to nodes in blocks or in turn, as `SLURM_DISTRIBUTION` says; of other
distributions we do not claim to know the hosts. Source: the manual pages of scontrol and srun.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from sabia.core.errors import UsageError

MOST_HOSTS = 100_000


def expand_hosts(nodes: str) -> list[str]:
    """All names of a Slurm host list, in order; raises UsageError for what is not one."""
    found: list[str] = []
    for pattern in _patterns(nodes):
        found += itertools.islice(_names(pattern, nodes), MOST_HOSTS + 1)
        if len(found) > MOST_HOSTS:
            raise UsageError(f"host list {nodes[:80]!r}: more than {MOST_HOSTS:,} hosts")
    return found


def _patterns(nodes: str) -> list[str]:
    """The list cut at the commas outside brackets."""
    parts = re.findall(r"(?:\[[^\[\]]*\]|[^\[\],])+", nodes)
    if not parts or ",".join(parts) != nodes:
        raise _not_a_list(nodes)
    return parts


def _names(pattern: str, nodes: str) -> Iterator[str]:
    pieces = re.split(r"\[([^\]]*)\]", pattern)  # text, ranges, text, ranges, …, text
    choices = [list(_range(piece, nodes)) if n % 2 else [piece] for n, piece in enumerate(pieces)]
    return map("".join, itertools.product(*choices))


def _range(ranges: str, nodes: str) -> Iterator[str]:
    """'01-03,7' → 01 02 03 7."""
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match or (match[2] and int(match[2]) - int(match[1]) not in range(MOST_HOSTS)):
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
        if not match or int(match[2] or 1) > MOST_HOSTS:
            raise UsageError(f"tasks per node {text[:80]!r} (expected Slurm's form, such as 2(x3))")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def hosts_of_ranks(environment: Mapping[str, str], size: int) -> dict[int, str]:
    """Rank → host, as far as a Slurm step's or a TPU pod's variables tell; {} where they do not.

    Never raises: the names only make error messages better.
    """
    if environment.get("TPU_WORKER_HOSTNAMES") and "SLURM_STEP_ID" not in environment:
        return dict(enumerate(environment["TPU_WORKER_HOSTNAMES"].split(",")))
    try:
        hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST", ""))
        counts = expand_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    except UsageError:
        return {}
    if len(hosts) != len(counts) or sum(counts) != size:  # torchrun in a step: ranks are its own
        return {}
    return _dealt(hosts, counts, environment.get("SLURM_DISTRIBUTION", "block"))


def _dealt(hosts: Sequence[str], counts: Sequence[int], distribution: str) -> dict[int, str]:
    kind = re.split("[:,]", distribution)[0]
    if kind not in ("block", "cyclic") and max(counts) > 1:
        return {}
    named = zip(hosts, counts, strict=True)
    rows = [[host] * count for host, count in named]
    if kind == "cyclic":
        turns = itertools.zip_longest(*rows)
        return dict(enumerate(host for turn in turns for host in turn if host))
    return dict(enumerate(host for row in rows for host in row))


def say_ranks(ranks: Sequence[int], hosts: Mapping[int, str], most: int = 12) -> str:
    """'rank 7 (gpu003)' or 'ranks 3, 8-15 (gpu001, gpu002)'; long lists are cut short."""
    ordered = sorted(ranks)
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    spans = [f"{a}" if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in runs]
    named = list(dict.fromkeys(hosts[rank] for rank in ordered if hosts.get(rank)))
    where = f" ({_some(named, most)})" if named else ""
    return f"rank{'s' if len(ordered) > 1 else ''} {_some(spans, most)}{where}"


def _some(words: Sequence[str], most: int) -> str:
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more} more" if more > 0 else "")
