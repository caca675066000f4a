"""Asks whether removed rows were rightly removed, and tells the rate of errors (`show --judge`)."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import numpy as np

from sabia.core.errors import BadData, UsageError
from sabia.core.recipes.show.reading import Row
from sabia.core.recipes.show.related import Related
from sabia.core.recipes.show.row_kinds import kind_of, parts_of
from sabia.core.recipes.show.terminal import print_parts
from sabia.core.text.classify.score_calibration import wilson
from sabia.core.text.plain_table import table

ROWS = 50
KINDS = ("removed", "rejected", "decisions")
RIGHT, WRONG, SKIP, STOP = ANSWERS = ("y", "n", "s", "q")


def judge(chunks: Iterator[list[Row]], related: Related, from_stdin: bool, as_json: bool) -> None:
    """Show the rows one by one, ask about each, and print the rate of wrong removals. from_stdin:
    the rows are read from stdin. Raises UsageError for rows that were not removed."""
    rows = [row for chunk in chunks for row in chunk]
    for row in rows:
        if kind_of(row.values).name not in KINDS or row.values.get("reason") == "kept":
            raise UsageError(
                f"--judge: {row.source.name} has {kind_of(row.values).name} (expected removed rows,"
                " with a column `reason`, as --removed of classify and dedup writes)"
            )
    if not rows:
        raise BadData("--judge: no rows (expected removed ones)")
    answers, skipped = list[tuple[str, bool]](), 0
    with _answers(from_stdin) as file:
        for number, row in enumerate(rows, 1):
            print_parts(parts_of([[row]], related), sys.stderr)
            answer = _ask(file, f"{number} of {len(rows)}: rightly removed? [y/n/s/q] ")
            if answer == STOP:
                break
            skipped += answer == SKIP
            if answer != SKIP:
                answers.append((str(row.values["reason"]), answer == WRONG))
    report = _rates(answers) | {"skipped": skipped}
    print(json.dumps(report) if as_json else _text(report))


def _answers(from_stdin: bool) -> TextIO:
    """Where the answers are read: the terminal, if stdin has the rows."""
    if not from_stdin:
        return open(sys.stdin.fileno(), errors="replace", closefd=False)
    try:
        return open("/dev/tty", errors="replace")
    except OSError as error:
        raise UsageError(
            "--judge: the rows come from stdin and there is no terminal to answer at (expected "
            "PATHs)"
        ) from error


def _ask(file: TextIO, question: str) -> str:
    """An answer; that to stop at the end of the file."""
    while True:
        print(f"\n{question}", end="", file=sys.stderr, flush=True)
        line = file.readline()
        if not line:
            print(file=sys.stderr)
            return STOP
        if (answer := line.strip().lower()[:1]) in ANSWERS:
            return answer
        print("y: yes, n: no, s: skip, q: stop", file=sys.stderr)


def _rates(answers: Sequence[tuple[str, bool]]) -> dict[str, object]:
    """Of all answers and by reason: how many, how many wrong removals, their share and its
    interval."""
    asked, wrong = Counter(reason for reason, _ in answers), Counter[str]()
    for reason, is_wrong in answers:
        wrong[reason] += is_wrong
    by_reason = {reason: _rate(wrong[reason], count) for reason, count in asked.items()}
    return _rate(wrong.total(), len(answers)) | {"by_reason": by_reason}


def _rate(wrong: int, answered: int) -> dict[str, object]:
    if not answered:
        return {"answered": 0, "wrong": 0, "rate": None, "low": None, "high": None}
    low, high = (float(end) for end in wilson(np.array(wrong), np.array(answered)))
    return {"answered": answered, "wrong": wrong, "rate": wrong / answered, "low": low,
            "high": high}  # fmt: skip


def _text(report: dict[str, Any]) -> str:
    rows = report["by_reason"] | {"all": report}
    names = ("answered", "wrong", "rate", "low", "high")
    shown = [(name, *(one[field] for field in names)) for name, one in rows.items()]
    head = ("reason", "answered", "wrong", "rate", "95 % from", "to")
    return table(head, shown) + f"skipped: {report['skipped']}"
