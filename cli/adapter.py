"""Option tables as typer commands: typer splits the command line and completes words; values are
read, checked and refused by `core/options`."""

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.main import get_command_from_info
from typer.models import CommandInfo

from sabia.core.options.option import Option, flags


def built(
    name: str,
    function: Callable[..., None],
    run: Callable[..., int],
    subcommands: Sequence[str] = (),
) -> Any:
    """The typer command of a function declared by `@command`; `run(name, function, flags)` is what
    it calls with the texts of the command line by option name, None where there is none.
    `subcommands` complete the first word."""
    table: dict[str, Option] = function.options.table  # type: ignore[attr-defined]  # by @command

    kinds = {option.name: _annotation(option, subcommands) for option in table.values()}

    def callback(**flags: Any) -> None:
        raise typer.Exit(run(name, function, flags))

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
    if option.positional:
        complete = _completer(option, subcommands)
        argument = typer.Argument(metavar=option.metavar, autocompletion=complete)
        return Annotated[list[str] | None, argument]
    words = flags(option)
    if option.negative:
        words = [*words[:-2], f"{words[-2]}/{words[-1]}"]
    settings: dict[str, Any] = {"metavar": option.metavar or None, "help": option.help}
    if option.kind == "flag":
        return Annotated[bool | None, typer.Option(*words, help=option.help)]
    kind = list[str] | None if option.many else str | None
    return Annotated[
        kind, typer.Option(*words, autocompletion=_completer(option, option.choices), **settings)
    ]


def _completer(option: Option, choices: Sequence[str]) -> Callable[[str], list[str]] | None:
    """What completes the option's value, of a list by commas the last one; None leaves it to the
    shell's file names."""
    if not (choices or option.values):
        return None

    def complete(incomplete: str) -> list[str]:
        from sabia.cli.values import names

        known = choices or names(option.values)
        listed = option.metavar.endswith(",…")
        before = incomplete[: incomplete.rfind(",") + 1] if listed else ""
        return [before + name for name in known if (before + name).startswith(incomplete)]

    return complete
