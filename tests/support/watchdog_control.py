"""For tests of the watchdog: its time limits are set once the scenario is reached, not before.

The clock decides what a hang is. So that a busy machine is not mistaken for one, all limits are
HANG_S until every process is where the test needs it.
"""

from collections.abc import Callable, Mapping, Set

from waiting import HANG_S, until

from sabia.core.parallel.health import watchdog
from sabia.core.parallel.health.heartbeat import SILENT_INTERVALS, Heartbeat
from sabia.core.parallel.health.monitor import RankMonitor


def send_a_heartbeat() -> None:
    """Return when process 0 is sure to receive where this process is now: when a second heartbeat
    is made, the one before it has been sent."""
    progress, made = watchdog._current.progress, []
    heartbeat = progress.heartbeat

    def counted() -> Heartbeat:
        made.append(None)
        return heartbeat()

    progress.heartbeat = counted
    until(lambda: len(made) >= 2)


def hang_when(reached: Callable[[Mapping[int, Heartbeat], Set[int]], bool]) -> None:
    """In process 0: nothing is a hang until `reached(heartbeats, silent ranks)`, and then a second
    without progress is."""
    check = RankMonitor._check_heartbeats

    def checked(monitor: RankMonitor, now: float) -> None:
        table = monitor.heartbeats
        late = SILENT_INTERVALS * table.interval_s
        silent = {rank for rank, (_, at) in table.newest.items() if rank and now - at > late}
        heartbeats = {rank: heartbeat for rank, (heartbeat, _) in table.newest.items()}
        table.hang_s = 1.0 if reached(heartbeats, silent) else HANG_S
        check(monitor, now)

    RankMonitor._check_heartbeats = checked


def when_reported(count: int, then: Callable[[], None]) -> None:
    """In process 0: call `then`, perhaps often, once so many have registered."""
    check = RankMonitor._check_registration

    def checked(monitor: RankMonitor, now: float) -> None:
        if len(monitor.registry.reports) >= count:
            then()
        check(monitor, now)

    RankMonitor._check_registration = checked


def end_registration_at(count: int) -> None:
    """In process 0: the registration times out when so many have registered, and not before."""
    check = RankMonitor._check_registration

    def checked(monitor: RankMonitor, now: float) -> None:
        if len(monitor.registry.reports) >= count:
            monitor.deadline = now - 1
        check(monitor, now)

    RankMonitor._check_registration = checked
