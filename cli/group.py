"""The commands as one typer group, which imports the module of a command when it is called.

typer splits the command line and completes words; values are read and checked by `core/options`.
"""

import inspect
import re
import tomllib
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

from sabia.cli.command import Command
from sabia.cli.registry import COMMANDS, SUBCOMMANDS, called, find
from sabia.core import notes
from sabia.core.errors import ExitCode
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


CommandLineError: Any = typer.BadParameter.__bases__[0]  # typer's base class; not exported
# message of typer → message of sabia
MESSAGES = {
    r"^No such option: (\S+)": r"\1: no such option",
    r"^No such command ": "no such command ",
    r"\(Possible options: (.*)\)$": r"(did you mean one of \1?)",
    r"^Got unexpected extra arguments? ": "unexpected ",
    r"^Option '(\S+)' requires an argument\.?": r"\1: is missing its value",
}


class LazyGroup(TyperGroup):
    """A group that imports a command's module when the command is called."""

    runner: Callable[..., int]

    def list_commands(self, ctx: Any) -> list[str]:
        """Names for completion and for the hint at the nearest match."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The typer command of a name such as 'dedup' or 'classify train'."""
        if cmd_name.partition(" ")[0] not in COMMANDS:
            return None
        subcommands = list(SUBCOMMANDS.get(cmd_name, ()))
        return typer_command(cmd_name, find(cmd_name), type(self).runner, subcommands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Split a command line; a subcommand is part of the command's name."""
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # for the hint, only names are read
        name, rest = called(args)
        return super().resolve_command(ctx, [name, *rest] if name else args)


def run(words: Sequence[str], runner: Callable[..., int], report: Callable[..., None]) -> int:
    """Run a command line. If typer cannot split it, report one line (one object with `--json`)."""
    LazyGroup.runner = staticmethod(runner)
    app = typer.Typer(cls=LazyGroup, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    group = typer.main.get_command(app)
    try:
        return int(group.main(list(words), prog_name="sabia", standalone_mode=False) or 0)
    except CommandLineError as error:
        name, text = called(words)[0], error.format_message()
        for pattern, message in MESSAGES.items():
            text = re.sub(pattern, message, text)
        notes.configure(name, quiet=False)
        text = f"{text.strip(' .')}; see {f'sabia {name}'.strip()} --help"
        report(ExitCode.USAGE, text, "--json" in words)
        return ExitCode.USAGE
    except typer.Abort:
        return ExitCode.FAILED
