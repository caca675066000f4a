"""Where the cache of compiled kernels is empty, references compute until it is filled."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sabia.core.shards.arrow_arrays import text_buffers
from sabia.kernels.compile import EXAMPLES, main
from sabia.kernels.language.definitions import Table
from sabia.kernels.language.interface import score
from sabia.kernels.minhash.definitions import SketchConfig
from sabia.kernels.minhash.interface import jaccard, signatures, sketch
from sabia.kernels.quality.interface import measure
from sabia.kernels.runtime import first_runs
from sabia.kernels.runtime.cache_folder import FUNCTIONS
from sabia.kernels.runtime.dispatch import AUTO
from sabia.kernels.text.words import word_hash
from tests.support.fuzzed_texts import fuzz

DATA, OFFSETS = text_buffers(pa.array(["", *fuzz(3000, seed=9), "", "a b c " * 40_000, "x"]))


def calls(engine: str) -> list[Any]:
    """Results of each kernel that has a plain form, on the same documents."""
    stops = np.array([word_hash("the"), word_hash("of")], np.uint64), np.array([0, 1, 2])
    which = np.arange(len(OFFSETS) - 1) % 3 - 1
    table = Table(np.arange(0, 1 << 32, 999_331).astype(np.uint32), np.ones((4298, 5), np.int8),
                  np.arange(4298, dtype=np.uint64) % 32, np.ones(128, np.uint8))  # fmt: skip
    sketches = sketch(DATA, OFFSETS, SketchConfig(), engine)
    starts = np.concatenate(([0], np.cumsum(sketches.counts)))
    pairs = np.random.default_rng(0).integers(0, len(OFFSETS) - 1, (9000, 2))
    pairs = pairs[(sketches.counts[pairs] < 1000).all(axis=1)]
    return [
        *sketches,
        signatures(DATA, OFFSETS, SketchConfig(), engine),
        jaccard(sketches.shingles, starts, pairs, engine),
        *score(DATA, OFFSETS, table, engine),
        *measure(DATA, OFFSETS, stops, which, engine).values(),
    ]


def assert_same(expected: list[Any], actual: list[Any]) -> None:
    for one, other in zip(expected, actual, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_array_equal(one, other)


class PlainTurns(first_runs.FirstRun):
    """The cache lacks the kernel at every call but each third."""

    turns = 0

    def compiled(self, name: str, size: int, function: Any) -> Any:
        self.turns += 1
        if self.turns % 3:
            raise first_runs.NotCompiled(self.kernel)
        return function()


@pytest.fixture
def fresh() -> Iterator[None]:
    first_runs.first_run.cache_clear()
    yield
    first_runs.first_run.cache_clear()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("turns", ["plain", "mixed", "compiled"])
def test_the_bits_do_not_depend_on_who_computes(
    turns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = calls("numba")
    monkeypatch.setattr(first_runs, "_compiler_of", lambda kernel: None)
    if turns == "mixed":  # the rest of a call is computed by compiled code
        monkeypatch.setattr(first_runs, "FirstRun", PlainTurns)
    elif turns == "plain":
        monkeypatch.setattr(first_runs.FirstRun, "compiled", raise_not_compiled)
    assert_same(expected, calls(AUTO))
    for kernel in first_runs.SWITCHING:
        assert (first_runs.first_run(kernel).plain_s > 0) is (turns != "compiled")


def raise_not_compiled(run: first_runs.FirstRun, _name: str, _size: int, _function: Any) -> None:
    raise first_runs.NotCompiled(run.kernel)


@pytest.mark.usefixtures("fresh")
def test_a_call_with_many_documents_compiles_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The compiled functions of this process stand for those that it would compile."""
    compiled = sketch(DATA, OFFSETS, SketchConfig(), "numba")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(first_runs, "PLAIN_S", 1e9)
    for share, wanted in ((1e-9, "compiled"), (1e9, "plain")):
        first_runs.first_run.cache_clear()
        monkeypatch.setattr(first_runs, "FUNCTION_S", share)
        assert_same([*compiled], [*sketch(DATA, OFFSETS, SketchConfig(), AUTO)])
        state = first_runs.first_run("minhash")
        once = state.plain_s
        assert once > 0  # the first chunks, from which the speed is known
        sketch(DATA, OFFSETS, SketchConfig(), AUTO)
        assert (state.plain_s > once) is (wanted == "plain")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("share", [1e-9, 1e9])
def test_what_is_expected_decides_before_it_is_computed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, share: float
) -> None:
    """Small calls of a large input compile; those of a small input never start a compiler."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(first_runs, "PLAIN_S", 0.0)
    monkeypatch.setattr(first_runs, "FUNCTION_S", share)
    monkeypatch.setattr(first_runs, "_compiler_of", lambda kernel: pytest.fail(kernel))
    monkeypatch.setattr(first_runs, "_expected", 1 << 40)
    few = OFFSETS[:9]
    plain = [*sketch(DATA, few, SketchConfig(), "reference")]
    state = first_runs.first_run("minhash")
    for _ in range(4):
        assert_same(plain, [*sketch(DATA, few, SketchConfig(), AUTO)])
    assert state.plain_bytes == (few[-1] - few[0]) * (2 if share < 1 else 4)


COMMAND = """
import sys, time
from sabia.kernels.runtime import cache_folder, first_runs
names, first_runs.FUNCTION_S = [], 1e9  # no call is large
cache_folder.compile_listeners.append(names.append)
cache_folder.choice_listeners.append(lambda sentence: print("note:", sentence))
from tests.kernels.test_first_runs import DATA, OFFSETS
from sabia.kernels.minhash.definitions import SketchConfig
from sabia.kernels.minhash.interface import sketch
seconds = float(sys.argv[1])
end = time.monotonic() + seconds
while True:
    sketches = sketch(DATA, OFFSETS, SketchConfig(), "auto")
    run = first_runs.first_run("minhash")
    done = run._compiler is not None and run._compiler.poll() is not None
    if done or (time.monotonic() > end and (run._compiler or not seconds)):
        break
before = run.plain_s
sketch(DATA, OFFSETS, SketchConfig(), "auto")
print("plain" if run.plain_s > before else "compiled", len(names), int(sketches.exact.sum() % 997))
print("compiler", run._compiler.pid if run._compiler else 0)
"""


def run_command(seconds: float, **environment: str) -> list[str]:
    settings = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | environment
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(seconds)],
        env=settings, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.mark.slow
def test_another_process_compiles_meanwhile(tmp_path: Path) -> None:
    first = run_command(100, XDG_CACHE_HOME=str(tmp_path))
    assert "NumPy computes" in first[0] and first[1].startswith("compiled 0 ")
    second = run_command(0, XDG_CACHE_HOME=str(tmp_path))
    assert second == [first[1], "compiler 0"]  # no note


@pytest.mark.slow
def test_a_short_run_starts_no_process(tmp_path: Path) -> None:
    settings = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    texts = pa.table({"id": ["a", "b"], "text": ["some words of a text", "others"]})
    pq.write_table(texts, tmp_path / "in.parquet")
    for command in ("dedup", "classify"):
        words = [
            sys.executable,
            "-m",
            "sabia.cli.sabia",
            command,
            "in.parquet",
            "-o",
            "out.parquet",
        ]
        done = subprocess.run([*words, "--force"], env=settings, cwd=tmp_path, capture_output=True,
                              text=True, check=True)  # fmt: skip
        assert done.stderr.count("NumPy computes") == 1
        assert not list((tmp_path / "sabia").rglob("*.bin"))


@pytest.mark.slow
def test_the_compiling_process_ends_with_the_run(tmp_path: Path) -> None:
    lines = run_command(0.1, XDG_CACHE_HOME=str(tmp_path))
    pid = int(lines[-1].split()[1])
    assert pid
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            break  # nobody reaps it in this container
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """The caller compiles itself, when the other process has ended."""
    (tmp_path / "file").write_text("")
    lines = run_command(100, NUMBA_CACHE_DIR=str(tmp_path / "file"))
    assert lines[1].startswith("compiled ") and int(lines[1].split()[1]) > 10


@pytest.mark.slow
def test_the_command_fills_the_cache(tmp_path: Path) -> None:
    """As many functions as FUNCTIONS says, and those that a second call and the kernels need."""
    settings = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    settings |= {"XDG_CACHE_HOME": str(tmp_path)}
    for kernels in (["minhash"], ["language", "word_spans"]):
        words = [sys.executable, "-m", "sabia.kernels.compile", "--jobs", "1", *kernels]
        done = subprocess.run(words, env=settings, capture_output=True, text=True, check=True)
        fresh = done.stderr.split()[1]
        assert int(fresh) <= sum(FUNCTIONS[kernel] for kernel in kernels)
        if kernels == ["minhash"]:
            assert int(fresh) == FUNCTIONS["minhash"]
        again = subprocess.run(words, env=settings, capture_output=True, text=True, check=True)
        assert "all were compiled before" in again.stderr
    assert run_command(0, XDG_CACHE_HOME=str(tmp_path))[0].startswith("compiled 0 ")


def test_the_command_names_its_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(EXAMPLES) == set(FUNCTIONS)
    with pytest.raises(SystemExit):
        main(["minhahs"])
    assert "'minhahs' (expected quality, bpe," in capsys.readouterr().err
