"""Run a command: resolve its options, build its Job, and turn each outcome into an exit code.

A command is a function `(job, options)` declared by `@command(OptionsClass, examples=…)`.
Importing this module must stay cheap: `--help` imports neither numpy, torch, jax nor typer.
"""

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from sabia.core import notes
from sabia.core.errors import ExitCode, SabiaError, UsageError
from sabia.core.options.shared import Call
from sabia.core.shards.job import Job, chosen_shard, several_tasks

T = TypeVar("T", bound=Call)
STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")


class Command(NamedTuple):
    """A command: the function that runs it, the class of its options, the examples of its help."""

    run: Callable[[Job, Any], None]
    options: type[Call]
    examples: list[str]

    @property
    def description(self) -> str:
        """The text at the head of the help: the docstring of the function."""
        return inspect.cleandoc(self.run.__doc__ or "")


def command(options: type[T], examples: str) -> Callable[[Callable[[Job, T], None]], Command]:
    """Declare a function `(job, options)` as a command; `examples` are shell lines."""
    lines = re.sub(r" \\\n\s*", " ", inspect.cleandoc(examples)).splitlines()
    return lambda function: Command(function, options, lines)


def call(name: str, command: Command, flags: Mapping[str, Any], calls: Sequence[str] = ()) -> int:
    """Run a command with the values from the command line; returns the exit code. `calls` are the
    names of all commands.

    An error is printed as one line on stderr, with `--debug` as a traceback.
    """
    as_json = bool(flags.get("json"))
    notes.configure(name, bool(flags.get("quiet")), as_json)
    try:
        from sabia.core.options.table import check_environment, resolve

        check_environment(command.options, name, calls, os.environ)
        options = resolve(command.options, name, flags, os.environ)
        as_json = options.json
        notes.configure(name, options.quiet, as_json)
        job = make_job(name, options)
        if job.executor != "local" and not job.dry_run:
            from sabia.core.shards.executors import on_ray

            on_ray.run(job, options)
        elif any("://" in str(value) for value in options.values().values()):
            from sabia.core.shards.stores.mirrors import local_paths

            with local_paths(job, options) as (local, used):
                command.run(local, used)
        else:
            command.run(job, options)
        sys.stdout.flush()
    except BrokenPipeError:
        close_stdout()
        _exit_now(ExitCode.PIPE)
    except KeyboardInterrupt:
        return ExitCode.SIGINT
    except Exception as error:
        try:
            sys.stdout.flush()
        except OSError:  # a full disk: the flush at exit would fail again, with another exit code
            close_stdout()
        if flags.get("debug") or os.environ.get("SABIA_DEBUG"):
            raise
        code, text = explained(error)
        print_error(code, text, as_json)
        return code
    return ExitCode.OK


def make_job(name: str, options: Call) -> Job:
    """The Job of a call. Raises UsageError if the input is a terminal, or for a Slurm array task
    of a command that needs all shards."""
    from sabia.core.shards.stores.objects import plain_path

    values = options.values()
    inputs = tuple(map(plain_path, values.get("inputs") or ()))
    if options.stdin and not inputs and sys.stdin.isatty():
        raise UsageError(f"no INPUT, and stdin is a terminal; sabia {name} --help shows examples")
    shard = values.get("shard")
    if options.needs_all_shards() and (shard or several_tasks()) and shard != "all":
        phases = options.table["phase"].choices if "phase" in values else ()
        hint = f", in phases (--phase {', '.join(filter(None, phases))})" if phases else ""
        own = ", or with --shard all if the inputs are those of this task alone"
        raise UsageError(
            f"{'--shard: ' * bool(shard)}{name} needs all shards at once; run it as one job, not "
            f"as an array{hint}{own * ('shard' in values)}"
        )
    fields = {k: v for k, v in values.items() if k in Job.__dataclass_fields__}
    for key in ("out", "rejects", "scratch"):
        fields |= {key: plain_path(fields[key])} if fields.get(key) else {}
    if fields.get("out") in STDOUT:
        fields["out"] = "-"
    fields |= {"inputs": inputs, "options": json.loads(json.dumps(options.recorded(), default=str))}
    if "shard" in values:
        fields["shard"] = chosen_shard(shard)
    from sabia.core.shards.lineage.run_record import call_of

    return Job(command=name, call=call_of(options), **fields)


MOST_LETTERS = 500  # of a message


def explained(error: Exception) -> tuple[int, str]:
    """The exit code of an error, and its message on one line."""
    text = _short(str(error)) or type(error).__name__
    if isinstance(error, SabiaError):
        return int(error.exit_code), text
    if isinstance(error, ModuleNotFoundError):
        return int(ExitCode.MISSING), f"a package is missing; pip install {error.name}"
    if isinstance(error, OSError):
        name = "" if error.filename is None else f"{error.filename}: "
        return int(ExitCode.FAILED), _short(f"{name}{error.strerror or text}")
    hint = "(internal error; rerun with --debug for the traceback)"
    return int(ExitCode.FAILED), f"{type(error).__name__}: {text} {hint}"


def _short(message: str) -> str:
    """The message on one line, without the middle of a long one, such as of a value it quotes."""
    text, half = " ".join(message.split()), (MOST_LETTERS - 3) // 2
    return text if len(text) <= MOST_LETTERS else f"{text[:half]} … {text[-half:]}"


def print_error(code: int, text: str, as_json: bool) -> None:
    """Write an error to stderr: one line, or with `--json` one object."""
    if as_json:
        print(json.dumps({"error": error_object(code, text)}), file=sys.stderr, flush=True)
    else:
        notes.say(text if code == ExitCode.INTERRUPTED else f"error: {text}")


def error_object(code: int, message: str) -> dict[str, object]:
    """An error for `--json`: the parts of '--option: value (expected …); fix'."""
    option = re.match(r"(--?[a-z][\w-]*|[A-Z]+): ", message)
    rest = message[option.end() :] if option else message
    value = re.match(r"(?:'([^']*)'|(\S+) is (?:out of|not|no)\b|(\S+): (?:No|Not|not|Is) )", rest)
    expected = re.search(r"\(expected (.*?)\)(?=$|[;.: ])|^only (with.*?)(?=$|;)", rest)
    fix = re.search(r"; ([^;]+?)\)?$", rest)
    return {
        "code": code, "message": message, "option": option[1] if option else None,
        "value": next(filter(None, value.groups()), None) if value else None,
        "expected": (expected[1] or expected[2]) if expected else None,
        "fix": fix[1] if fix else None,
    }  # fmt: skip


def close_stdout() -> None:
    """Redirect standard output, whose reader is closed, to /dev/null."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _exit_now(code: int) -> None:
    """Exit without flushing the closed pipe again; terminates worker processes."""
    import multiprocessing

    for child in multiprocessing.active_children():
        child.terminate()
    os._exit(code)
