"""Rank registration: before any framework's rendezvous every process registers at process 0.

A cold start of many hosts is slow and uneven, and when a process is missing the barriers of the
frameworks only time out. Therefore process 0 listens on a TCP port of its own. Every other process
waits a random time (longer the more processes there are), connects, retrying with exponential
back-off and full jitter until a time-out that grows with their number, and reports its rank, host,
versions of the packages (from their metadata; nothing is imported), settings, and what the caller
requires to be equal everywhere. When all are registered, process 0 releases all at once. Otherwise
all end with the same line: which ranks did not report (with hosts, as far as Slurm's variables name
them), which have other versions, or which rank was reported twice.

A process opens one connection, which stays open for its heartbeats (`watchdog`). It proves that it
belongs to the job by a token made from the launcher's job id and restart count, and from
SABIA_JOB_SECRET if that is set: without the secret the token keeps the processes of other jobs
apart but does not protect against an attacker. A connection that does not present the token within
10 s, or sends anything else, is closed and ignored. The port is one of four derived from the
launcher's port, below the kernel's ephemeral ports, so that one port in use does no harm.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import hmac
import os
import random
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

from sabia.core.errors import Failed
from sabia.core.parallel.health.connection import Connection, Message, PeerDisconnected
from sabia.core.parallel.world import describe_ranks

PROTOCOL = 1
PACKAGES = ("sabia", "numpy", "torch", "jax", "jaxlib")
SETTINGS = ("NCCL_", "XLA_", "JAX_", "LIBTPU_", "TORCH_NCCL_", "SABIA_")
NOT_SETTINGS = ("SABIA_JOB_SECRET", "JAX_COMPILATION_CACHE_DIR", "NCCL_SOCKET_IFNAME")
JOB_VARIABLES = {  # by launcher; torchrun may have been started by several Slurm steps
    "srun": ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "torchrun": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    "pod": ("TPU_WORKER_HOSTNAMES",),
}
FIRST_PORT, LAST_PORT, PORTS, PORT_STRIDE = 12_000, 20_000, 4, 2003
ACCEPT_TIMEOUT_S = 20.0
BIND_TIMEOUT_S = 60.0
MAX_DELAY_S = 10.0


def candidate_ports(base: int) -> list[int]:
    """Ports on which process 0 may listen, in the order in which all try them: 12000 to 19999."""
    span = LAST_PORT - FIRST_PORT
    return [FIRST_PORT + (base + PORT_STRIDE * attempt) % span for attempt in range(PORTS)]


def job_token(launcher: str, environment: Mapping[str, str] = os.environ) -> str:
    """The same for all processes of one start of one job, and different for others."""
    names = (*JOB_VARIABLES.get(launcher, ()), "SABIA_JOB_SECRET")
    text = "\n".join(f"{name}={environment.get(name, '')}" for name in names)
    return hmac.new(b"sabia rank registration 1", text.encode(), hashlib.sha256).hexdigest()


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the packages that decide what is computed, '' where one is absent."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    by_package = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            by_package[name] = version(name)
        except PackageNotFoundError:
            by_package[name] = ""
    return by_package


def settings_fingerprint(environment: Mapping[str, str] = os.environ) -> str:
    """A hash of the variables that control the backends and their transports."""
    named = sorted((k, v) for k, v in environment.items() if k.startswith(SETTINGS))
    text = repr([(name, value) for name, value in named if name not in NOT_SETTINGS])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class RankReport:
    """What a process reports of itself. `must_match`: name → value that must be equal everywhere
    (versions and what the caller adds, such as a hash of the run's options); `settings` may differ,
    with a warning; `nonce` tells a retry from another process of the same rank."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    must_match: dict[str, str] = field(default_factory=dict)
    settings: str = ""
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)

    def message(self, token: str) -> Message:
        """The first message of a connection."""
        return {"hello": PROTOCOL, "job": token, **asdict(self)}

    @classmethod
    def of_message(cls, message: Message, token: str) -> RankReport:
        """The report in a first message; raises PeerDisconnected if it is not of this job."""
        # compare_digest takes the same time for every wrong token
        if not hmac.compare_digest(str(message.get("job")).encode(), token.encode()):
            raise PeerDisconnected("it belongs to another job")
        kinds: dict[str, Callable] = {
            "rank": int, "host": str, "pid": int, "must_match": _texts, "settings": str,
            "nonce": str,
        }  # fmt: skip
        try:
            return cls(**{name: kind(message[name]) for name, kind in kinds.items()})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PeerDisconnected("protocol error: its report is malformed") from error

    @property
    def process(self) -> str:
        """'process 4711 on gpu003'."""
        return f"process {self.pid} on {self.host}"


def _texts(values: Mapping[object, object]) -> dict[str, str]:
    return {str(name): str(value) for name, value in values.items()}


class RankRegistry:
    """The ranks that have reported to process 0; names those that are missing or differ."""

    def __init__(self, size: int, own: RankReport, expected: Mapping[int, str]) -> None:
        """`expected`: rank → host where the launcher's variables name it."""
        self.size, self.expected = size, dict(expected)
        self.reports = {own.rank: own}

    @property
    def complete(self) -> bool:
        """True once all have reported."""
        return len(self.reports) == self.size

    @property
    def hosts(self) -> dict[int, str]:
        """Rank → host, as reported, else as expected."""
        return self.expected | {rank: report.host for rank, report in self.reports.items()}

    def add(self, report: RankReport) -> str:
        """Register a rank; returns what is wrong with its report, '' if nothing."""
        rank = report.rank
        if rank not in range(self.size):
            return f"{report.process} reports as rank {rank} (expected 0-{self.size - 1})"
        known = self.reports.setdefault(rank, report)
        if known.nonce != report.nonce:
            return f"rank {rank} was reported twice: by {known.process} and {report.process}"
        return ""

    def missing(self, waited_s: float) -> str:
        """The line that names the ranks that did not report."""
        absent = [rank for rank in range(self.size) if rank not in self.reports]
        return (
            f"{describe_ranks(absent, self.expected)} did not report within {waited_s:g} s "
            f"({len(self.reports)} of {self.size} processes did); find out why (out of memory, a "
            "node that is down, a slow file system) and start again"
        )

    def differing(self) -> str:
        """The line that names the ranks that differ from most in what must be equal; '' if none."""
        reports = self.reports.values()
        for name in dict.fromkeys(name for report in reports for name in report.must_match):
            values = {r: x.must_match.get(name, "") for r, x in self.reports.items()}
            usual, odd = _outliers(values)
            if not odd:
                continue
            by_value: dict[str, list[int]] = {}
            for rank in odd:
                by_value.setdefault(values[rank], []).append(rank)
            # 'torch is 2.7 on rank 3 (b), and 2.8 on the other 7'
            named = [
                f"{value or 'absent'} on {describe_ranks(ranks, self.hosts)}"
                for value, ranks in by_value.items()
            ]
            return (
                f"the processes differ where they must be equal: {name} is {', '.join(named)}, "
                f"and {usual or 'absent'} on the other {len(values) - len(odd)}"
            )
        return ""

    def settings_differ(self) -> str:
        """A warning that names the ranks whose settings differ; '' if none do."""
        _, odd = _outliers({rank: report.settings for rank, report in self.reports.items()})
        if not odd:
            return ""
        prefixes = ", ".join(f"{name}*" for name in SETTINGS)
        return (
            f"{describe_ranks(odd, self.hosts)}: other environment variables ({prefixes}) than on "
            "the other ranks"
        )


def _outliers(values: Mapping[int, str]) -> tuple[str, list[int]]:
    """(the most common value, the ranks that have another one)."""
    usual = Counter(values.values()).most_common(1)[0][0]
    return usual, sorted(rank for rank, value in values.items() if value != usual)


def listen(host: str, base: int, size: int, timeout_s: float = BIND_TIMEOUT_S) -> socket.socket:
    """Process 0's listening socket, on the first free port; raises Failed when all are in use.

    It listens on all addresses (on the loopback only if `host` is the loopback): the name that the
    others use may belong to any interface.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        for port in candidate_ports(base):
            try:
                return _bound_socket(host, port, size)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise Failed(f"process 0 cannot listen on port {port}: {error}") from error
        if time.monotonic() > deadline:
            ports = ", ".join(map(str, candidate_ports(base)))
            raise Failed(
                f"process 0 cannot listen on {host}: ports {ports} are in use (expected one of "
                "them free; stop what uses them, or change the launcher's port)"
            )
        time.sleep(0.5)  # a process of an earlier start of the job may still be ending


def _bound_socket(host: str, port: int, size: int) -> socket.socket:
    backlog = max(size, 128)  # all processes may connect at the same time
    if host == "localhost" or host.startswith("127."):
        return socket.create_server(("127.0.0.1", port), backlog=backlog)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=both)


@dataclass
class RegistrationClient:
    """Registers one process at process 0."""

    host: str
    base: int
    size: int
    report: RankReport
    token: str
    timeout_s: float
    check: Callable[[], None] = lambda: None  # called now and then; may raise to give up
    last_problem: str = "no answer"

    def register(self) -> Connection:
        """Connect and report; returns the connection once process 0 has accepted the report.

        Raises Failed if it has not within `timeout_s`.
        """
        self.deadline = time.monotonic() + self.timeout_s
        # spread the first connections: over 0.5 s for 100 processes, over 10 s at most
        self._sleep(random.uniform(0, min(self.size / 200, MAX_DELAY_S)))
        max_backoff_s = 1.0 + self.size / 50
        for attempt in range(1_000_000):
            for port in candidate_ports(self.base):
                connection = self._try(port)
                if connection:
                    return connection
            # exponential back-off with full jitter: uniform in [0, 0.1 · 2^attempt)
            self._sleep(random.uniform(0, min(max_backoff_s, 0.1 * 2 ** min(attempt, 20))))
            if time.monotonic() > self.deadline:
                break
        ports = ", ".join(map(str, candidate_ports(self.base)))
        raise Failed(
            f"process {self.report.rank} of {self.size} on {self.report.host} could not reach "
            f"process 0 at {self.host} (ports {ports}) within {self.timeout_s:g} s: "
            f"{self.last_problem}"
        )

    def _try(self, port: int) -> Connection | None:
        self.check()
        left = max(self.deadline - time.monotonic(), 0.1)
        try:
            connected = socket.create_connection((self.host, port), timeout=min(left, 10.0))
        except OSError as error:
            self.last_problem = f"port {port}: {error.strerror or error}"
            return None
        connection = Connection(connected)
        try:
            connection.send(self.report.message(self.token))
            until = time.monotonic() + min(left, ACCEPT_TIMEOUT_S)
            while time.monotonic() < until:
                self.check()
                message = connection.next_message(min(0.5, until - time.monotonic()))
                if message and "accepted" in message:
                    return connection
                if message:  # another program may listen on this port
                    raise PeerDisconnected(str(message.get("refused", "it is not process 0"))[:200])
            raise PeerDisconnected("it does not answer")
        except PeerDisconnected as error:
            self.last_problem = f"port {port}: {error}"
            connection.close()
            return None

    def _sleep(self, seconds: float) -> None:
        until = min(time.monotonic() + seconds, self.deadline)
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, 0.5))
