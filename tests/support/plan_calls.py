"""Call `sabia plan-cluster` in a test: as a process, or in this one (many cases, little time)."""

import io
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

from pinned_day import pinned

from sabia.cli.main import main
from sabia.core import stop


@dataclass(frozen=True)
class Called:
    """How a call ended."""

    code: int
    stdout: str
    stderr: str


def process(words: str = "", text: bool = True, **settings: Any) -> subprocess.CompletedProcess:
    """The command as a process of its own."""
    command = [sys.executable, "-m", "sabia.cli.main", "plan-cluster", *words.split()]
    return subprocess.run(command, capture_output=True, text=text, **settings)


def call(words: str, stdin: str | None = None) -> Called:
    """The command within this process, on the day of all planner tests."""
    return called(words.split(), stdin)


def called(words: list[str], stdin: str | None = None) -> Called:
    """The same with words as they are."""
    given = io.TextIOWrapper(io.BytesIO((stdin or "").encode()), encoding="utf-8")
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    argv, code = ["sabia", "plan-cluster", *words], 0
    streams = mock.patch.multiple(sys, argv=argv, stdin=given, stdout=out, stderr=err)
    # signals of the test process stay as they are: each installation would keep a thread and pipes
    with pinned(), streams, mock.patch.object(stop, "install"):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    written = (stream.buffer.getvalue() for stream in (out, err))
    return Called(code, *(text.decode(errors="replace") for text in written))  # rows may be binary


def report(words: str, stdin: str | None = None) -> dict[str, Any]:
    """What `--json` prints of a call that succeeds."""
    done = call(f"{words} --json", stdin)
    assert done.code == 0, done.stderr
    return json.loads(done.stdout)
