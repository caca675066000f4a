"""`sabia`: the lazy table of commands; only the module of the command called is imported."""

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
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
# command → its verbs; the first is meant where none is given, the module of any other is
# sabia.cli.<command>_<verb>. A file named like a verb is given as ./verb.
VERBS: dict[str, dict[str, str]] = {
    "classify": {
        "score": "Add scores to documents and filter by them (the default).",
        "train": "Train a classifier from labelled documents.",
        "threshold": "Choose thresholds of a score, and calibrate it.",
        "drift": "Compare the scores of two runs.",
    },
}
SETTINGS = {"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "SABIA"}


class PanelledCommand(TyperCommand):
    """A command whose options may be grouped under titles (`rich_help_panel`) in its help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panels.setdefault(_panel(parameter), []).append(record)
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _panel(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return "Arguments"
    title = getattr(parameter, "rich_help_panel", None)
    return f"{title} Options" if title else "Options"


WrongUsage = typer.BadParameter.__bases__[0]  # of all errors of a command line; not exported


class LazyGroup(TyperGroup):
    """A group that imports a command's module when the command is called."""

    def main(self, *args: Any, standalone_mode: bool = True, **settings: Any) -> Any:
        """Run; a wrong command line is one line on stderr, as every other error is."""
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **settings)
        try:
            sys.exit(super().main(*args, standalone_mode=False, **settings) or 0)
        except WrongUsage as error:
            from sabia.cli.wrong_usage import explained

            print(explained(error), file=sys.stderr)
            sys.exit(2)
        except typer.Abort:
            sys.exit(1)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command, _, verb = cmd_name.partition(" ")
        verbs = VERBS.get(command, {})
        if command not in COMMANDS or (verb and verb not in verbs):
            return None
        name = command.replace("-", "_")
        if verb and verb != next(iter(verbs)):
            name += f"_{verb}"
        function = getattr(import_module(f"sabia.cli.{name}"), name)
        shown = {} if verb else verbs
        info = CommandInfo(
            name=cmd_name,
            cls=PanelledCommand,
            callback=function,
            epilog=_epilog(function.examples, command, shown),
            context_settings={
                "help_option_names": ["-h", "--help"],
                "auto_envvar_prefix": f"SABIA_{name.upper()}",
            },
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
        if len(args) > 1 and args[1] in VERBS.get(args[0], {}):
            args = [f"{args[0]} {args[1]}", *args[2:]]
        return super().resolve_command(ctx, args)


def _epilog(examples: str, command: str, verbs: dict[str, str]) -> str:
    """What a help page ends with: the command's verbs, its examples, its manual page."""
    width = max(map(len, verbs), default=0)
    parts = []
    if verbs:
        rows = [f"  {verb:<{width}}  {line}" for verb, line in verbs.items()]
        parts.append("\b\nVerbs (first word, each with its own --help):\n" + "\n".join(rows))
    parts.append("\b\nExamples:\n" + "\n".join(f"  {x}" for x in examples.splitlines()))
    return "\n\n".join([*parts, f"See man sabia-{command}."])


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
