"""The filter of system calls: its jumps, and its numbers next to the headers of the system."""

from pathlib import Path

import pytest

from sabia.core.sandbox import call_filter


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filters_are_programs_that_end(machine):
    steps = call_filter.steps_of([7], machine)
    assert len(steps) < 4096
    for place, (code, yes, no, _) in enumerate(steps):
        if code & 7 == 5:  # a jump stays inside
            assert place + 1 + max(yes, no) < len(steps)
    assert steps[-1][0] == 6


def test_numbers_of_calls_are_those_of_the_headers():
    """Of the machine's own headers, for the calls that they name."""
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("no headers of Linux")
    lines = (line.split() for line in header.read_text().splitlines())
    numbers = {parts[1][5:]: int(parts[2]) for parts in lines if len(parts) == 3}
    for call, (number, _) in call_filter._REFUSED.items():
        assert numbers[call] == number
    for name, call in (("kill", call_filter._KILL),
                       ("tgkill", call_filter._TGKILL), ("fcntl", call_filter._FCNTL),
                       ("socketpair", call_filter._SOCKETPAIR),
                       ("prlimit64", call_filter._PRLIMIT)):  # fmt: skip
        assert numbers[name] == call[0]
