"""Call `sabia plan-cluster` in a test: as a process, or in this one (many cases, little time)."""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from pinned_day import pinned
from typer.testing import CliRunner

from sabia.cli.main import app


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
    command = ["plan-cluster", *words.split()]
    with pinned():
        done = CliRunner().invoke(app, command, input=stdin, prog_name="sabia")
    return Called(done.exit_code, done.stdout, done.stderr)


def report(words: str, stdin: str | None = None) -> dict[str, Any]:
    """What `--json` prints of a call that succeeds."""
    done = call(f"{words} --json", stdin)
    assert done.code == 0, done.stderr
    return json.loads(done.stdout)
