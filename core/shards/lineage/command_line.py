"""The command line that gives the options of a call again, and the files that its options name.

Options that only say how the result is computed (workers, slices, phases, messages) are left out,
and those of a configuration file or a variable are written out.
"""

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from sabia.core.options.option import FALSE, Option
from sabia.core.options.table import Options

HOW = {"jobs", "shard", "executor", "phase", "force", "dry_run", "json", "quiet", "debug", "config"}
# options that name files which a command writes besides its output
WRITTEN = {"removed", "stats", "report", "plot", "save_tokenizer", "replaced", "index", "warc"}
READ = {"focus", "lm", "decontaminate", "model"}  # besides those whose metavar names a file
OTHER_PLACES = {"out", "rejects", "state", "scratch", "cache", "row_cache", "judge_cache",
                "checkpoint_url"}  # fmt: skip


def call_of(options: Options) -> dict[str, object]:
    """arguments: words after the name of the command; folder: where it runs; reads, writes: files
    that options name, without the inputs and the output, as absolute paths; out: the absolute path
    of the output, '' for stdout."""
    given = {o.name: _texts(o, options) for o in options.table.values() if _is_given(o, options)}
    words = [word for name, texts in given.items() for word in _words(options.table[name], texts)]
    other = WRITTEN | OTHER_PLACES | {"inputs"}
    reads = {path for name, texts in given.items()
             if name not in other and may_be_file(options.table[name])
             for text in texts for path in _files(text)}  # fmt: skip
    writes = {text if "://" in text else os.path.abspath(text)
              for name, texts in given.items() if name in WRITTEN
              for text in texts if text != "-"}  # fmt: skip
    inputs, out = given.get("inputs", []), str(options.values().get("out") or "-")
    written = out if "://" in out else os.path.abspath(out)
    return {
        "arguments": [*words, *(["--"] if any(i.startswith("-") for i in inputs) else []), *inputs],
        "folder": os.getcwd(),
        "reads": sorted(reads),
        "writes": sorted(writes),
        "out": "" if out == "-" else written,
    }


def _is_given(option: Option, options: Options) -> bool:
    named = option.name in options.given or option.name in options.texts
    if option.name == "to" and options.values().get("out") not in (None, "-"):
        return False  # from a variable: the format of stdout
    return named and option.name not in HOW and getattr(options, option.name) not in (None, ())


def may_be_file(option: Option) -> bool:
    """Whether a value of an option may be the path of a file or directory that the call reads."""
    return option.name in READ or re.search("DIR|FILE|PATH", option.metavar) is not None


def _texts(option: Option, options: Options) -> list[str]:
    """The values of an option as they were given, else as texts."""
    value = options.texts.get(option.name, getattr(options, option.name))
    return [str(one) for one in (value if isinstance(value, list | tuple) else [value])]


def _words(option: Option, texts: list[str]) -> Iterator[str]:
    if option.positional:
        return
    flag = option.short if option.name == "out" else option.flag
    if option.kind == "flag":
        given = texts[-1].lower() not in FALSE
        if given or option.negative:
            yield flag if given else f"--no-{option.key}"
        return
    for text in texts:
        yield from (flag, text) if text and text[:1] != "-" else (f"{flag}={text}",)


def _files(text: str) -> Iterator[str]:
    """Absolute paths of files and directories that a value names: PATH, NAME=PATH, PATH,PATH."""
    for part in {text, text.partition("=")[2], *text.split(",")}:
        if part and "://" not in part and os.path.exists(part):
            yield os.path.abspath(part)
            if part.endswith(".toml"):
                yield from _named_in(Path(part))


def _named_in(path: Path) -> Iterator[str]:
    """Existing files that a TOML file names, relative to the current folder or to its own."""
    try:
        values = tomllib.loads(path.read_text("utf-8")).values()
    except (OSError, ValueError):
        return
    for value in values:
        for base in (Path(), path.parent):
            if isinstance(value, str) and 0 < len(value) < 1000 and (base / value).is_file():
                yield os.path.abspath(base / value)
                break
