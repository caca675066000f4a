"""The versions that pyproject.toml admits, and the set-up of an environment by the scripts."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"


def pins(name: str) -> dict[str, Version]:
    """package → version of a file of constraints; names as the index spells them."""
    found = {}
    for line in (TESTS / name).read_text().splitlines():
        if not line.startswith("#"):
            package, version = line.split("==")
            found[re.sub(r"[-_.]+", "-", package).lower()] = Version(version)
    return found


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["dev"]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_the_lowest_set_is_what_pyproject_admits(requirement: Requirement) -> None:
    bounds = [Version(s.version) for s in requirement.specifier if s.operator == ">="]
    assert [pins("constraints-lowest.txt")[requirement.name]] == bounds
    assert pins("constraints.txt")[requirement.name] in requirement.specifier


@pytest.mark.parametrize("module", ["sabia", "sabia.cli.main"])
def test_the_package_is_the_command(module: str) -> None:
    words = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"sabia \d+\.\d+\.\d+\n", done.stdout)


# a pip that notes its words, and then does what is asked for
PIP = """import os, signal, sys
words = sys.argv[1:]
open(os.path.join(sys.prefix, "..", "called"), "a").write(" ".join(words) + "\\n")
log = open(words[words.index("--log") + 1], "w")
"""
BROKEN = "log.write('NewConnectionError: Failed to establish a new connection'); sys.exit(1)"
KILLED = """log.write('2026-01-01T00:00:00,000 Installing collected packages: torch')
log.close()
open(os.path.join(sys.prefix, "torn"), "w").close()
os.kill(os.getppid(), signal.SIGKILL)
"""
PYTHON = f"""#!/bin/sh
[ "$1 $2" != "-m venv" ] || set -- "$@" --without-pip  # which takes seconds
exec '{sys.executable}' "$@"
"""


def set_up(
    venv: Path, pip: str = "", **variables: str | Path
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What a script does that needs an environment, and the calls of pip; PIP in pip's place."""
    fake = venv.parent / "fake" / "pip"
    fake.mkdir(parents=True, exist_ok=True)
    (fake / "__init__.py").touch()
    (fake / "__main__.py").write_text(PIP + pip)
    python = fake.parent / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    called = venv.parent / "called"
    called.unlink(missing_ok=True)
    program = (
        f"set -euo pipefail\nsource '{ROOT}/examples/environment.sh'\n"
        f"make_environment '{ROOT}' ''\ncommand -v python"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SABIA_")}
    named = {"SABIA_VENV": venv, "PYTHON": python, "PYTHONPATH": fake.parent} | variables
    environment = kept | {name: str(value) for name, value in named.items()}
    done = subprocess.run(["bash", "-c", program], env=environment, capture_output=True, text=True)
    return done, called.read_text().splitlines() if called.exists() else []


def test_a_failed_set_up_says_what_to_do_and_is_mended(tmp_path: Path) -> None:
    venv = tmp_path / "a folder" / "venv"
    done, _ = set_up(venv, BROKEN)
    assert done.returncode == 1 and "there is no network" in done.stderr
    assert done.stderr.count(" failed: ") == 1 and f"The log is {venv}/setup.log" in done.stderr
    done, called = set_up(venv, KILLED)
    assert done.returncode == -9 and len(called) == 1 and (venv / "torn").exists()
    done, called = set_up(venv)
    assert done.returncode == 0 and len(called) == 1 and not (venv / "torn").exists()
    assert done.stdout == f"{venv}/bin/python\n"
    assert (venv / "share" / "man" / "man1" / "sabia.1").exists()
    done, called = set_up(venv)
    assert done.returncode == 0 and not called and not done.stderr


def test_an_environment_follows_what_it_is_made_from(tmp_path: Path) -> None:
    venv, other = tmp_path / "venv", tmp_path / "other.txt"
    other.write_text("torch==7.8.9\n")
    done, called = set_up(venv, SABIA_TORCH="cpu", SABIA_CONSTRAINTS=other)
    assert done.returncode == 0 and "--no-deps" in called[0] and "--editable" in called[1]
    assert called[0].endswith("whl/cpu torch==7.8.9+cpu") and f"--constraint {other}" in called[1]
    assert not set_up(venv, SABIA_CONSTRAINTS=other)[1]  # it keeps its build of torch
    (venv / "kept").touch()
    done, called = set_up(venv, BROKEN)  # other versions, which cannot be had now
    assert done.returncode == 1 and (venv / "kept").exists()
    assert not set_up(venv, SABIA_CONSTRAINTS=other)[1]
    done, called = set_up(venv)
    assert len(called) == 2 and "whl/cpu" in called[0] and (venv / "kept").exists()
    assert len(set_up(venv, SABIA_CONSTRAINTS=other)[1]) == 2  # not what it was made from any more
    done, called = set_up(venv, SABIA_TORCH="cu130")
    assert called[0].endswith("+cu130") and not (venv / "kept").exists()


def test_what_cannot_be_set_up_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    done, _ = set_up(tmp_path / "mine")
    assert done.returncode == 1 and "has other files in it" in done.stderr
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    done, _ = set_up(tmp_path / "venv", PYTHON="/bin/false")
    assert done.returncode == 1 and "Python 3.11 or newer" in done.stderr
    done, _ = set_up(tmp_path / "venv", SABIA_TORCH="../x")
    assert done.returncode == 1 and "SABIA_TORCH: '../x'" in done.stderr
    assert not (tmp_path / "venv").exists()
