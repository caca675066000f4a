"""Many light processes in one registration, forked from one interpreter so that 100 are cheap.

usage: rank_crowd.py SIZE SCENARIO FOLDER. Scenarios, all about rank 17: fine, absent, killed,
stopped, other-version, twice, fails. For twice, rank 17 comes again when all but the last rank,
which stays away, have reported: the registration is not complete by then. Prints one JSON object:
by rank the exit code and its message, when each was started and released, and how many connections
process 0 accepted.
FOLDER gets the stderr of each rank.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from waiting import HANG_S, until
from watchdog_control import end_registration_at, hang_when, send_a_heartbeat, when_reported

from sabia.core.errors import BadData, SabiaError
from sabia.core.parallel.health import rendezvous, watchdog
from sabia.core.parallel.health.watchdog import WatchdogConfig
from sabia.core.parallel.world import World

VICTIM = 17
MISHAPS = ("killed", "stopped", "fails")


def config(rank: int, scenario: str) -> WatchdogConfig:
    """No time limits that a busy machine could reach; another version for one rank."""
    odd = scenario == "other-version" and rank == VICTIM
    return WatchdogConfig(
        must_match={"sabia": "0.0.9"} if odd else {},
        hang_timeout_s=HANG_S,
        interval_s=0.5,
        grace_s=0.3,
        start_timeout_s=HANG_S,
    )


def direct(scenario: str, size: int, here: Path) -> None:
    """In process 0: when the time limits apply; `here` is made when all have registered."""
    if scenario == "twice":
        when_reported(size - 1, here.touch)
    if scenario == "absent":
        end_registration_at(size - 1)
    if scenario == "stopped":
        hang_when(
            lambda heartbeats, silent: silent == {VICTIM}
            and all((each.step, each.phase) == (3, "backward" if rank == VICTIM else "reduce")
                    for rank, each in heartbeats.items())
        )  # fmt: skip


def live(rank: int, scenario: str) -> None:
    """Four steps of nothing; the victim meets its fate in the third and the others wait for it."""
    for step in range(1, 5):
        watchdog.enter_phase(step, "backward")
        if rank == VICTIM and step == 3 and scenario in MISHAPS:
            send_a_heartbeat()
            meet_fate(scenario)
        watchdog.enter_phase(step, "reduce")
        time.sleep(HANG_S if step == 3 and scenario in MISHAPS else 0.05)


def meet_fate(scenario: str) -> None:
    if scenario == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if scenario == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if scenario == "fails":
        raise BadData("shard 5 is cut short")


def member(rank: int, size: int, base: int, scenario: str, here: Path, again: bool) -> int:
    """The life of one process, `again` of a rank that has come before; returns its exit code."""
    facts: dict = {"rank": rank, "started": time.monotonic()}
    if rank == 0:
        direct(scenario, size, here)
    if again:
        until(here.exists)
    world = World(rank, size, rank % 4, "srun", "127.0.0.1", base)
    try:
        with watchdog.opened(world, config(rank, scenario)) as mine:
            facts["released"] = time.monotonic()
            note(facts)
            live(rank, scenario)
            if rank == 0:
                facts["accepted"] = mine._peer.accepted
    except SabiaError as error:
        facts["message"] = str(error)
        note(facts)
        return int(error.exit_code)
    note(facts)
    return 0


def note(facts: dict) -> None:
    """Send facts to the parent; a line this short is written whole."""
    os.write(PIPE[1], json.dumps(facts).encode() + b"\n")


def start(rank: int, size: int, base: int, scenario: str, folder: Path, again: bool) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.dup2(os.open(folder / str(rank), os.O_CREAT | os.O_APPEND | os.O_WRONLY), 2)
    try:
        os._exit(member(rank, size, base, scenario, folder / "here", again))
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(99)


def main(size: int, scenario: str, folder: Path) -> None:
    """Start all, wait for all, print what happened."""
    away = {"absent": VICTIM, "twice": size - 1}.get(scenario)
    ranks = [rank for rank in range(size) if rank != away]
    ranks += [VICTIM] if scenario == "twice" else []
    rendezvous.versions()  # read once, not in each child
    base = os.getpid()
    pids = {
        start(rank, size, base, scenario, folder, rank in ranks[:index]): rank
        for index, rank in enumerate(ranks)
    }
    os.close(PIPE[1])
    codes = wait(pids, scenario == "stopped")
    facts: dict = {}
    for line in os.fdopen(PIPE[0]).read().splitlines():
        facts.setdefault(json.loads(line)["rank"], {}).update(json.loads(line))
    json.dump({"codes": codes, "facts": facts}, sys.stdout)


def wait(pids: dict[int, int], stops: bool) -> dict[int, int]:
    """Exit codes by rank; one that `stops` is killed after the others."""
    codes: dict[int, int] = {}
    left = dict(pids)
    while left:
        pid, status = os.waitpid(-1, 0)
        codes[left.pop(pid)] = os.waitstatus_to_exitcode(status)
        if stops and list(left.values()) == [VICTIM]:
            for stopped in left:
                os.kill(stopped, signal.SIGKILL)
    return codes


if __name__ == "__main__":
    PIPE = os.pipe()
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
