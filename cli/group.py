"""The commands as one typer group, which imports the module of a command when it is called."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from sabia.cli.adapter import typer_command
from sabia.cli.registry import COMMANDS, SUBCOMMANDS, called, find
from sabia.core import notes
from sabia.core.errors import ExitCode

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
