"""Write the OPTIONS sections of the manual pages from the option tables, or check them.

usage: python man/generate.py [--check]

In each page the part between the two marker comments is generated from `core/options`; the rest is
written by hand. With --check, pages are not written; exit code 1 if a page is out of date.
"""

import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from sabia.cli.registry import SUBCOMMANDS, all_calls, find
from sabia.core.options import about
from sabia.core.options.option import GROUPS, Option, listed
from sabia.core.options.shared import MeshOptions, RowOptions
from sabia.core.options.table import Options

MAN = Path(__file__).parent
BEGIN = '.\\" Options: written by man/generate.py from core/options. Do not edit this part.'
END = '.\\" End of the options.'


class Everywhere(RowOptions, MeshOptions):
    """The options in sabia(1): those that most commands share."""


def page_of(call: str) -> Path:
    """The page of a command; subcommands are described on the page of their command."""
    return MAN / f"sabia-{call.split()[0]}.1"


def tables() -> dict[Path, list[tuple[str, type[Options]]]]:
    """Page → the commands it describes, each with its options; sabia(1) has the shared ones."""
    pages: dict[Path, list[tuple[str, type[Options]]]] = {MAN / "sabia.1": [("", Everywhere)]}
    for call in all_calls():
        pages.setdefault(page_of(call), []).append((call, find(call).options))
    return pages


def options_text(calls: Sequence[tuple[str, type[Options]]]) -> str:
    """The options of some commands as mdoc."""
    lines: list[str] = []
    for call, cls in calls:
        command, _, subcommand = call.partition(" ")
        if subcommand:
            first = subcommand == next(iter(SUBCOMMANDS[command]))
            name = f"sabia {command} {f'[{subcommand}]' if first else subcommand}"
            lines.append(f".Ss {name}")
        lines += _section(cls)
    return "\n".join([BEGIN, *lines, END])


def _section(cls: type[Options]) -> list[str]:
    texts = about.long_help(cls)
    lines = []
    for number, (group, options) in enumerate(about.by_group(cls).items()):
        shared = about.shared_conditions(options)
        needed = " and ".join(condition.text(cls.table) for condition in shared)
        title = f"{group}, only {_escaped(needed)}:" if needed else f"{group}:"
        lines += [*([".Pp"] if number else []), title, ".Bl -tag -width Ds"]
        for option in options:
            conditions = about.conditions(option, cls, shared)
            lines += [_item(option), *_body(option, texts.get(option.name, ""), conditions)]
        if group == GROUPS[-1]:
            lines += [".It Fl h , Fl -help", *_mdoc(_sentence(about.HELP[1]))]
        lines.append(".El")
    return lines


def _item(option: Option) -> str:
    value = "" if option.kind == "flag" else f" Ar {_value(option)}"
    if option.positional:
        return f".It Ar {option.flag.lower()}{' ...' if option.metavar.endswith('...') else ''}"
    return ".It " + " , ".join(f"Fl {word[1:]}{value}" for word in about.flags(option))


def _value(option: Option) -> str:
    if option.choices:
        return "name"
    return _escaped(option.metavar.lower().replace(" ", "_"))


def _body(option: Option, long_help: str, conditions: Iterable[str]) -> list[str]:
    sentences = [_sentence(option.help), long_help]
    if option.choices:
        sentences.append(f"One of {listed(f'`{c}`' for c in option.choices)}.")
    if option.range_text():
        interval = option.least is not None and option.most is not None
        sentences.append(f"The value is {'from ' if interval else ''}{option.range_text()}.")
    if option.default_text():
        plain = option.unset or f"`{option.default_text()}`"
        sentences.append(f"Default: {plain}.")
    if option.required:
        sentences.append("This option is required.")
    if option.many and not option.positional:
        sentences.append("It may be repeated.")
    sentences += [_sentence(text) for text in conditions]
    return _mdoc(" ".join(filter(None, sentences)))


def _sentence(text: str) -> str:
    first = text[0].upper() if text[0].isascii() else text[0]  # not μ
    return first + text[1:] + ("" if text.endswith((".", "?")) else ".")


def _mdoc(text: str) -> list[str]:
    """Plain sentences with `literals` as mdoc: a new line for each sentence, literals in bold."""
    outside = r"(?<![\w-])(--[a-z][\w-]*(?:=\w+)?)(?!\w)"
    parts = [part if n % 2 else re.sub(outside, r"`\1`", part)
             for n, part in enumerate(text.split("`"))]  # fmt: skip
    parts = "`".join(parts).split("`")
    parts = [
        f"\\fB{_escaped(p).replace(' ', '~~')}\\fP" if n % 2 else _escaped(p, False)
        for n, p in enumerate(parts)
    ]
    lines = []
    for sentence in re.split(r"(?<=[.?!])\s+(?=[A-Z`\\])", "".join(parts)):
        plain = sentence.replace("~~", " ")
        width = 78 - 7 * sum(not c.isascii() for c in plain)  # mandoc counts \[uXXXX]
        lines += textwrap.wrap(
            plain, max(40, width), break_long_words=False, break_on_hyphens=False
        )
    return [f"\\&{line}" if line[:1] in ".'" else line for line in lines]


def _escaped(text: str, literal: bool = True) -> str:
    text = text.replace("\\", "\\e")
    return text.replace("-", "\\-") if literal else text


def main() -> None:
    """Write the pages, or with --check list those that are out of date."""
    stale = []
    for path, calls in tables().items():
        before = path.read_text()
        head, begin, rest = before.partition(BEGIN)
        _, end, tail = rest.partition(END)
        if not (begin and end):
            sys.exit(f"{path.name}: no generated part (expected the line {BEGIN!r})")
        after = head + options_text(calls) + tail
        if after != before:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(after)
    if stale and "--check" in sys.argv:
        sys.exit(f"out of date: {', '.join(stale)}; run python man/generate.py")
    print(f"{len(stale)} pages written" if stale else "all pages are up to date")


if __name__ == "__main__":
    main()
