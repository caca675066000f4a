"""The example of preference training, as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_preference_is_learned(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    venv.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (venv / name).symlink_to(Path(sys.prefix) / name)
    made_from = (ROOT / "pyproject.toml", ROOT / "tests" / "constraints.txt")
    both = b"".join(path.read_bytes() for path in made_from)
    mark = subprocess.run(["cksum"], input=both, capture_output=True, check=True)
    (venv / ".sabia-setup").write_text(f"made\n{mark.stdout.split()[0].decode()} index \n")
    environment = os.environ | {"SABIA_VENV": str(venv), "OMP_NUM_THREADS": "1"}
    line = ["bash", str(ROOT / "examples" / "preferences.sh"), str(tmp_path / "work")]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    share = float(done.stdout.split("%")[0].split()[-1])
    assert share >= 90, done.stdout
