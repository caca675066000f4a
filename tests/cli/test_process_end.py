"""The end of a process: exit code, threads, exit handlers, output, and no teardown of Python."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, sys, threading, time
from sabia.cli import main

class Last:
    def __del__(self):
        print("torn down", file=sys.stderr)

def work():
    sys.kept = Last()
    atexit.register(print, "handler")
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    sys.stdout.write("row ")
    {end}

main.main = work
main.program()
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [("pass", 0), ("sys.exit()", 0), ("sys.exit(0)", 0), ("sys.exit(75)", 75)],
)
def test_everything_is_done_and_python_is_not_torn_down(
    end: str, code: int, tmp_path: Path
) -> None:
    with open(tmp_path / "out", "wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(end=end)], stdout=out, stderr=subprocess.PIPE
        )
    assert (done.returncode, done.stderr) == (code, b"")
    assert (tmp_path / "out").read_text() == "row thread\nhandler\n"


@pytest.mark.parametrize(
    ("end", "message"), [("sys.exit('no file')", b"no file"), ("1 / 0", b"ZeroDivisionError")]
)
def test_errors_are_reported_as_ever(end: str, message: bytes) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True)
    assert done.returncode == 1 and message in done.stderr
    assert b"handler" in done.stdout and b"thread" in done.stdout


def test_a_full_disk_at_the_end_is_an_error() -> None:
    with open("/dev/full", "wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(end="pass")], stdout=out, stderr=subprocess.PIPE
        )
    assert done.returncode != 0 and b"No space left" in done.stderr
