"""Option tables as typer commands: typer splits the command line and completes words; values are
read, checked and refused by `core/options`."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.main import get_command_from_info
from typer.models import CommandInfo

from sabia.core.options.option import Option, flags


def built(name: str, function: Callable[..., None], run: Callable[..., int]) -> Any:
    """The typer command of a function declared by `@command`; `run(name, function, flags)` is what
    it calls with the texts of the command line by option name, None where there is none."""
    table: dict[str, Option] = function.options.table  # type: ignore[attr-defined]  # by @command

    def callback(**flags: Any) -> None:
        raise typer.Exit(run(name, function, flags))

    callback.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # typer reads it
        [_parameter(option) for option in table.values()]
    )
    callback.__annotations__ = {o.name: _annotation(o) for o in table.values()}
    info = CommandInfo(name=name, callback=callback, add_help_option=False)
    return get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None)


def _parameter(option: Option) -> inspect.Parameter:
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(option)
    )


def _annotation(option: Option) -> Any:
    if option.positional:
        return Annotated[list[str] | None, typer.Argument(metavar=option.metavar)]
    words = flags(option)
    if option.negative:
        words = [*words[:-2], f"{words[-2]}/{words[-1]}"]
    settings = {"metavar": option.metavar or None, "help": option.help}
    if option.kind == "flag":
        return Annotated[bool | None, typer.Option(*words, help=option.help)]
    kind = list[str] | None if option.many else str | None
    return Annotated[kind, typer.Option(*words, autocompletion=_completer(option), **settings)]  # type: ignore[arg-type]  # of two types


def _completer(option: Option) -> Callable[[str], list[str]] | None:
    """What completes the option's value, of a list by commas the last one; None leaves it to the
    shell's file names."""
    if not (option.choices or option.values):
        return None

    def complete(incomplete: str) -> list[str]:
        from sabia.cli.values import names

        known = option.choices or names(option.values)
        listed = option.metavar.endswith(",…")
        before = incomplete[: incomplete.rfind(",") + 1] if listed else ""
        return [before + name for name in known if (before + name).startswith(incomplete)]

    return complete
