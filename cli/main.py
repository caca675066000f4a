"""`sabia`: the table of commands; only the module of the command that is called is imported."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from sabia.cli.command import Command, call, close_stdout, print_error
from sabia.core.errors import ExitCode

# command → one line of help; its module is sabia.cli.<command with _ for ->
COMMANDS = {
    "crawl": "Fetch web pages, or read WARC and other files, as documents.",
    "classify": "Score and filter documents: quality, language, classifiers.",
    "dedup": "Remove exact and near-duplicate documents.",
    "rewrite": "Rewrite documents so that reasoning precedes the answer.",
    "tokenize": "Train or load a tokenizer; pack documents into token rows.",
    "pretrain": "Train a model from scratch or from existing weights.",
    "sft": "Fine-tune a model on conversations.",
    "grpo": "Train a model by reinforcement learning (GRPO).",
    "quantize": "Quantize a model to 8 and 4 bits.",
    "eval": "Evaluate models on benchmark tasks and compare them.",
    "plan-cluster": "Estimate compute, memory, time and cost of a training run.",
}
# command → its subcommands. The first is the default, in the command's module; the module of any
# other is sabia.cli.<command>_<subcommand>. An input file with such a name is given as ./name.
SUBCOMMANDS: dict[str, dict[str, str]] = {
    "classify": {
        "score": "Score documents and filter them (the default).",
        "train": "Train a classifier on labelled documents.",
        "threshold": "Choose thresholds of a score and calibrate it.",
        "drift": "Compare the score distributions of two runs.",
    },
}
HELP = ("-h", "--help", "--help=json")
OPTIONS = {
    "-V, --version": "Print the version",
    "-v, --verbose": "With --version: also print packages, devices and Slurm state",
    "--install-completion": "Install completion for the current shell",
    "--show-completion": "Print the completion script of the current shell",
    "-h, --help": "Print this page; --help=json: all commands and options as JSON",
}


def find(name: str) -> Command:
    """The command of a name, 'dedup' or 'classify train'."""
    command, _, subcommand = name.partition(" ")
    module = command.replace("-", "_")
    if subcommand and subcommand != next(iter(SUBCOMMANDS[command])):
        module += f"_{subcommand}"
    declared: Command = getattr(import_module(f"sabia.cli.{module}"), module)
    return declared


def called(words: Sequence[str]) -> tuple[str, list[str]]:
    """('classify train', its arguments); ('', all words) of a line that names no command."""
    if not words or words[0] not in COMMANDS:
        return "", list(words)
    subcommands = list(SUBCOMMANDS.get(words[0], {}))
    if len(words) > 1 and words[1] in subcommands:
        first = words[1] == subcommands[0]
        return (words[0] if first else f"{words[0]} {words[1]}"), list(words[2:])
    return words[0], list(words[1:])


def page() -> str:
    """The help of `sabia` itself."""
    from sabia.cli import help_page

    return "\n\n".join([
        "Usage: sabia [OPTIONS] COMMAND [ARGUMENTS]...",
        "  Build a language model, from web crawl to serving: one command per stage.\n"
        "  Commands read and write Parquet, as files or as pipes.",
        help_page.rows("Commands, in pipeline order", COMMANDS),
        help_page.rows("Options", OPTIONS),
        "See sabia COMMAND --help, man sabia and man sabia-COMMAND.",
    ])  # fmt: skip


def all_calls() -> list[str]:
    """Every command as it is called, subcommands included."""
    return [
        f"{name} {subcommand}" if n else name
        for name in COMMANDS
        for n, subcommand in enumerate(SUBCOMMANDS.get(name, [""]))
    ]


def show_help(name: str, word: str) -> None:
    """Print what `-h`, `--help` or `--help=json` asks for; `name` is '' for sabia itself."""
    from sabia.cli import help_page

    if word == "--help=json":
        texts = [
            help_page.as_json(one, find(one), SUBCOMMANDS.get(one, {}))
            for one in ([name] if name else all_calls())
        ]
        print(texts[0] if name else "[" + ",\n".join(texts) + "]")
    elif name:
        subcommands = SUBCOMMANDS.get(name, {})
        print(help_page.text(name, find(name), subcommands, common=word == "-h"))
    else:
        print(page())


def main() -> None:
    """Entry point of the console script."""
    words = sys.argv[1:]
    if "_SABIA_COMPLETE" not in os.environ:
        name, rest = called(words)
        word = next((w for w in words if w in HELP), "")
        if word and name:
            from sabia.cli import help_page

            word = help_page.asked(rest, find(name).options.table)
        if word and (name or word == words[0]):
            try:
                show_help(name, word)
                sys.stdout.flush()
            except BrokenPipeError:
                close_stdout()
                sys.exit(ExitCode.PIPE)
            return
        if not words:
            print(page(), file=sys.stderr)
            sys.exit(ExitCode.USAGE)
        if any(w in ("-V", "--version") for w in words) and not name:
            from sabia.cli.version import print_version

            print_version(bool({"-v", "--verbose"} & set(words)))
            return
    from sabia.cli.group import run

    sys.exit(run(words, call, print_error))


if __name__ == "__main__":
    main()
