"""Rank registration: host lists, tokens, missing or differing ranks, foreign connections."""

import json
import os
import socket
import threading

import pytest
from waiting import HANG_S, until

from sabia.core.errors import Failed, UsageError
from sabia.core.parallel.health import rendezvous
from sabia.core.parallel.health.rendezvous import (
    RankRegistry,
    RankReport,
    candidate_ports,
    job_token,
    settings_fingerprint,
)
from sabia.core.parallel.health.watchdog import Watchdog, WatchdogConfig
from sabia.core.parallel.world import (
    World,
    describe_ranks,
    expand_counts,
    expand_hosts,
    hosts_of_ranks,
)

STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a[1-2],b",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("a[1-3,7],b[01-03]x", ["a1", "a2", "a3", "a7", "b01x", "b02x", "b03x"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
    ],
)
def test_host_lists(nodes: str, names: list[str]) -> None:
    assert expand_hosts(nodes) == names


@pytest.mark.parametrize("nodes", ["", "a[1-", "a[x]", "a[3-1]", "a,,b", "a]", "n[0-9999999]", ","])
def test_malformed_host_lists(nodes: str) -> None:
    with pytest.raises(UsageError, match="host list"):
        expand_hosts(nodes)


def test_counts() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(UsageError, match="tasks per node"):
        expand_counts("2(x3")


def test_hosts_of_ranks() -> None:
    block = ["a1", "a1", "a2", "a2", "b"]
    cyclic = ["a1", "a2", "b", "a1", "a2"]
    assert list(hosts_of_ranks(STEP, 5).values()) == block
    turned = STEP | {"SLURM_DISTRIBUTION": "cyclic"}
    assert list(hosts_of_ranks(turned, 5).values()) == cyclic
    assert hosts_of_ranks(STEP | {"SLURM_DISTRIBUTION": "plane=2"}, 5) == {}
    assert hosts_of_ranks(STEP, 8) == {}  # torchrun in a step: its ranks are not the step's tasks
    assert hosts_of_ranks({}, 5) == {}
    assert hosts_of_ranks({"TPU_WORKER_HOSTNAMES": "t0,t1"}, 2) == {0: "t0", 1: "t1"}


def test_ranks_are_described_briefly() -> None:
    assert describe_ranks([17], {}) == "rank 17"
    hosts = dict.fromkeys(range(8, 16), "g1") | {42: "g5"}
    assert describe_ranks([42, *range(8, 16)], hosts) == "ranks 8-15, 42 (g1, g5)"
    many = describe_ranks(range(0, 60, 2), {}, limit=3)
    assert many == "ranks 0, 2, 4 and 27 more"


def test_a_token_distinguishes_jobs() -> None:
    token = job_token("srun", STEP)
    assert token == job_token("srun", STEP | {"SLURM_PROCID": "3"})
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SABIA_JOB_SECRET"):
        assert job_token("srun", STEP | {name: "9"}) != token
    # torchrun's processes may come from several steps
    assert job_token("torchrun", STEP) == job_token("torchrun", STEP | {"SLURM_STEP_ID": "1"})


def test_ports_are_below_the_ephemeral_ones() -> None:
    for base in (29500, 20000, 65535, 12345):
        assert len(set(candidate_ports(base))) == 4
        assert all(12000 <= port < 20000 for port in candidate_ports(base))
        assert base not in candidate_ports(base)


def test_settings_leave_the_secret_out() -> None:
    plain = settings_fingerprint({"NCCL_DEBUG": "INFO"})
    assert plain == settings_fingerprint(
        {"NCCL_DEBUG": "INFO", "SABIA_JOB_SECRET": "s", "HOME": "/root"}
    )
    assert plain != settings_fingerprint({"NCCL_DEBUG": "WARN"})


def test_missing_ranks_are_named() -> None:
    expected = {rank: f"gpu{rank:03d}" for rank in range(100)}
    registry = RankRegistry(100, RankReport(0), expected)
    for rank in set(range(1, 100)) - {17, 42}:
        assert registry.add(RankReport(rank)) == ""
    assert not registry.complete
    line = registry.missing(World(size=100).timeout_s)
    assert line.startswith("ranks 17, 42 (gpu017, gpu042) did not report within 500 s")


def test_a_differing_rank_is_named_also_when_it_is_process_0() -> None:
    registry = RankRegistry(4, RankReport(0, host="a", must_match={"torch": "2.7"}), {})
    for rank in (1, 2, 3):
        registry.add(RankReport(rank, host="b", must_match={"torch": "2.8"}, settings="x"))
    assert "torch is 2.7 on rank 0 (a), and 2.8 on the other 3" in registry.differing()
    assert registry.settings_differ().startswith("rank 0 (a): other environment variables")


def test_a_rank_out_of_range_is_named() -> None:
    registry = RankRegistry(4, RankReport(0), {})
    assert "reports as rank 4 (expected 0-3)" in registry.add(RankReport(4))


def processes(size: int, base: int, **settings) -> list[Watchdog]:
    world = [World(rank, size, 0, "srun", "127.0.0.1", base) for rank in range(size)]
    config = WatchdogConfig(interval_s=0.1, grace_s=HANG_S, **settings)
    return [Watchdog(each, config) for each in world]


def started(watchdog: Watchdog) -> threading.Thread:
    thread = threading.Thread(target=watchdog.start)
    thread.start()
    return thread


def malformed_messages() -> list[bytes]:
    """What a port may receive by accident or malice."""
    other_job = RankReport(1).message("another job's token")
    return [
        b"", b"\n", b"\x16\x03\x01\x02\x00garbage\xff\n", b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 100_000, b"[1, 2]\n", b"{}\n", b"[" * 50_000 + b"\n",
        json.dumps(other_job).encode() + b"\n",
        json.dumps({**RankReport(1).message(job_token("srun")), "must_match": 3}).encode() + b"\n",
    ]  # fmt: skip


def test_foreign_connections_change_nothing() -> None:
    base = os.getpid()
    first, second = processes(2, base)
    leading = started(first)
    until(lambda: first._peer)  # it listens
    sockets = [
        socket.create_connection(("127.0.0.1", candidate_ports(base)[0]))
        for _ in malformed_messages()
    ]
    for each, words in zip(sockets, malformed_messages(), strict=True):
        each.sendall(words)
    second.start()
    leading.join(HANG_S)
    assert not leading.is_alive()
    assert first.termination is second.termination is None
    assert list(first._peer.registry.reports) == [0, 1]  # type: ignore[union-attr]
    refused = sockets[8].recv(100)
    assert b"another job" in refused
    for each in sockets:
        each.close()
    second.close()
    first.close()


def test_a_port_in_use_is_skipped() -> None:
    base = os.getpid() + 1
    with socket.create_server(
        ("127.0.0.1", candidate_ports(base)[0])
    ) as other:  # silent: it never answers
        first, second = processes(2, base)
        leading = started(first)
        waiting = rendezvous.ACCEPT_TIMEOUT_S
        rendezvous.ACCEPT_TIMEOUT_S = 0.3
        try:
            second.start()
        finally:
            rendezvous.ACCEPT_TIMEOUT_S = waiting
        leading.join(HANG_S)
        assert not leading.is_alive()
        assert other.getsockname()[1] != first._peer._listener.getsockname()[1]  # type: ignore[union-attr]
    second.close()
    first.close()


def test_process_0_does_not_answer() -> None:
    (_, second) = processes(2, os.getpid() + 2, start_timeout_s=0.3)
    with pytest.raises(
        Failed, match=r"process 1 of 2 on .* could not reach process 0 at 127.0.0.1"
    ):
        second.start()


def test_all_ports_in_use() -> None:
    base = os.getpid() + 3
    used = [socket.create_server(("127.0.0.1", port)) for port in candidate_ports(base)]
    with pytest.raises(Failed, match=r"cannot listen on 127.0.0.1: ports .* are in use"):
        rendezvous.listen("127.0.0.1", base, 2, timeout_s=0.1)
    for each in used:
        each.close()
