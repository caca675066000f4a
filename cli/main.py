"""`sabia`: the lazy table of commands; only the module of the command called is imported."""

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command_from_info
from typer.models import CommandInfo

# command → one line of help; its module is sabia.cli.<command with _ for ->
COMMANDS = {
    "crawl": "Fetch pages from seed URLs, WARC or files, led by a classifier.",
    "classify": "Score documents: quality, language, trained classifiers; filter.",
    "dedup": "Remove exact and near-duplicate documents.",
    "rewrite": "Rewrite documents so that reasoning comes before the answer.",
    "tokenize": "Train or load a tokenizer and pack documents into token rows.",
    "pretrain": "Train a model from scratch or go on from a checkpoint.",
    "sft": "Fine-tune on conversations, with loss on the assistant only.",
    "grpo": "Reinforcement learning from verifiers and rubrics (GRPO).",
    "quantize": "Write a model in 8 and 4 bits, by component.",
    "eval": "Measure models on tasks, compare them item by item.",
    "plan-cluster": "Compute, memory, time and money of a training run.",
}
SETTINGS = {"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "SABIA"}


class LazyGroup(TyperGroup):
    """A group that imports a command's module when the command is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        function = getattr(import_module(f"sabia.cli.{name}"), name)
        epilog = "\b\nExamples:\n" + "\n".join(f"  {x}" for x in function.examples.splitlines())
        info = CommandInfo(
            name=cmd_name,
            callback=function,
            epilog=f"{epilog}\n\nSee man sabia-{cmd_name}.",
            context_settings={"help_option_names": ["-h", "--help"]},
        )
        built = get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None)
        return _tidy(built)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands, in the order of a run"):
            formatter.write_dl(list(COMMANDS.items()))

    def get_help(self, ctx: Any) -> str:
        return str(super(LazyGroup, _tidy(self)).get_help(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        self.commands = dict.fromkeys(COMMANDS)  # names for the nearest-match hint
        return super().resolve_command(ctx, args)


METAVARS = {"int": "N", "integer": "N", "int range": "N", "integer range": "N",
            "float": "X", "float range": "X", "str": "TEXT", "text": "TEXT"}  # fmt: skip


def _tidy(command: Any) -> Any:
    """Short placeholders in the help, and no environment variables: the manual tells those."""
    for parameter in command.params:
        parameter.show_envvar = False
        if parameter.metavar is None:
            parameter.metavar = METAVARS.get(parameter.type.name)
    return command


app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=SETTINGS,
    epilog="sabia COMMAND --help tells more; man sabia and man sabia-COMMAND tell all.",
)


@app.callback(invoke_without_command=True)
def sabia(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Show the version.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="With --version: devices, backends, Slurm.")
    ] = False,
) -> None:
    """Carry a language model from the open web to a served model, one command a stage.

    Commands read and write Parquet on paths or on stdin and stdout, so they can be piped.
    """
    if version:
        from sabia.cli.version import print_version

        print_version(verbose)
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="sabia")


if __name__ == "__main__":
    sys.exit(main())
