"""pytest with the arguments given; the last line tells the CPU minutes of it and its children.

tests/run.sh runs it in its own place, so that signals reach it and its exit status is pytest's.
"""

import os
import resource
import sys

import pytest


def cpu_seconds() -> float:
    """User and system time of this process and of its children that have ended."""
    parts = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in parts)


def main() -> int:
    """Run; the status of pytest."""
    before = cpu_seconds()  # of the set-up, which the same process has run
    sys.path.insert(0, os.getcwd())  # as python -m pytest does
    status = pytest.main(sys.argv[1:])
    print(f"CPU time: {(cpu_seconds() - before) / 60:.1f} minutes", flush=True)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
