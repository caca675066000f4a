"""The cache of compiled kernels: filled once for all processes, checked, keyed by its sources."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sabia.kernels.runtime import numba_jit
from sabia.kernels.text import folding

KERNELS = Path(folding.__file__).parents[1]

# compiles two functions of one file, one of which calls the other, and says what was compiled
PROGRAM = """
import os, sys
import numpy as np
from sabia.kernels.runtime import cache_folder
compiled = []
cache_folder.compile_listeners.append(compiled.append)
from sabia.kernels.minhash import numba_impl
from sabia.kernels.minhash.definitions import SketchConfig
text = b"one two three four five six, seven. " * 40
data, offsets = np.frombuffer(text, np.uint8), np.array([0, 700, len(text)])
sketches = numba_impl.sketch(data, offsets, SketchConfig())
starts = np.concatenate(([0], np.cumsum(sketches.counts)))
similar = numba_impl.jaccard(sketches.shingles, starts, np.array([[0, 1]]))
print(len(compiled), int(sketches.digests.sum() % 997), sketches.words.sum(), similar[0])
"""


def run(folder: Path, **environment: str) -> list[str]:
    """The words that PROGRAM prints, with the cache in this folder."""
    settings = os.environ | {"XDG_CACHE_HOME": str(folder)} | environment
    settings.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=settings, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A cache that one process has filled, and what that process printed."""
    folder = tmp_path_factory.mktemp("cache")
    return folder, run(folder)


@pytest.mark.slow
def test_a_second_process_compiles_nothing(filled: tuple[Path, list[str]]) -> None:
    folder, first = filled
    assert int(first[0]) > 10
    assert run(folder) == ["0", *first[1:]]
    files = list((folder / "sabia" / "numba").iterdir())
    assert len(files) == int(first[0]) and all(path.suffix == ".bin" for path in files)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "folder"])
def test_a_damaged_file_is_compiled_again(
    filled: tuple[Path, list[str]], tmp_path: Path, damage: str
) -> None:
    shutil.copytree(filled[0], tmp_path, dirs_exist_ok=True)
    [path] = (tmp_path / "sabia" / "numba").glob("minhash.numba_impl._jaccard-*")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 8
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    if damage != "folder":
        path.write_bytes(content[: {"cut": 5000, "empty": 0}.get(damage)])
    assert run(tmp_path) == ["1", *filled[1][1:]]
    assert run(tmp_path)[0] == ("1" if damage == "folder" else "0")


@pytest.mark.slow
def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    settings = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    settings.pop("NUMBA_CACHE_DIR", None)
    programs = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], env=settings, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    answers = [program.communicate()[0].split() for program in programs]
    assert not any(program.returncode for program in programs)
    assert len({tuple(answer[1:]) for answer in answers}) == 1
    compiled = sum(int(answer[0]) for answer in answers)
    assert compiled == len(list((tmp_path / "sabia" / "numba").glob("*.bin")))


@pytest.mark.slow
def test_killed_while_it_compiles(filled: tuple[Path, list[str]], tmp_path: Path) -> None:
    settings = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    settings.pop("NUMBA_CACHE_DIR", None)
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], env=settings)
    folder = tmp_path / "sabia" / "numba"
    while not list(folder.glob("*.bin")):
        assert program.poll() is None
        time.sleep(0.02)
    program.send_signal(signal.SIGKILL)
    program.wait()
    after = run(tmp_path)
    assert 0 < int(after[0]) < int(filled[1][0]) and after[1:] == filled[1][1:]
    assert run(tmp_path) == ["0", *after[1:]]


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_keeps_nothing(
    filled: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """NUMBA_CACHE_DIR is a file: the kernels compile and work, each time."""
    (tmp_path / "file").write_text("")
    settings = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "file")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=settings, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == filled[1]


def test_the_key_changes_with_what_a_module_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba's own cache does not see that an inlined function of another file has changed."""
    copy = tmp_path / "kernels"
    shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("__pycache__", "tuned"))
    monkeypatch.setattr(numba_jit, "_KERNELS", copy)
    digest = numba_jit.source_digest.__wrapped__
    for changes, kernel, name in (
        (True, "minhash", "text/utf8_numba.py"), (True, "minhash", "minhash/definitions.py"),
        (False, "minhash", "bpe/numba_impl.py"), (True, "html", "html/layout.py"),
    ):  # fmt: skip
        module = f"sabia.kernels.{kernel}.numba_impl"
        before = digest(module)
        assert digest(module) == before
        (copy / name).write_text((copy / name).read_text() + "\n# changed\n")
        assert (digest(module) != before) is changes, name
    monkeypatch.undo()
    assert digest(module) == numba_jit.source_digest(module)


def test_files_that_nobody_loads_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, other = (tmp_path / name for name in ("m.f-1.bin", "m.f-2.bin", "m.g-1.bin"))
    for path in (old, new, other):
        path.write_bytes(b"")
    for path in (old, other):
        os.utime(path, (0, 0))
    numba_jit._remove_unused(tmp_path, "m.f")
    assert sorted(tmp_path.iterdir()) == [new, other]


def test_a_lock_whose_owner_takes_too_long_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba_jit, "WAIT_S", 0.1)
    with numba_jit._locked(tmp_path / "f.bin"):
        start = time.monotonic()
        with numba_jit._locked(tmp_path / "f.bin"):
            assert 0.1 <= time.monotonic() - start < 5
