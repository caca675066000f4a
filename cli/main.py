"""`sabia`: print help or the version, or run a command."""

import atexit
import os
import sys
import threading
from functools import partial

from sabia.cli.registry import COMMANDS, RUN_MODELS, SUBCOMMANDS, all_calls, called, find
from sabia.core import stop
from sabia.core.errors import ExitCode
from sabia.core.process_start import runs_a_command, start_with_huge_pages

HELP = ("-h", "--help", "--help=json")
OPTIONS = {
    "-V, --version": "Print the version",
    "-v, --verbose": "With --version: also print packages, devices and Slurm state",
    "--install-completion": "Install completion for the current shell",
    "--show-completion": "Print the completion script of the current shell",
    "-h, --help": "Print this page; --help=json: all commands and options as JSON",
}


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


def program() -> None:
    """Entry point of the console script and of `python -m`."""
    if called(sys.argv[1:])[0] in RUN_MODELS and not set(HELP) & set(sys.argv):
        start_with_huge_pages()
    runs_a_command()
    code: str | int | None = None
    try:
        main()
    except SystemExit as end:
        code = end.code
    if isinstance(code, str):
        sys.exit(code)
    end_process(code or 0)


def end_process(code: int) -> None:
    """End with an exit code after threads, exit handlers and output, without tearing Python down.

    A thread of a library (Arrow's reads of Python files) that frees a Python object while the
    interpreter is torn down is ended by it, which aborts the process (exit code 134).
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        sys.exit(code)  # Python reports what cannot be written
    os._exit(code)


def main() -> None:
    """Run the command line `sys.argv` in this process."""
    stop.install()  # first: until then a signal such as USR1 ends the process
    from sabia.cli.command import call, close_stdout, print_error

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
            from sabia.core.version import print_version

            print_version(bool({"-v", "--verbose"} & set(words)))
            return
    from sabia.cli.group import run

    sys.exit(run(words, partial(call, calls=all_calls()), print_error))


if __name__ == "__main__":
    program()
