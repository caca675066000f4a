"""The one grammar of all commands: shared options, units, configuration, errors, exit codes.

A command is a function whose first parameter is a Job and whose others are its own options.
`@command(kind)` adds the options that commands of its kind share and wraps the call:
flag > SABIA_COMMAND_OPTION > --config file > default. Importing this module must stay cheap:
`--help` may take 100 ms and imports neither numpy, pyarrow, torch nor jax.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from sabia.core import notes, units
from sabia.core.errors import ExitCode, SabiaError, UsageError
from sabia.core.shards.job import Job


def option(help: str, *names: str, **settings: Any) -> Any:
    """An option; `names` such as '--keep' or '-k' only where the default will not do."""
    return typer.Option(*names, help=help, **settings)


def _unit(parse: Callable[..., Any], metavar: str) -> Callable[..., Any]:
    def declare(help: str, *names: str, **settings: Any) -> Any:
        def convert(text: Any) -> Any:
            try:
                return parse(text)
            except UsageError as error:  # typer knows the option's name, which goes before
                raise typer.BadParameter(str(error).partition(": ")[2]) from error

        return typer.Option(*names, help=help, parser=convert, metavar=metavar, **settings)

    return declare


count = _unit(units.parse_count, "COUNT")
length = _unit(units.parse_length, "LENGTH")
size = _unit(units.parse_bytes, "BYTES")
duration = _unit(units.parse_duration, "DURATION")
fraction = _unit(units.parse_fraction, "SHARE")
money = _unit(units.parse_money, "USD")


def _load_config(context: typer.Context, path: str | None) -> str | None:
    """Make the file's values the defaults of this call (eager, before the other options)."""
    if not path:
        return None
    import tomllib

    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "; a model's config.json goes with --model" * path.endswith(".json")
        raise typer.BadParameter(f"{path}: {error} (expected TOML){hint}") from error
    name = context.info_name or ""
    values = _table(values, name.split())
    values = {key.replace("-", "_"): value for key, value in values.items()}
    known = {parameter.name for parameter in context.command.params}
    for key in values:
        if key not in known:
            raise typer.BadParameter(f"{path}: {name} has no option {key.replace('_', '-')!r}")
    context.default_map = {**(context.default_map or {}), **values}
    return path


def _table(values: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """The options for a command in a file: its own table, [command] or [command.verb], else the
    file's top level."""
    own: Any = values
    for word in words:
        own = own.get(word) if isinstance(own, dict) else None
    chosen = own if isinstance(own, dict) else values
    return {key: value for key, value in chosen.items() if not isinstance(value, dict)}


def _shard(text: str | None) -> str | None:
    if text:
        from sabia.core.shards.slices import parse_shard

        try:
            parse_shard(text)
        except UsageError as error:
            raise typer.BadParameter(str(error)) from error
    return text


_OPTIONS: dict[str, tuple[Any, Any]] = {
    "inputs": (
        Annotated[
            list[str] | None,
            typer.Argument(
                metavar="[INPUT]...",
                help="Files, directories, globs or URLs; none or - reads stdin.",
                show_default=False,
            ),
        ],
        None,
    ),
    "out": (
        Annotated[
            str | None,
            option("FILE.parquet, a directory, or - (stdout).", "-o", "--out", metavar="PATH"),
        ],
        None,
    ),
    "to": (
        Annotated[
            str,
            option("parquet, arrow or jsonl on stdout.", envvar=["SABIA_PIPE"], metavar="FORMAT"),
        ],
        "parquet",
    ),
    "rejects": (
        Annotated[str | None, option("Where unusable rows go, with the reason.", metavar="PATH")],
        None,
    ),
    "jobs": (Annotated[int, option("Worker processes.", "-j", "--jobs", min=1, metavar="N")], 1),
    "shard": (
        Annotated[
            str | None,
            option(
                "Take slice I of N of the input shards (default: the Slurm array's).",
                metavar="I/N",
                callback=_shard,
            ),
        ],
        None,
    ),
    "backend": (
        Annotated[str, option("torch or jax.", envvar=["SABIA_BACKEND"], metavar="NAME")],
        "torch",
    ),
    "mesh": (Annotated[str, option("Devices by axis, such as data=4.", metavar="AXIS=N,…")], ""),
    "seed": (Annotated[int, option("Random seed.", min=0, metavar="N")], 0),
    "stats": (
        Annotated[str | None, option("Figures of the run as JSON; - is stderr.", metavar="FILE")],
        None,
    ),
    "json": (Annotated[bool, option("Report as JSON on stdout.", "--json")], False),
    "force": (Annotated[bool, option("Redo what is already done.", "--force")], False),
    "dry_run": (Annotated[bool, option("Show what would be done.", "--dry-run")], False),
    "config": (
        Annotated[
            str | None,
            option("Options from a TOML file.", metavar="FILE.toml", is_eager=True,
                   callback=_load_config),
        ],
        None,
    ),
    "quiet": (Annotated[bool, option("No notes on stderr.", "-q", "--quiet")], False),
    "debug": (Annotated[bool, option("Show tracebacks.", "--debug")], False),
}  # fmt: skip

_ALWAYS = ("force", "dry_run", "config", "quiet", "debug")
KINDS: dict[str, tuple[str, ...]] = {
    "map": ("inputs", "out", "to", "rejects", "jobs", "shard", "seed", "stats", *_ALWAYS),
    "barrier": ("inputs", "out", "to", "rejects", "jobs", "shard", "seed", "stats", *_ALWAYS),
    "train": ("inputs", "out", "to", "rejects", "backend", "mesh", "seed", *_ALWAYS),
    "report": ("inputs", "out", "to", "backend", "seed", "json", *_ALWAYS),
    "fit": ("inputs", "out", "jobs", "seed", "json", *_ALWAYS),
    "choose": ("inputs", "out", "seed", "json", "dry_run", "config", "quiet", "debug"),
    "compare": ("inputs", "json", "config", "quiet", "debug"),
    "plan": ("out", "to", "seed", "json", "config", "quiet", "debug"),
}
SLICED_PHASES = ("sketch", "write")  # of a stage with a barrier, which an array may do
_READS_STDIN = ("map", "barrier", "fit", "choose", "train")
_CHOICES = {"to": ("parquet", "arrow", "jsonl"), "backend": ("torch", "jax")}


def command(
    kind: str, examples: str, name: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare a command of a kind: map, barrier, fit, choose, compare, train, report
    or plan.

    `examples` are shell lines that the help ends with. A function `command_verb` of a command
    with verbs gives its `name`, "command verb".
    """

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        shared = KINDS[kind]
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(function, eval_str=True).parameters.values()
        ][1:]

        @functools.wraps(function)
        def call(**values: Any) -> None:
            settings = {name: values.pop(name) for name in shared}
            called = name or function.__name__.replace("_", "-")
            _boundary(function, called, kind, settings, values)

        parameters = [*_shared_parameters(("inputs",) if "inputs" in shared else ()), *own]
        parameters += _shared_parameters(tuple(name for name in shared if name != "inputs"))
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        call.examples = inspect.cleandoc(examples)  # type: ignore[attr-defined]
        call.kind = kind  # type: ignore[attr-defined]
        return call

    return declare


def _shared_parameters(names: tuple[str, ...]) -> list[inspect.Parameter]:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(name, keyword, default=_OPTIONS[name][1], annotation=_OPTIONS[name][0])
        for name in names
    ]


def _boundary(
    function: Callable[..., None],
    name: str,
    kind: str,
    settings: dict[str, Any],
    own: dict[str, Any],
) -> None:
    """Run a command; turn every way of ending into its exit code and at most one line."""
    from sabia.core import stop

    notes.configure(name, settings["quiet"])
    stop.install()
    try:
        function(_job(name, kind, settings, own), **own)
        sys.stdout.flush()
    except BrokenPipeError:
        _close_stdout()
        _end_now(ExitCode.PIPE)
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.SIGINT) from None
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:
        _settle_stdout()
        if settings["debug"] or os.environ.get("SABIA_DEBUG"):
            raise
        raise typer.Exit(_explain(error)) from None


def _settle_stdout() -> None:
    """Flush what was written; where that fails (a full disk), keep the interpreter's own flush at
    exit from failing again and changing the exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        _close_stdout()


def _close_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _end_now(code: int) -> None:
    """Leave without flushing the closed pipe again; worker processes end with us."""
    import multiprocessing

    for child in multiprocessing.active_children():
        child.terminate()
    os._exit(code)


def _explain(error: Exception) -> int:
    """Say in one line what went wrong; returns the exit code."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, SabiaError):
        notes.say(text if error.exit_code == ExitCode.INTERRUPTED else f"error: {text}")
        return int(error.exit_code)
    if isinstance(error, ModuleNotFoundError):
        notes.say(f"error: package {error.name!r} is missing; pip install it")
        return int(ExitCode.MISSING)
    if isinstance(error, OSError):
        name = "" if error.filename is None else f"{error.filename}: "
        notes.say(f"error: {name}{error.strerror or text}")
        return int(ExitCode.FAILED)
    notes.say(f"error: {type(error).__name__}: {text} (a defect; --debug shows where)")
    return int(ExitCode.FAILED)


def _job(name: str, kind: str, settings: dict[str, Any], own: dict[str, Any]) -> Job:
    """The Job of a call; refuses choices that do not exist and a terminal as input."""
    import json

    for key, choices in _CHOICES.items():
        if settings.get(key, choices[0]) not in choices:
            known = " or ".join(choices)
            raise UsageError(f"--{key}: {settings[key]!r} (expected {known})")
    inputs = tuple(settings.get("inputs") or ())
    if kind in _READS_STDIN and not inputs and sys.stdin.isatty():
        raise UsageError(f"no INPUT, and stdin is a terminal; sabia {name} --help shows examples")
    if (
        kind in ("barrier", "fit", "choose")
        and os.environ.get("SLURM_ARRAY_TASK_COUNT", "1") != "1"
        and own.get("phase") not in SLICED_PHASES
        and not own.get("decontaminate")  # which needs no other shard
    ):
        hint = "" if "phase" not in own else f", or in phases (--phase {', '.join(SLICED_PHASES)})"
        raise UsageError(
            f"{name} needs all shards at once; run it as one job, not as an array{hint}"
        )
    fields = {k: v for k, v in settings.items() if k in Job.__dataclass_fields__}
    fields |= {"inputs": inputs, "options": json.loads(json.dumps(own, default=str))}
    if settings.get("shard"):
        from sabia.core.shards.slices import parse_shard

        fields["shard"] = parse_shard(settings["shard"])
    return Job(command=name, **fields)
