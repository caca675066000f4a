"""The manual pages: one a command, every section, options as declared, clean by lint."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sabia.cli.group import typer_command
from sabia.cli.registry import COMMANDS, all_calls, called, find
from sabia.core.options import about
from sabia.core.options.table import resolve

MAN = Path(__file__).parent.parent / "man"
PAGES = ["sabia", *(f"sabia-{name}" for name in COMMANDS)]
SECTIONS = ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "INPUT AND OUTPUT", "ENVIRONMENT",
            "EXIT STATUS", "EXAMPLES", "SEE ALSO")  # fmt: skip
MANDOC = pytest.mark.skipif(not shutil.which("mandoc"), reason="mandoc is not installed")


@pytest.mark.parametrize("page", PAGES)
def test_page_has_every_section(page: str) -> None:
    text = (MAN / f"{page}.1").read_text()
    for section in SECTIONS:
        assert f"\n.Sh {section}\n" in text


def test_no_page_without_a_command() -> None:
    assert {path.stem for path in MAN.glob("*.1")} == set(PAGES)


def test_options_are_those_of_the_tables() -> None:
    check = [sys.executable, str(MAN / "generate.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def rendered(page: str) -> str:
    """A page as `man` shows it, without overstrikes, each paragraph of an entry on one line."""
    words = ["mandoc", "-Tutf8", "-Owidth=78", str(MAN / f"{page}.1")]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return " ".join(re.sub(".\b", "", shown).replace("‐", "-").split()).replace("- ", "-")


@MANDOC
@pytest.mark.parametrize("call", all_calls())
def test_the_rendered_page_tells_every_option(call: str) -> None:
    text = rendered(f"sabia-{call.split()[0]}")
    table = find(call).options
    long_help = about.long_help(table)
    for name, option in table.table.items():
        if not option.positional:
            assert f" --{option.key}" in text
        told = [option.help, *re.findall(r"[^.`]{12,}", long_help.get(name, ""))]
        told += [option.default_text(), *option.choices]
        for words in told:
            plain = " ".join(words.replace("`", "").split()).replace("- ", "-")
            assert plain.lower() in text.lower(), (option.flag, plain)


@MANDOC
@pytest.mark.parametrize("page", PAGES)
def test_the_rendered_page_is_plain(page: str) -> None:
    text = rendered(page)
    assert not re.findall(r"``|\\f[A-Z]|\\e|<\?>", text)
    assert not re.findall(r" [“”]{2,}|:-\d", text)


@MANDOC
@pytest.mark.parametrize("page", PAGES)
def test_mandoc_finds_nothing(page: str) -> None:
    words = ["mandoc", "-Tlint", str(MAN / f"{page}.1")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ)
    said = [x for x in done.stdout.splitlines() if "referenced manual not found" not in x]
    assert not said


def test_generated_pages_quote_what_mdoc_would_read() -> None:
    mdoc = runpy.run_path(str(MAN / "generate.py"))["_mdoc"]
    assert mdoc("Give --length 8k. A\\b is kept.") == [
        "Give \\fB\\-\\-length\\fP 8k.", "A\\eb is kept."]  # fmt: skip
    assert mdoc(".toml files") == ["\\&.toml files"]
    assert mdoc("Use `a b` now.") == ["Use \\fBa b\\fP now."]
    assert mdoc("`x --list y` lists.") == ["\\fBx \\-\\-list y\\fP lists."]


def example_lines() -> list[str]:
    """The shell commands in the examples of the manual pages and of `--help`."""
    texts = [line for name in all_calls() for line in find(name).examples]
    for page in PAGES:
        blocks = re.findall(
            r"\.Bd -literal[^\n]*\n(.*?)\.Ed", (MAN / f"{page}.1").read_text(), re.S
        )
        for block in blocks:
            plain = block.replace("\\-", "-").replace("\\(aq", "'").replace("\\e", "\\")
            texts += plain.replace("\\\n", " ").replace("|\n", "| ").splitlines()
    commands = [part.strip() for text in texts for part in re.split(r"\|(?!\|)", text)]
    return sorted({x.partition(" > ")[0] for x in commands if re.match(r"sabia [a-z]", x)})


@pytest.mark.parametrize("line", example_lines())
def test_examples_have_valid_options(line: str) -> None:
    name, words = called(shlex.split(line)[1:])
    given: dict[str, object] = {}
    command = typer_command(name, find(name), lambda _name, _command, flags: given.update(flags))
    command.main(words, prog_name="sabia", standalone_mode=False)
    resolve(find(name).options, name, given, {})
