"""An environment that the scripts of the examples use as it is."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def marked_environment(folder: Path) -> dict[str, str]:
    """Variables that name a copy, made in a folder, of this interpreter's environment, with the
    mark that it needs no set-up."""
    venv = folder / "venv"
    venv.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (venv / name).symlink_to(Path(sys.prefix) / name)
    made_from = (ROOT / "pyproject.toml", ROOT / "tests" / "constraints.txt")
    both = b"".join(path.read_bytes() for path in made_from)
    mark = subprocess.run(["cksum"], input=both, capture_output=True, check=True)
    (venv / ".sabia-setup").write_text(f"made\n{mark.stdout.split()[0].decode()} index \n")
    return os.environ | {"SABIA_VENV": str(venv), "OMP_NUM_THREADS": "1"}
