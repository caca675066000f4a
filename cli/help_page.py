"""`-h` and `--help` of a command: its option table as plain text of 80 columns, or as JSON."""

import json
import re
import textwrap
from collections.abc import Mapping, Sequence

from sabia.cli.command import Command
from sabia.core.options import about
from sabia.core.options.option import GROUPS, Option, flags
from sabia.core.options.table import Options

WIDTH = 80
COLUMN = 26  # where the help of an option begins


def asked(words: Sequence[str], table: Mapping[str, Option]) -> str:
    """The help word among a command's arguments ('-h', '--help', '--help=json'), else ''.

    The values of options, and everything after `--`, are ignored.
    """
    valued = {flag for option in table.values() if option.kind != "flag" and not option.positional
              for flag in flags(option)}  # fmt: skip
    rest = iter(words)
    for word in rest:
        if word == "--":
            return ""
        if word in ("-h", "--help", "--help=json"):
            return word
        if word in valued:
            next(rest, None)
    return ""


def text(name: str, command: Command, subcommands: Mapping[str, str], common: bool = False) -> str:
    """The help page of a command: all options, or with `common` those that are used most."""
    cls = command.options
    arguments = [f" {o.metavar}" for o in cls.table.values() if o.positional]
    parts = [f"Usage: sabia {name} [OPTIONS]{''.join(arguments)}"]
    parts += [
        textwrap.fill(" ".join(paragraph.split()), WIDTH, initial_indent="  ",
                      subsequent_indent="  ", break_on_hyphens=False)
        for paragraph in re.split(r"\n\s*\n", command.description)
    ]  # fmt: skip
    for group, options in about.by_group(cls).items():
        shown = [o for o in options if o.common or o.required or not common]
        if shown:
            parts.append(_section(group, shown, cls))
    if subcommands:
        parts.append(rows("Subcommands (each has its own --help)", subcommands))
    if not common:
        parts.append("\n".join(["Examples:", *map(_example, command.examples)]))
    more = f"sabia {name} --help shows all {len(cls.table)} options. " if common else ""
    return "\n\n".join([*parts, f"{more}See man sabia-{name.split()[0]}."])


def as_json(name: str, command: Command, subcommands: Mapping[str, str]) -> str:
    """The option table of a command as JSON."""
    page = {
        "command": name, "help": " ".join(command.description.split()),
        "subcommands": list(subcommands), "options": about.described(command.options, name),
        "examples": command.examples,
    }  # fmt: skip
    return json.dumps(page, indent=1, default=str)


def rows(title: str, entries: Mapping[str, str]) -> str:
    """A titled list of names, each with a line of text."""
    column = max(map(len, entries)) + 4
    return "\n".join([f"{title}:", *(_row(name, text, column) for name, text in entries.items())])


def _section(group: str, options: Sequence[Option], cls: type[Options]) -> str:
    """A group; a condition that all of its options have is printed once, after the title."""
    shared = about.shared_conditions(options)
    needed = " and ".join(condition.text(cls.table) for condition in shared)
    lines = [f"{group} (only {needed}):" if needed else f"{group}:"]
    for option in sorted(options, key=lambda option: not option.positional):
        lines.append(_entry(option, about.conditions(option, cls, shared)))
    return "\n".join([*lines, *([_row(*about.HELP)] if group == GROUPS[-1] else [])])


def _entry(option: Option, conditions: list[str]) -> str:
    notes = [f"default: {option.default_text()}"] if option.default_text() else []
    notes += ["required"] if option.required else []
    if option.positional:
        left = option.metavar.replace("[", "").replace("]", "")
    else:
        left = ("" if option.short else "    ") + ", ".join(flags(option))
        left += f" {option.placeholder}" if option.kind != "flag" else ""
        notes += ["repeatable"] if option.many else []
    notes += conditions
    return _row(left, option.help + (f" [{'; '.join(notes)}]" if notes else ""))


def _row(left: str, text: str, column: int = COLUMN) -> str:
    """Two columns; a left part that is too long gets its own line, or several lines."""
    lines = textwrap.wrap(text, WIDTH - column, break_long_words=False, break_on_hyphens=False)
    head, margin = f"  {left}", " " * column
    if len(head) <= column - 2:
        first, *lines = lines or [""]
        head = f"{head:<{column}}{first}".rstrip()
    elif len(head) > WIDTH:  # a long list of choices
        indent = head[: len(head) - len(head.lstrip())]
        head = textwrap.fill(head.strip().replace(",", ", "), WIDTH, initial_indent=indent,
                             subsequent_indent=" " * 8)  # fmt: skip
    return "\n".join([head, *(margin + line for line in lines)])


def _example(line: str) -> str:
    """A shell line in at most 80 columns, continued by backslashes between words."""
    words = re.findall(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+", line)
    lines = [""]
    for word in words:
        indent = "  " if len(lines) == 1 else "      "
        if lines[-1] and len(indent + lines[-1] + word) > WIDTH - 3:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return "  " + " \\\n      ".join(lines)
