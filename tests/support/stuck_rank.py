"""A rank that all-reduces step after step; rank 1 hangs, dies or fails in the third.

usage: stuck_rank.py torch|jax hangs|dies|fails|none DIRECTORY, with the variables of a launcher.
Exits as the command line does: the line on stderr, the error's code.
"""

import os
import signal
import sys
import time
from pathlib import Path

from waiting import HANG_S
from watchdog_control import hang_when, send_a_heartbeat

from sabia.core import notes, stop
from sabia.core.errors import BadData, SabiaError
from sabia.core.parallel import process_group
from sabia.core.parallel.health import watchdog
from sabia.core.parallel.health.watchdog import WatchdogConfig
from sabia.core.parallel.world import detect


def main(backend: str, mishap: str, directory: Path) -> None:
    """Join, step, leave."""
    stop.install()
    world = detect()
    config = WatchdogConfig(hang_timeout_s=HANG_S, interval_s=0.5, grace_s=1.0, directory=directory)
    hang_when(
        lambda heartbeats, silent: not silent
        and all((each.step, each.phase) == (3, "reduce") or (rank == 1 and "meet" in each.frame)
                for rank, each in heartbeats.items())
    )  # fmt: skip
    join = process_group.join_torch if backend == "torch" else process_group.join_jax
    with join(world, config=config):
        for step in range(1, 6):
            watchdog.enter_phase(step, "backward")
            if step == 3 and world.rank == 1:
                send_a_heartbeat()
                meet(mishap)
            watchdog.enter_phase(step, "reduce")
            all_reduce(backend, step)
        if world.leads:
            print(watchdog.figures())


def meet(mishap: str) -> None:
    if mishap == "hangs":
        while True:
            time.sleep(1)
    if mishap == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if mishap == "fails":
        raise BadData("shard 5 is cut short")


def all_reduce(backend: str, step: int) -> None:
    if backend == "torch":
        import torch

        torch.distributed.all_reduce(torch.ones(4) * step)
        return
    from jax.experimental import multihost_utils

    multihost_utils.process_allgather(float(step))


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    except SabiaError as error:
        notes.say(str(error))
        sys.exit(int(error.exit_code))
