"""Every process collects the same tests by the same names; else workers cannot share them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def collected(hash_seed: str, *more: str) -> list[str]:
    """Names of the tests of the fast suite, in order, as a process of its own collects them."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", *more]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT / "tests" / "support")}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_names_depend_on_neither_hashes_nor_the_time(request: pytest.FixtureRequest) -> None:
    found = collected("7", "-p", "clock_ahead")
    here = [item.nodeid for item in request.session.items]
    if len(here) != len(found):  # this session runs a part of the suite
        here = collected("8")
    assert [name for name in here if name not in set(found)][:5] == []
    assert here == found
