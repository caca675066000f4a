"""Stop signals: noticed by checks, and without any check after a grace period."""

import os
import signal
import subprocess
import sys
import time

import pytest

SCRIPT = """
import sys, threading, time
from sabia.core import stop
from sabia.core.errors import Interrupted
stop.GRACE_S = 0.3
stop.install()
print("ready", flush=True)
try:
    {body}
except Interrupted as error:
    print(error)
    sys.exit(75)
"""
WAITS = {
    "sleep": "time.sleep(60)",
    "lock": "threading.Semaphore(0).acquire()",
    "read": "sys.stdin.buffer.read(1)",
    "loop": "n = 0\n    while True: n += 1",
    "swallowed": "\n    while True:\n        try: time.sleep(60)\n"
    "        except Exception: stop.check()",
}


def stopped(body: str, *numbers: int, gap_s: float = 0.3) -> tuple[int, str, float]:
    """(exit code, output, seconds from the last signal to the end)."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(body=body)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for number in numbers:
        time.sleep(gap_s)
        process.send_signal(number)
    sent = time.monotonic()
    code = process.wait(30)
    return code, process.stdout.read(), time.monotonic() - sent


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_wait_without_checks_ends(name: str, number: signal.Signals) -> None:
    code, output, seconds = stopped(WAITS[name], number)
    assert code == 75 and output.startswith(f"stopped by {number.name}")
    assert seconds < 10


# Another thread takes the signal, as if it came right before the main thread's call: nothing ends
# the call, and the handler waits for it.
TAKEN_ELSEWHERE = """signal.pthread_sigmask(signal.SIG_BLOCK, stop.SIGNALS + (signal.SIGINT,))
    {wait}"""


@pytest.mark.parametrize("name", ["sleep", "lock", "read"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_right_before_a_call_that_waits(name: str, number: signal.Signals) -> None:
    body = f"import signal\n    {TAKEN_ELSEWHERE.format(wait=WAITS[name])}"
    code, output, seconds = stopped(
        f"other = threading.Thread(target=time.sleep, args=(40,), daemon=True)\n    other.start()"
        f"\n    {body}", number,
    )  # fmt: skip
    assert code == 75 and output.startswith(f"stopped by {number.name}")
    assert seconds < 5


def test_ctrl_c_right_before_a_call_that_waits() -> None:
    body = f"""import signal
    other = threading.Thread(target=time.sleep, args=(40,), daemon=True)
    other.start()
    try:
        {TAKEN_ELSEWHERE.format(wait="    time.sleep(60)")}
    except KeyboardInterrupt:
        sys.exit(4)"""
    code, _, seconds = stopped(body, signal.SIGINT)
    assert code == 4 and seconds < 5


def test_nothing_is_raised_within_a_polling_loop() -> None:
    body = """with stop.polling('a loop'):
        while not stop.requested():
            time.sleep(1.0)
        time.sleep(0.6)
        print('saved')
    sys.exit(3)"""
    code, output, _ = stopped(body, signal.SIGUSR1)
    assert (code, output) == (3, "saved\n")


def test_a_signal_in_the_last_step_of_a_polling_loop_is_answered_after_it() -> None:
    body = """with stop.polling('a loop'):
        time.sleep(0.6)
    time.sleep(60)"""
    code, output, _ = stopped(body, signal.SIGTERM)
    assert code == 75 and "SIGTERM" in output


def test_handlers_are_installed_before_the_slow_imports() -> None:
    """A signal in the first tenth of a second must not end the process."""
    script = """
import sys
import sabia.cli.main
from sabia.core import stop
def install():
    print(*(name for name in ("typer", "rich", "sabia.cli.command", "dataclasses", "difflib")
            if name in sys.modules))
    sys.exit()
stop.install = install
sabia.cli.main.main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "\n", done.stderr


def test_a_stage_that_waits_for_its_input_answers_at_once(tmp_path) -> None:
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "sabia.cli.main", "classify"], stdin=reader,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
    )  # fmt: skip
    os.write(writer, b'{"text": "some words"}\n')
    time.sleep(3)
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    assert process.wait(30) == 75 and time.monotonic() - sent < 4
    os.close(writer)
