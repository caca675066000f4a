"""Read a list of runs: JSON lines (also .gz, or stdin) or Parquet, one run per row.

A row's keys are the planner's options (`PlanOptions`), with or without hyphens, and `name`. Values
are as on the command line ("1.6T") or plain numbers.
"""

import gzip
import json
import os
import sys
import zlib
from collections.abc import Iterator
from typing import IO, Any

from sabia.core.errors import BadData, UsageError

MOST_LETTERS = 1 << 20  # of a line
Run = tuple[str, dict[str, Any] | BadData]  # file and line, and the row or why it is none


def read_runs(path: str) -> Iterator[Run]:
    """(file and line, the row or its error) of each run. UsageError if there is no file.

    Raises BadData on a file that cannot be read, or without any line.
    """
    if path == "-":
        try:
            yield from _lines("stdin", sys.stdin)
        except UnicodeDecodeError as error:
            raise BadData(f"stdin: {error} (expected JSON lines)") from error
    elif path.endswith(".parquet"):
        yield from _parquet(path)
    else:
        opener = gzip.open if path.endswith(".gz") else open
        try:
            with opener(path, "rt", encoding="utf-8-sig") as file:
                yield from _lines(path, file)
        except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise BadData(f"{path}: {error} (expected JSON lines, also as .gz)") from error
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"{path}: {reason} (expected a list of runs)") from error


def _lines(path: str, file: IO[str]) -> Iterator[Run]:
    empty = True
    for number, line in enumerate(iter(lambda: file.readline(MOST_LETTERS), ""), 1):
        if not line.strip():
            continue
        where = f"{os.path.basename(path)}:{number}"
        if len(line) == MOST_LETTERS:
            raise BadData(f"{where}: a line longer than 1 MB (expected one JSON object per line)")
        try:
            row = json.loads(line.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            row = BadData(f"{where}: {error} (expected one JSON object per line)")
        if not isinstance(row, dict | BadData):
            row = BadData(f"{where}: {line.strip()[:40]!r} (expected a JSON object of options)")
        empty = False
        yield where, row
    if empty:
        raise BadData(f"{path}: no runs (expected one JSON object per line)")


def _parquet(path: str) -> Iterator[Run]:
    from sabia.core.digests import parquet_at

    try:
        with parquet_at(path) as file:
            rows = file.read().to_pylist()
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such file (expected a list of runs)") from error
    for number, row in enumerate(rows, 1):
        given = {key: value for key, value in row.items() if value is not None}
        yield f"{os.path.basename(path)}:{number}", given
