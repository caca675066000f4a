"""Run the command, with a signal to itself at a chosen moment (for tests of resuming).

usage: interrupted.py    reads requests from stdin, a JSON line each, and answers each with a line
A request {"words": […], "at": [EVENT, NUMBER, SIGNAL] or null, "out": PATH, "err": PATH} runs the
command in a child forked from this process, which has imported the libraries once; the answer is
the child's return code (negative: killed by that signal). EVENT is `step` (before a training step)
or `file` (before each fsync, replace and rename), counted from 0.
"""

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any


def arm(event: str, number: int, signum: int) -> None:
    """Send the signal to this process at occurrence `number` (from 0) of the event."""
    seen = 0

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            nonlocal seen
            if seen == number:
                os.kill(os.getpid(), signum)
            seen += 1
            return function(*args, **named)

        return wrapped

    if event == "file":
        os.fsync, os.replace, os.rename = map(before, (os.fsync, os.replace, os.rename))
    else:
        from sabia.core.train.loop import Training

        Training._one_step = before(Training._one_step)


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
        if request["at"]:
            event, number, name = request["at"]
            arm(event, number, getattr(signal, name))
        code = run(request["words"])
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def serve() -> None:
    """Answer requests until stdin ends."""
    import sabia.core.recipes.pretrain
    import sabia.core.recipes.sft
    import sabia.core.train.stepper_torch

    with contextlib.suppress(ImportError):
        import sabia.core.train.stepper_jax  # noqa: F401
    for line in sys.stdin:
        process = os.fork()
        if not process:
            child(json.loads(line))
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
