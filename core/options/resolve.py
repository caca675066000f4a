"""Find the values of a command's options: flag > SABIA_COMMAND_OPTION > --config file > default."""

import tomllib
from collections.abc import Mapping
from typing import Any, TypeVar

from sabia.core.errors import UsageError
from sabia.core.options.option import Option
from sabia.core.options.table import Options

T = TypeVar("T", bound=Options)


def resolve(
    cls: type[T], command: str, flags: Mapping[str, Any], environment: Mapping[str, str]
) -> T:
    """The options of a call of `command` ('dedup', 'classify train').

    `flags` holds what the command line gave, None where it gave nothing. What was set by a flag, by
    a variable of the command or by the file counts as given; a variable that many commands share
    (SABIA_BACKEND, SABIA_PIPE) is a default. Raises UsageError.
    """
    given: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    sources: dict[str, str] = {}  # of what no flag gave
    for name, option in cls.table.items():
        variable = variable_of(command, option)
        if flags.get(name) not in (None, (), []):
            given[name] = option.read(flags[name])
        elif environment.get(variable):
            text = environment[variable]
            given[name] = _read(option, text.split() if option.many else text, f"${variable}")
            sources[name] = f"${variable}"
        elif option.variable and environment.get(option.variable):
            shared[name] = _read(option, environment[option.variable], f"${option.variable}")
    path = given.get("config")
    for name, value in (_from_file(cls, command, path) if path else {}).items():
        if name not in given:
            given[name], sources[name] = _read(cls.table[name], value, str(path)), str(path)
    try:
        return cls(_given=frozenset(given), **shared | given)
    except UsageError as error:
        where = [
            at for name, at in sources.items() if str(error).startswith(f"{cls.table[name].flag}:")
        ]
        raise UsageError(f"{error} (set by {where[0]})" if where else str(error)) from None


def variable_of(command: str, option: Option) -> str:
    """The variable that sets an option of one command: 'SABIA_DEDUP_MIN_COPIES'."""
    return f"SABIA_{command}_{option.key}".upper().replace("-", "_").replace(" ", "_")


def _read(option: Option, value: Any, source: str) -> Any:
    try:
        return option.read(value)
    except UsageError as error:
        raise UsageError(f"{error} (set by {source})") from None


def _from_file(cls: type[Options], command: str, path: str) -> dict[str, Any]:
    """Values by name from [command], [command.subcommand] or the top level of a TOML file."""
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"--config: {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "; a model's config.json goes with --model" * path.endswith(".json")
        raise UsageError(f"--config: {path}: {error} (expected TOML){hint}") from error
    try:
        return {cls.named(key): v for key, v in _table(values, command.split()).items()}
    except UsageError as error:
        raise UsageError(f"--config: {path}: {command} has {error}") from None


def _table(values: dict[str, Any], words: list[str]) -> dict[str, Any]:
    own: Any = values
    for word in words:
        own = own.get(word) if isinstance(own, dict) else None
    chosen = own if isinstance(own, dict) else values
    return {key: value for key, value in chosen.items() if not isinstance(value, dict)}
