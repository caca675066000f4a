"""The example of preference training, as a user runs it."""

import subprocess
from pathlib import Path

import pytest
from marked_environment import marked_environment

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_preference_is_learned(tmp_path: Path) -> None:
    line = ["bash", str(ROOT / "examples" / "preferences.sh"), str(tmp_path / "work")]
    done = subprocess.run(
        line, env=marked_environment(tmp_path), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    share = float(done.stdout.split("%")[0].split()[-1])
    assert share >= 90, done.stdout
