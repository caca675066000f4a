"""Values of a command's options. Precedence: flag, SABIA_COMMAND_OPTION, --config file, default."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sabia.core.errors import UsageError
from sabia.core.files import read_toml
from sabia.core.options.option import Option
from sabia.core.options.table import Options

T = TypeVar("T", bound=Options)
# variables that are no options
OTHER_VARIABLES = ("SABIA_API_KEY", "SABIA_BACKEND", "SABIA_CONSTRAINTS", "SABIA_COORDINATOR",
                   "SABIA_DEBUG", "SABIA_ENV", "SABIA_JOB_SECRET", "SABIA_KERNELS", "SABIA_PAGER",
                   "SABIA_PIPE", "SABIA_RESTARTS", "SABIA_RUN_RECORD", "SABIA_TEST_DATA",
                   "SABIA_TORCH", "SABIA_VENV")  # fmt: skip


def resolve(
    cls: type[T], command: str, flags: Mapping[str, Any], environment: Mapping[str, str]
) -> T:
    """The options of a call of `command` ('dedup', 'classify train').

    `flags` maps option names to the values on the command line, or None. A value from a flag, a
    variable of the command or the file counts as given by the user; a variable that several
    commands share (SABIA_BACKEND, SABIA_PIPE) only changes the default. Raises UsageError.
    """
    given: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    sources: dict[str, str] = {}  # option → variable or file that set it
    texts: dict[str, Any] = {}
    for name, option in cls.table.items():
        variable = variable_of(command, option)
        if flags.get(name) not in (None, (), []):
            given[name], texts[name] = option.read(flags[name]), flags[name]
        elif environment.get(variable):
            text = environment[variable]
            given[name] = _read(option, text.split() if option.many else text, f"${variable}")
            sources[name], texts[name] = f"${variable}", text.split() if option.many else text
        elif option.variable and environment.get(option.variable):
            texts[name] = environment[option.variable]
            shared[name] = _read(option, texts[name], f"${option.variable}")
    path = given.get("config")
    for name, value in (_from_file(cls, command, path) if path else {}).items():
        if name not in given:
            given[name], sources[name] = _read(cls.table[name], value, str(path)), str(path)
            texts[name] = value
    try:
        options = cls(_given=frozenset(given), **shared | given)
        options.texts = texts
        return options
    except UsageError as error:
        for name, source in sources.items():
            if str(error).startswith(f"{cls.table[name].flag}:"):
                raise UsageError(f"{error} (set by {source})") from None
        raise


def variable_of(command: str, option: Option) -> str:
    """The environment variable of an option of a command: 'SABIA_DEDUP_MIN_COPIES'."""
    return f"SABIA_{command}_{option.key}".upper().replace("-", "_").replace(" ", "_")


def check_environment(
    cls: type[Options], command: str, calls: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Raise UsageError for a variable that looks like one of the command's but names no option, and
    for one that lacks the name of the command ('SABIA_JOBS').

    calls: all commands; a variable that begins with the name of another one is that command's.
    """

    def prefix(name: str) -> str:
        return f"SABIA_{name}_".upper().replace("-", "_").replace(" ", "_")

    table = cls.table.values()
    known = {*OTHER_VARIABLES, *(variable_of(command, one) for one in table)}
    known |= {option.variable for option in table if option.variable}
    short = {variable_of("", one).replace("__", "_"): variable_of(command, one) for one in table}
    own = prefix(command)
    others = tuple(prefix(name) for name in calls if name != command)
    for name in sorted(name for name, value in environment.items() if value):
        foreign = name.startswith(tuple(o for o in others if o.startswith(own) or not
                                        name.startswith(own)))  # fmt: skip
        if not name.startswith("SABIA_") or name in known or foreign:
            continue
        near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.85)
        near = [short[name]] if name in short else near
        if near or name.startswith(own):
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"${name}: sabia {command} has no such option{hint}")


def _read(option: Option, value: object, source: str) -> Any:
    try:
        return option.read(value)
    except UsageError as error:
        raise UsageError(f"{error} (set by {source})") from None


def _from_file(cls: type[Options], command: str, path: str) -> dict[str, object]:
    """Values by name from [command] or [command.subcommand] of a TOML file, else its top level."""
    hint = "; a model's config.json goes with --model" * path.endswith(".json")
    values = read_toml("--config", path, hint)
    own: Any = values
    for word in command.split():
        own = own.get(word) if isinstance(own, dict) else None
    table = own if isinstance(own, dict) else values
    try:
        return {cls.named(key): v for key, v in table.items() if not isinstance(v, dict)}
    except UsageError as error:
        raise UsageError(f"--config: {path}: {command} has {error}") from None
