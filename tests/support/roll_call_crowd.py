"""Many light processes in one roll call, forked from one interpreter so that 100 of them are cheap.

usage: roll_call_crowd.py SIZE SCENARIO FOLDER. Scenarios, all about rank 17: fine, absent, killed,
stopped, other-version, twice, fails. Prints one JSON object: by rank the exit code and what it
said, then when each was started and released, what process 0 accepted, and how long after the
mishap the last of the others ended. FOLDER gets the stderr of each rank.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from sabia.core.errors import BadData, SabiaError
from sabia.core.parallel import rollcall, watch
from sabia.core.parallel.launch import World
from sabia.core.parallel.watch import Guard

VICTIM = 17
MISHAPS = ("killed", "stopped", "fails")


def guard(rank: int, scenario: str) -> Guard:
    """Short times; another version for one."""
    odd = scenario == "other-version" and rank == VICTIM
    return Guard(
        same={"sabia": "0.0.9"} if odd else {},
        hang_timeout_s=3.0 if scenario == "stopped" else 60.0,
        interval_s=0.5,
        grace_s=0.3,
        start_timeout_s=6.0 if scenario == "absent" else 30.0,
    )


def live(rank: int, scenario: str, facts: dict) -> None:
    """Four steps of nothing; the victim meets its fate in the third and the others wait for it."""
    for step in range(1, 5):
        watch.at(step, "backward")
        if rank == VICTIM and step == 3:
            time.sleep(0.7 if scenario in MISHAPS else 0)  # a beat of this step gets out
            note(facts | {"mishap": time.monotonic()})
            meet_fate(scenario)
        watch.at(step, "reduce")
        time.sleep(60 if step == 3 and scenario in MISHAPS else 0.05)


def meet_fate(scenario: str) -> None:
    if scenario == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if scenario == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if scenario == "fails":
        raise BadData("shard 5 is cut short")


def member(rank: int, size: int, base: int, scenario: str) -> int:
    """The life of one process; returns its exit code."""
    facts: dict = {"rank": rank, "started": time.monotonic()}
    world = World(rank, size, rank % 4, "srun", "127.0.0.1", base)
    try:
        with watch.opened(world, guard(rank, scenario)) as mine:
            facts["released"] = time.monotonic()
            note(facts)
            live(rank, scenario, facts)
            if rank == 0:
                facts["accepted"] = mine._end.accepted
    except SabiaError as error:
        facts["said"] = str(error)
        note(facts)
        return int(error.exit_code)
    note(facts)
    return 0


def note(facts: dict) -> None:
    """Tell the parent; a line this short is written whole."""
    os.write(PIPE[1], json.dumps(facts).encode() + b"\n")


def start(rank: int, size: int, base: int, scenario: str, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.dup2(os.open(folder / str(rank), os.O_CREAT | os.O_APPEND | os.O_WRONLY), 2)
    try:
        os._exit(member(rank, size, base, scenario))
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(99)


def main(size: int, scenario: str, folder: Path) -> None:
    """Start all, wait for all, print what happened."""
    ranks = [rank for rank in range(size) if (rank, scenario) != (VICTIM, "absent")]
    ranks += [VICTIM] if scenario == "twice" else []
    rollcall.versions()  # read once, not in each child
    base = os.getpid()
    pids = {start(rank, size, base, scenario, folder): rank for rank in ranks}
    os.close(PIPE[1])
    codes, ended = wait(pids, scenario == "stopped")
    facts: dict = {}
    for line in os.fdopen(PIPE[0]).read().splitlines():
        facts.setdefault(json.loads(line)["rank"], {}).update(json.loads(line))
    json.dump({"codes": codes, "facts": facts, "ended": ended}, sys.stdout)


def wait(pids: dict[int, int], stops: bool) -> tuple[dict[int, int], float]:
    """Exit codes by rank, and when the last ended; one that `stops` is killed after the others."""
    codes: dict[int, int] = {}
    left = dict(pids)
    while left:
        pid, status = os.waitpid(-1, 0)
        codes[left.pop(pid)] = os.waitstatus_to_exitcode(status)
        ended = time.monotonic()
        if stops and list(left.values()) == [VICTIM]:
            for stopped in left:
                os.kill(stopped, signal.SIGKILL)
    return codes, ended


if __name__ == "__main__":
    PIPE = os.pipe()
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
