"""Run the command, with a mishap to itself at a chosen moment (for tests of resuming).

usage: interrupted.py    reads requests from stdin, a JSON line each, and answers each with a line
       interrupted.py EVENT NUMBER MISHAP RANKS WORD…    a rank of torchrun; RANKS such as 0,3
A request {"words": […], "at": [EVENT, NUMBER, MISHAP] or null, "out": PATH, "err": PATH} runs the
command in a child forked from this process, which has imported the libraries once; the answer is
the child's return code (negative: killed by that signal). EVENT is `step` (before a training step)
or `file` (before each fsync, replace and rename), counted from 0, or `time` (seconds after the
start). MISHAP is a signal, or an errno that `file` raises. "limit": the most bytes of a file (as a
quota). "reads": where the child appends [step, hashes of its rows' tokens] for each batch it reads.
"folder": where the child runs.
"""

import contextlib
import errno
import hashlib
import json
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any


def arm(event: str, number: int, mishap: str) -> None:
    """Let the mishap befall this process at occurrence `number` (from 0) of the event."""
    seen = 0

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen - 1 == number:
                befall(mishap)
            return function(*args, **named)

        return wrapped

    if event == "file":
        os.fsync, os.replace, os.rename = map(before, (os.fsync, os.replace, os.rename))
    elif event == "step":
        from sabia.core.train.loop import TrainingRun

        TrainingRun._one_step = before(TrainingRun._one_step)


def befall(mishap: str) -> None:
    """A signal to this process, or an error of the operating system."""
    if mishap.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, mishap))
    else:
        code = getattr(errno, mishap)
        raise OSError(code, os.strerror(code))


def record(path: str) -> None:
    """Append what each training batch truly holds to a file."""
    from sabia.core.train.token_rows import RowSource

    read = RowSource.batch

    def batch(source: RowSource, step: int) -> Any:
        found = read(source, step)
        rows = [hashlib.blake2b(row.tobytes()).hexdigest()[:16] for row in found["input_ids"]]
        with open(path, "a") as file:
            file.write(json.dumps([step, rows]) + "\n")
        return found

    RowSource.batch = batch


def run(words: list[str]) -> int:
    """The command's exit code."""
    from sabia.cli.main import main

    sys.argv = ["sabia", *words]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def child(request: dict[str, Any]) -> None:
    """Become the command of the request; never returns."""
    code = 70
    try:
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        os.chdir(request["folder"])
        if request["at"]:
            arm(*request["at"])
        if request["reads"]:
            record(request["reads"])
        if request["limit"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"],) * 2)
        code = run(request["words"])
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@contextlib.contextmanager
def timer(process: int, at: tuple[str, float, str] | None) -> Iterator[None]:
    """Send the signal of a `time` event to a process, unless the block ends before."""
    if not at or at[0] != "time":
        yield
        return
    timer = threading.Timer(at[1], os.kill, (process, getattr(signal, at[2])))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def serve() -> None:
    """Answer requests until stdin ends."""
    import sabia.core.recipes.pretrain
    import sabia.core.recipes.sft
    import sabia.core.train.stepper_torch

    with contextlib.suppress(ImportError):
        import sabia.core.train.stepper_jax  # noqa: F401
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if not process:
            child(request)
        with timer(process, request["at"]):
            _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def rank(event: str, number: str, mishap: str, ranks: str, *words: str) -> None:
    """The command as one rank of several, with the mishap if this rank is among `ranks`."""
    if os.environ["RANK"] in ranks.split(","):
        arm(event, int(number), mishap)
    sys.exit(run(list(words)))


if __name__ == "__main__":
    rank(*sys.argv[1:]) if len(sys.argv) > 1 else serve()
