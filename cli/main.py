"""`sabia`: the lazy table of commands; only the module of the command called is imported."""

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from sabia.cli.command import call, close_stdout, print_error
from sabia.core.errors import ExitCode

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
# command → its subcommands; the first is meant where none is given, the module of any other is
# sabia.cli.<command>_<subcommand>. A file named like a subcommand is given as ./name.
SUBCOMMANDS: dict[str, dict[str, str]] = {
    "classify": {
        "score": "Add scores to documents and filter by them (the default).",
        "train": "Train a classifier from labelled documents.",
        "threshold": "Choose thresholds of a score, and calibrate it.",
        "drift": "Compare the scores of two runs.",
    },
}
HELP = ("-h", "--help", "--help=json")
OPTIONS = {
    "-V, --version": "Show the version",
    "-v, --verbose": "With --version: devices, backends, Slurm",
    "--install-completion": "Install completion for the current shell",
    "--show-completion": "Show the completion script of the current shell",
    "-h, --help": "Show this page; --help=json: all commands and options as JSON",
}


def find(name: str) -> Callable[..., None]:
    """The function of a command, 'dedup' or 'classify train', declared by `@command`."""
    command, _, verb = name.partition(" ")
    module = command.replace("-", "_")
    if verb and verb != next(iter(SUBCOMMANDS[command])):
        module += f"_{verb}"
    found: Callable[..., None] = getattr(import_module(f"sabia.cli.{module}"), module)
    return found


def called(words: Sequence[str]) -> tuple[str, list[str]]:
    """('classify train', its arguments); ('', all words) of a line that names no command."""
    if not words or words[0] not in COMMANDS:
        return "", list(words)
    verbs = SUBCOMMANDS.get(words[0], {})
    if len(words) > 1 and words[1] in verbs:
        first = words[1] == next(iter(verbs))
        return (words[0] if first else f"{words[0]} {words[1]}"), list(words[2:])
    return words[0], list(words[1:])


def page() -> str:
    """The help of `sabia` itself."""
    from sabia.cli import help as pages

    return "\n\n".join([
        "Usage: sabia [OPTIONS] COMMAND [ARGUMENTS]...",
        "  Carry a language model from the open web to a served model, one command a\n"
        "  stage. Commands read and write Parquet on paths or on stdin and stdout, so\n"
        "  that they can be piped.",
        pages.rows("Commands, in the order of a run", COMMANDS),
        pages.rows("Options", OPTIONS),
        "See sabia COMMAND --help, man sabia and man sabia-COMMAND.",
    ])  # fmt: skip


def all_calls() -> list[str]:
    """Every command as it is called, subcommands included."""
    return [
        name if first else f"{name} {verb}"
        for name in COMMANDS
        for first, verb in _verbs(name)
    ]  # fmt: skip


def _verbs(name: str) -> list[tuple[bool, str]]:
    return [(not n, verb) for n, verb in enumerate(SUBCOMMANDS.get(name, [""]))]


def show_help(name: str, word: str) -> None:
    """Print what `-h`, `--help` or `--help=json` asks for; `name` is '' for sabia itself."""
    from sabia.cli import help as pages

    if not name:
        everything = [_as_json(name) for name in all_calls()] if word == "--help=json" else []
        print("[" + ",\n".join(everything) + "]" if everything else page())
        return
    function = find(name)
    options, verbs = function.options, SUBCOMMANDS.get(name, {})  # type: ignore[attr-defined]  # by @command
    if word == "--help=json":
        print(_as_json(name))
    else:
        print(pages.text(name, function, options, verbs, common=word == "-h"))


def _as_json(name: str) -> str:
    from sabia.cli import help as pages

    function = find(name)
    return pages.as_json(name, function, function.options, SUBCOMMANDS.get(name, {}))  # type: ignore[attr-defined]  # by @command


def main() -> None:
    """Entry point of the console script."""
    words = sys.argv[1:]
    if "_SABIA_COMPLETE" not in os.environ:
        name, rest = called(words)
        word = next((w for w in words if w in HELP), "")
        if word and name:
            from sabia.cli import help as pages

            word = pages.asked(rest, find(name).options.table)  # type: ignore[attr-defined]  # by @command
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
