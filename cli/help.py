"""`-h` and `--help` of a command, drawn from its option table as plain text of 80 columns."""

import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sabia.core.options import about
from sabia.core.options.option import GROUPS, Option, flags
from sabia.core.options.table import Options

WIDTH = 80
COLUMN = 26  # where the text of an option begins


def asked(words: Sequence[str], table: Mapping[str, Option]) -> str:
    """The help word among a command's arguments ('-h', '--help', '--help=json'), else ''.

    The value of an option is not looked at, nor anything behind `--`.
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


def text(
    name: str, function: Callable[..., None], cls: type[Options], subcommands: Mapping[str, str],
    common: bool = False,
) -> str:  # fmt: skip
    """The help page of a command: all options, or with `common` the ones most used."""
    arguments = [f" {o.metavar}" for o in cls.table.values() if o.positional]
    parts = [f"Usage: sabia {name} [OPTIONS]{''.join(arguments)}", _prose(function.__doc__ or "")]
    for group, options in about.by_group(cls).items():
        shown = [o for o in options if o.common or o.required or not common]
        if shown:
            parts.append(_section(group, shown, cls))
    if subcommands:
        parts.append(rows("Subcommands (first word, each with its own --help)", subcommands))
    if not common:
        lines = getattr(function, "examples", "").splitlines()
        parts.append("\n".join(["Examples:", *(_example(line) for line in _joined(lines))]))
    more = f"sabia {name} --help shows all {len(cls.table)} options. " if common else ""
    return "\n\n".join([*parts, f"{more}See man sabia-{name.split()[0]}."])


def as_json(
    name: str, function: Callable[..., None], cls: type[Options], subcommands: Mapping[str, str]
) -> str:
    """The option table of a command as JSON."""
    page = {
        "command": name, "help": " ".join((function.__doc__ or "").split()),
        "subcommands": list(subcommands), "options": about.described(cls, name),
        "examples": _joined(getattr(function, "examples", "").splitlines()),
    }  # fmt: skip
    return json.dumps(page, indent=1, default=str)


def rows(title: str, entries: Mapping[str, str]) -> str:
    """A titled list of names with a line of text each."""
    column = max(map(len, entries)) + 4
    return "\n".join([f"{title}:", *(_row(name, text, column) for name, text in entries.items())])


def _section(group: str, options: Sequence[Option], cls: type[Options]) -> str:
    """A group; what all of its options need is said once, behind the title."""
    shared = about.shared_conditions(options)
    needed = " and ".join(condition.text(cls.table) for condition in shared)
    lines = [f"{group} (only {needed}):" if needed else f"{group}:"]
    last = [_row(*about.HELP)] if group == GROUPS[-1] else []
    for option in sorted(options, key=lambda option: not option.positional):
        lines.append(_entry(option, about.conditions(option, cls, shared)))
    return "\n".join([*lines, *last])


def _entry(option: Option, conditions: list[str]) -> str:
    shown = option.metavar.replace("[", "").replace("]", "")
    left = shown if option.positional else ", ".join(flags(option))
    if option.kind != "flag" and not option.positional:
        left += f" {option.placeholder}"
    if not option.short and not option.positional:
        left = "    " + left
    notes = [f"default: {option.default_text()}"] if option.default_text() else []
    notes += ["required"] if option.required else []
    notes += ["repeatable"] if option.many and not option.positional else []
    notes += conditions
    return _row(left, option.help + (f" [{'; '.join(notes)}]" if notes else ""))


def _row(left: str, text: str, column: int = COLUMN) -> str:
    lines = textwrap.wrap(text, WIDTH - column, break_long_words=False, break_on_hyphens=False)
    head, margin = f"  {left}", " " * column
    if len(head) > column - 2:
        return "\n".join([_broken(head), *(margin + line for line in lines)])
    first, *rest = lines or [""]
    return "\n".join([f"{head:<{column}}{first}".rstrip(), *(margin + line for line in rest)])


def _broken(head: str) -> str:
    """An option with a long list of choices, on several lines."""
    if len(head) <= WIDTH:
        return head
    margin = head[: len(head) - len(head.lstrip())]
    words = head.strip().replace(",", ", ")
    return textwrap.fill(words, WIDTH, initial_indent=margin, subsequent_indent=" " * 8)


def _prose(text: str) -> str:
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(
        textwrap.fill(" ".join(p.split()), WIDTH, initial_indent="  ", subsequent_indent="  ",
                      break_on_hyphens=False) for p in paragraphs
    )  # fmt: skip


def _joined(lines: Sequence[str]) -> list[str]:
    """Example lines with their continuations joined."""
    return re.sub(r" \\\n\s*", " ", "\n".join(lines)).splitlines()


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


def error_object(code: int, message: str) -> dict[str, Any]:
    """An error for `--json`: the parts of '--option: value (expected …); fix'."""
    option = re.match(r"(--?[a-z][\w-]*|[A-Z]+): ", message)
    rest = message[option.end() :] if option else message
    value = re.match(r"(?:'([^']*)'|(\S+) is (?:out of|not|no)\b|(\S+): (?:No|Not|not|Is) )", rest)
    expected = re.search(r"\(expected (.*?)\)(?=$|[;.: ])|^only (with.*?)(?=$|;)", rest)
    fix = re.search(r"; ([^;]+?)\)?$", rest)
    return {
        "code": code, "message": message, "option": option[1] if option else None,
        "value": next(filter(None, value.groups()), None) if value else None,
        "expected": (expected[1] or expected[2]) if expected else None,
        "fix": fix[1] if fix else None,
    }  # fmt: skip
