"""The roll call: before any framework's rendezvous every process reports to process 0.

A cold start of many hosts is slow and uneven, and the barriers of the frameworks say only that
somebody was missing. So process 0 listens on a TCP port of its own; every other process waits a
random moment (longer the more they are), connects, retrying with exponential back-off and full
jitter until a time-out that grows with their number, and says who it is: rank, host, versions of
the packages (from their metadata; nothing is imported), settings, and what the caller wants to be
the same everywhere. When all have reported, process 0 releases all at once. Otherwise everybody
ends with the same line: which ranks did not report (with hosts, as far as Slurm's variables tell),
who runs other versions, or which rank was reported twice.

A process makes one connection, which stays open as its heartbeat (`watch`). It proves that it
belongs to the job by a token made from the launcher's job id and restart count, and from
SABIA_JOB_SECRET where that is set: without the secret the token keeps the processes of other jobs
apart but is no protection against an attacker. What does not present the token within 10 s, or
sends anything else, is cut off and counts for nothing. The port is one of four made from the
launcher's port, below the kernel's ephemeral ports, so that one that is taken does no harm.
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field

from sabia.core.errors import Failed
from sabia.core.parallel.health.connection import Gone, Link, Message
from sabia.core.parallel.slurm_hosts import say_ranks

PROTOCOL = 1
PACKAGES = ("sabia", "numpy", "torch", "jax", "jaxlib", "optax", "flax")
SETTINGS = ("NCCL_", "XLA_", "JAX_", "LIBTPU_", "TORCH_NCCL_", "SABIA_")
NOT_SETTINGS = ("SABIA_JOB_SECRET", "JAX_COMPILATION_CACHE_DIR", "NCCL_SOCKET_IFNAME")
JOB_VARIABLES = {  # by launcher; torchrun may have been started by several Slurm steps
    "srun": ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    "torchrun": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    "pod": ("TPU_WORKER_HOSTNAMES",),
}
FIRST_PORT, LAST_PORT, PORTS, PORT_STRIDE = 12_000, 20_000, 4, 2003
HEARD_WITHIN_S = 20.0
BIND_WITHIN_S = 60.0
MOST_DELAY_S = 10.0


def ports(base: int) -> list[int]:
    """Where process 0 may listen, in the order that it and the others try: 12000 to 19999."""
    span = LAST_PORT - FIRST_PORT
    return [FIRST_PORT + (base + PORT_STRIDE * turn) % span for turn in range(PORTS)]


def job_token(launcher: str, environment: Mapping[str, str] = os.environ) -> str:
    """The same for all processes of one start of one job, and different for others."""
    names = (*JOB_VARIABLES.get(launcher, ()), "SABIA_JOB_SECRET")
    said = "\n".join(f"{name}={environment.get(name, '')}" for name in names)
    return hmac.new(b"sabia roll call 1", said.encode(), hashlib.sha256).hexdigest()


def longest_delay_s(size: int) -> float:
    """Up to when a process delays its first connection: 0.5 s for 100 processes, at most 10 s."""
    return min(size / 200, MOST_DELAY_S)


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the packages that decide what is computed, '' where one is absent."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def settings(environment: Mapping[str, str] = os.environ) -> str:
    """A fingerprint of the variables that steer the backends and their transports."""
    named = sorted((k, v) for k, v in environment.items() if k.startswith(SETTINGS))
    said = repr([(name, value) for name, value in named if name not in NOT_SETTINGS])
    return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Report:
    """Who a process is. `same`: name → value that must be equal everywhere (versions and what the
    caller adds, such as a hash of the run's options); `settings` may differ, with a warning."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    local_rank: int = 0
    pid: int = field(default_factory=os.getpid)
    same: dict[str, str] = field(default_factory=dict)
    settings: str = ""
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)

    def hello(self, token: str) -> Message:
        """The first message of a connection."""
        return {"hello": PROTOCOL, "job": token, **asdict(self)}

    @classmethod
    def of_hello(cls, message: Message, token: str) -> Report:
        """The report in a first message; raises Gone when it is not of this job."""
        if not hmac.compare_digest(str(message.get("job")).encode(), token.encode()):
            raise Gone("it is of another job")
        try:
            said = {name: kind(message[name]) for name, kind in _KINDS.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Gone("it does not report as expected") from error
        return cls(**said)


def _texts(values: Mapping[object, object]) -> dict[str, str]:
    return {str(name): str(value) for name, value in values.items()}


_KINDS: dict[str, Callable] = {"rank": int, "host": str, "local_rank": int, "pid": int,
                               "same": _texts, "settings": str, "nonce": str}  # fmt: skip


class Register:
    """Who has reported, at process 0; knows what to say of those who have not, or differ."""

    def __init__(self, size: int, own: Report, expected: Mapping[int, str]) -> None:
        """`expected`: rank → host where the launcher's variables tell it."""
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

    def add(self, report: Report) -> str:
        """Take in a report; returns what is wrong with it, '' if nothing."""
        if report.rank not in range(self.size):
            return f"{_place(report)} reports as rank {report.rank} (expected 0-{self.size - 1})"
        known = self.reports.setdefault(report.rank, report)
        if known.nonce != report.nonce:
            return f"rank {report.rank} was reported twice: by {_place(known)} and {_place(report)}"
        return ""

    def missing(self, waited_s: float) -> str:
        """The line that names who did not report."""
        absent = [rank for rank in range(self.size) if rank not in self.reports]
        known = {rank: self.expected.get(rank, "") for rank in absent}
        return (
            f"{say_ranks(absent, known)} did not report within {waited_s:g} s "
            f"({len(self.reports)} of {self.size} processes did); look at what became of them "
            "(out of memory, a node that is down, a slow file system) and start again"
        )

    def differing(self) -> str:
        """The line that names who differs from most in what must be the same; '' if nobody."""
        reports = self.reports.values()
        for name in dict.fromkeys(name for report in reports for name in report.same):
            found = self._outliers({r: x.same.get(name, "") for r, x in self.reports.items()})
            if found:
                return f"not all processes are alike: {name} is {found}"
        return ""

    def settings_differ(self) -> str:
        """A warning that names whose settings differ; '' if nobody's."""
        values = {rank: report.settings for rank, report in self.reports.items()}
        most = _most_common(values.values())
        odd = [rank for rank, value in values.items() if value != most]
        kinds = ", ".join(f"{name}*" for name in SETTINGS)
        found = f"{say_ranks(odd, self.hosts)}: other environment variables ({kinds}) than the rest"
        return found if odd else ""

    def _outliers(self, values: Mapping[int, str]) -> str:
        """'2.7 on rank 3 (b), and 2.8 on the other 7'."""
        most = _most_common(values.values())
        odd = sorted(rank for rank, value in values.items() if value != most)
        if not odd:
            return ""
        by_value: dict[str, list[int]] = {}
        for rank in odd:
            by_value.setdefault(values[rank], []).append(rank)
        said = [f"{v or 'absent'} on {say_ranks(who, self.hosts)}" for v, who in by_value.items()]
        return f"{', '.join(said)}, and {most or 'absent'} on the other {len(values) - len(odd)}"


def _most_common(values: Iterable[str]) -> str:
    return Counter(values).most_common(1)[0][0]


def _place(report: Report) -> str:
    return f"process {report.pid} on {report.host}"


def listen(host: str, base: int, size: int, within_s: float = BIND_WITHIN_S) -> socket.socket:
    """Process 0's listening socket, on the first free port; raises Failed when all are taken.

    It listens on all addresses (on the loopback only, when that is where it is to be reached): the
    name that the others use may belong to any interface.
    """
    deadline = time.monotonic() + within_s
    while True:
        for port in ports(base):
            try:
                return _bound(host, port, size)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise Failed(f"process 0 cannot listen on port {port}: {error}") from error
        if time.monotonic() > deadline:
            taken = ", ".join(map(str, ports(base)))
            raise Failed(f"process 0 cannot listen: ports {taken} are taken on {host}")
        time.sleep(0.5)


def _bound(host: str, port: int, size: int) -> socket.socket:
    backlog = max(size, 128)
    if host == "localhost" or host.startswith("127."):
        return socket.create_server(("127.0.0.1", port), backlog=backlog)
    if socket.has_dualstack_ipv6():
        six = socket.AF_INET6
        return socket.create_server(("", port), family=six, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


@dataclass
class Caller:
    """One process on its way to process 0."""

    host: str
    base: int
    size: int
    report: Report
    token: str
    within_s: float
    check: Callable[[], None] = lambda: None  # called now and then; may raise to give up
    last: str = "no answer"

    def call(self) -> Link:
        """Connect and report; returns the connection once process 0 has taken the report in.

        Raises Failed when that is not so within `within_s`.
        """
        self.deadline = time.monotonic() + self.within_s
        self._sleep(random.uniform(0, longest_delay_s(self.size)))
        most = 1.0 + self.size / 50
        for attempt in range(1_000_000):
            for port in ports(self.base):
                link = self._try(port)
                if link:
                    return link
            self._sleep(random.uniform(0, min(most, 0.1 * 2 ** min(attempt, 20))))
            if time.monotonic() > self.deadline:
                break
        raise Failed(
            f"process {self.report.rank} of {self.size} on {self.report.host} could not reach "
            f"process 0 at {self.host} (ports {', '.join(map(str, ports(self.base)))}) within "
            f"{self.within_s:g} s: {self.last}"
        )

    def _try(self, port: int) -> Link | None:
        self.check()
        left = max(self.deadline - time.monotonic(), 0.1)
        try:
            link = Link(socket.create_connection((self.host, port), timeout=min(left, 10.0)))
        except OSError as error:
            self.last = f"port {port}: {error.strerror or error}"
            return None
        try:
            link.push(self.report.hello(self.token))
            self._heard(link, min(left, HEARD_WITHIN_S))
        except Gone as error:
            self.last = f"port {port}: {error}"
            link.close()
            return None
        return link

    def _heard(self, link: Link, within_s: float) -> None:
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            self.check()
            message = link.next(min(0.5, until - time.monotonic()))
            if message and "heard" in message:
                return
            if message:
                raise Gone(str(message.get("refused", "it is no process 0 of ours"))[:200])
        raise Gone("it does not answer")

    def _sleep(self, seconds: float) -> None:
        until = min(time.monotonic() + seconds, self.deadline)
        while (left := until - time.monotonic()) > 0:
            self.check()
            time.sleep(min(left, 0.5))
