"""Option tables as typer commands: typer splits the command line and completes words; values are
read and checked by `core/options`."""

import inspect
import tomllib
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Annotated, Any

import typer
from typer.main import get_command_from_info
from typer.models import CommandInfo

from sabia.cli.command import Command
from sabia.core.options.option import Option, flags


def typer_command(
    name: str, command: Command, run: Callable[..., int], subcommands: Sequence[str] = ()
) -> Any:
    """The typer command of a command. It calls `run(name, command, flags)`, where `flags` maps
    option names to the texts of the command line, or to None. `subcommands` are completions of the
    first word."""
    kinds = {o.name: _annotation(o, subcommands) for o in command.options.table.values()}

    def callback(**flags: object) -> None:
        raise typer.Exit(run(name, command, flags))

    callback.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads it
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, kind in kinds.items()
        ]
    )
    callback.__annotations__ = kinds
    info = CommandInfo(name=name, callback=callback, add_help_option=False)
    return get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None)


def _annotation(option: Option, subcommands: Sequence[str]) -> Any:
    """The type of an option's parameter, as typer reads it."""
    words = flags(option)
    if option.kind == "flag":
        if option.negative:
            words = [*words[:-2], f"{words[-2]}/{words[-1]}"]
        return Annotated[bool | None, typer.Option(*words, help=option.help)]
    complete = _completer(option, subcommands if option.positional else option.choices)
    if option.positional:
        argument = typer.Argument(metavar=option.metavar, autocompletion=complete)
        return Annotated[list[str] | None, argument]
    kind = list[str] | None if option.many else str | None
    metavar = option.metavar or None
    return Annotated[
        kind, typer.Option(*words, autocompletion=complete, metavar=metavar, help=option.help)
    ]


def _completer(option: Option, choices: Sequence[str]) -> Callable[[str], list[str]] | None:
    """Completes the option's value, or the last value of a list with commas; None: file names."""
    if not (choices or option.values):
        return None

    def complete(incomplete: str) -> list[str]:
        known = choices or _catalogue_names(option.values)
        listed = option.metavar.endswith(",…")
        before = incomplete[: incomplete.rfind(",") + 1] if listed else ""
        return [before + name for name in known if (before + name).startswith(incomplete)]

    return complete


def _catalogue_names(source: str) -> list[str]:
    """The names in a data file of the planner, at a path of keys: 'chips.toml' gives its top-level
    keys, 'prices.toml offer provider' the value of `provider` in each table of the list `offer`."""
    file, *keys = source.split()
    names: Any = tomllib.loads((files("sabia.core.plan") / "data" / file).read_text())
    for key in keys:
        names = [entry[key] for entry in names] if isinstance(names, list) else names[key]
    return list(dict.fromkeys(names))
