"""For tests of the watch over processes: its limits of time are set when the scene is, not before.

The clock decides what a hang is. So that a busy machine is not taken for one, all limits are HANG_S
until every process stands where the test wants it.
"""

from collections.abc import Callable, Mapping, Set

from waiting import HANG_S, until

from sabia.core.parallel.health import watchdog
from sabia.core.parallel.health.heartbeat import SILENT_BEATS, Beat
from sabia.core.parallel.health.monitor import Hub


def let_a_beat_out() -> None:
    """Return when process 0 is bound to hear where this process stands now: when the beat after
    one that was made meanwhile is made, that one has been sent."""
    marks, made = watchdog._current.marks, []
    beat = marks.beat

    def counted() -> Beat:
        made.append(None)
        return beat()

    marks.beat = counted
    until(lambda: len(made) >= 2)


def hang_when(reached: Callable[[Mapping[int, Beat], Set[int]], bool]) -> None:
    """In process 0: nothing is a hang until `reached(beats, ranks that no longer beat)`, and then
    a second without a move is."""
    look = Hub._look

    def looked(hub: Hub, now: float) -> None:
        board = hub.board
        late = SILENT_BEATS * board.interval_s
        silent = {rank for rank, (_, at) in board.beats.items() if rank and now - at > late}
        beats = {rank: beat for rank, (beat, _) in board.beats.items()}
        board.hang_s = 1.0 if reached(beats, silent) else HANG_S
        look(hub, now)

    Hub._look = looked


def when_reported(count: int, then: Callable[[], None]) -> None:
    """In process 0: call `then`, perhaps often, from when so many have reported."""
    take_roll = Hub._take_roll

    def taken(hub: Hub, now: float) -> None:
        if len(hub.register.reports) >= count:
            then()
        take_roll(hub, now)

    Hub._take_roll = taken


def end_the_roll_call_at(count: int) -> None:
    """In process 0: the roll call's time is over when so many have reported, and not before."""
    take_roll = Hub._take_roll

    def taken(hub: Hub, now: float) -> None:
        if len(hub.register.reports) >= count:
            hub.deadline = now - 1
        take_roll(hub, now)

    Hub._take_roll = taken
