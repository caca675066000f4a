"""How a command is called: options are resolved, a Job is built, every end has its exit code.

A command is a function `(job, options)` declared by `@command(OptionsClass, examples=…)`.
Importing this module must stay cheap: `--help` imports neither numpy, torch, jax nor typer.
"""

import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sabia.core import notes
from sabia.core.errors import ExitCode, SabiaError, UsageError
from sabia.core.options.shared import Call
from sabia.core.shards.job import Job

T = TypeVar("T", bound=Call)
Function = Callable[[Job, T], None]


def command(options: type[T], examples: str) -> Callable[[Function[T]], Function[T]]:
    """Declare a command by the class of its options and the shell lines that its help ends with."""

    def declare(function: Function[T]) -> Function[T]:
        function.options = options  # type: ignore[attr-defined]  # a function takes attributes
        function.examples = inspect.cleandoc(examples)  # type: ignore[attr-defined]  # the same
        return function

    return declare


def call(name: str, function: Callable[..., None], flags: Mapping[str, Any]) -> int:
    """Run a command with what the command line gave; returns the exit code.

    Every way of ending becomes its exit code and at most one line on stderr.
    """
    from sabia.core import stop

    as_json = bool(flags.get("json"))
    notes.configure(name, bool(flags.get("quiet")), as_json)
    stop.install()
    try:
        from sabia.core.options.resolve import resolve

        options = resolve(function.options, name, flags, os.environ)  # type: ignore[attr-defined]  # set by @command
        as_json = options.json
        notes.configure(name, options.quiet, as_json)
        function(make_job(name, options), options)
        sys.stdout.flush()
    except BrokenPipeError:
        close_stdout()
        _end_now(ExitCode.PIPE)
    except KeyboardInterrupt:
        return ExitCode.SIGINT
    except Exception as error:
        _settle_stdout()
        if flags.get("debug") or os.environ.get("SABIA_DEBUG"):
            raise
        code, text = explained(error)
        print_error(code, text, as_json)
        return code
    return ExitCode.OK


def make_job(name: str, options: Call) -> Job:
    """The Job of a call. Raises UsageError for a terminal as input and for a part of an array."""
    values = options.values()
    inputs = tuple(values.get("inputs") or ())
    if options.stdin and not inputs and sys.stdin.isatty():
        raise UsageError(f"no INPUT, and stdin is a terminal; sabia {name} --help shows examples")
    if os.environ.get("SLURM_ARRAY_TASK_COUNT", "1") != "1" and options.needs_all_shards():
        phases = options.table["phase"].choices if "phase" in values else ()
        hint = f", or in phases (--phase {', '.join(filter(None, phases))})" if phases else ""
        raise UsageError(
            f"{name} needs all shards at once; run it as one job, not as an array{hint}"
        )
    fields = {k: v for k, v in values.items() if k in Job.__dataclass_fields__}
    fields |= {"inputs": inputs, "options": json.loads(json.dumps(options.recorded(), default=str))}
    if values.get("shard"):
        from sabia.core.shards.slices import parse_shard

        fields["shard"] = parse_shard(values["shard"])
    return Job(command=name, **fields)


def explained(error: Exception) -> tuple[int, str]:
    """The exit code of an error, and one line that says what went wrong."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, SabiaError):
        return int(error.exit_code), text
    if isinstance(error, ModuleNotFoundError):
        return int(ExitCode.MISSING), f"package {error.name!r} is missing; pip install it"
    if isinstance(error, OSError):
        name = "" if error.filename is None else f"{error.filename}: "
        return int(ExitCode.FAILED), f"{name}{error.strerror or text}"
    hint = "(internal error; rerun with --debug for the traceback)"
    return int(ExitCode.FAILED), f"{type(error).__name__}: {text} {hint}"


def print_error(code: int, text: str, as_json: bool) -> None:
    """Write an error to stderr: one line, or with `--json` one object."""
    if as_json:
        from sabia.cli.help import error_object

        print(json.dumps({"error": error_object(code, text)}), file=sys.stderr, flush=True)
    else:
        notes.say(text if code == ExitCode.INTERRUPTED else f"error: {text}")


def _settle_stdout() -> None:
    """Flush what was written; where that fails (a full disk), keep the interpreter's own flush at
    exit from failing again and changing the exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        close_stdout()


def close_stdout() -> None:
    """Send what is still written to a closed standard output nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _end_now(code: int) -> None:
    """Leave without flushing the closed pipe again; worker processes end with us."""
    import multiprocessing

    for child in multiprocessing.active_children():
        child.terminate()
    os._exit(code)
