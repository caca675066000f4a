"""Compiled code lies in the user's folder of caches, never beside the installed files."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sabia.kernels.runtime import cache_folder
from sabia.kernels.runtime.cache_folder import name_compilers_folders, writable_cache_folder

KERNELS = Path(cache_folder.__file__).parents[1]


def test_folders_of_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder.cache_folder("calls") == tmp_path / "sabia" / "calls"
    assert not (tmp_path / "sabia").exists()
    assert writable_cache_folder("numba") == tmp_path / "sabia" / "numba"
    assert (tmp_path / "sabia" / "numba").is_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert writable_cache_folder("numba") == tmp_path / "home" / ".cache" / "sabia" / "numba"


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr(cache_folder.tempfile, "tempdir", str(tmp_path))
    own = tmp_path / f"sabia-{os.getuid()}"
    assert writable_cache_folder("numba") == own / "numba"
    assert own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)  # anybody could have put code there
    folder = writable_cache_folder("numba")
    assert folder.parent != own and folder.parent.stat().st_mode & 0o777 == 0o700


def test_variables_that_are_set_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environment = {"TRITON_CACHE_DIR": "/mine"}
    name_compilers_folders(environment)
    assert environment == {
        "TRITON_CACHE_DIR": "/mine",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "sabia" / "inductor"),
        "CUDA_CACHE_PATH": str(tmp_path / "sabia" / "cuda"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "sabia" / "jax"),
    }


@pytest.mark.parametrize("named", [False, True])
def test_numba_writes_nothing_beside_the_source(tmp_path: Path, named: bool) -> None:
    """A module that is imported first, by whomever, compiles into the folder of caches."""
    before = set(KERNELS.rglob("*.nb?"))
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    if named:
        environment["NUMBA_CACHE_DIR"] = str(tmp_path / "named")
    program = (
        "import numba, numpy\n"  # numba first: it reads the environment when it is imported
        "from sabia.kernels.text.utf8_numba import mix\n"
        "print(mix(numpy.uint64(1)))"
    )
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    folder = tmp_path / "named" if named else tmp_path / "cache" / "sabia" / "numba"
    assert [path.name.partition("-")[0] for path in folder.iterdir()] == ["text.utf8_numba.mix"]
    assert set(KERNELS.rglob("*.nb?")) == before


def test_all_kernels_compile_into_that_folder() -> None:
    for path in KERNELS.rglob("*.py"):
        if path.name != "numba_jit.py":
            assert not re.search(r"numba\.\w*jit|from numba import.*jit", path.read_text()), path
