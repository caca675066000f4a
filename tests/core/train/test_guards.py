"""Guards: what a spike is, which rows stand out, and that a poisoned shard leaves no trace."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from training_cases import LENGTH, Commands, make_tokens

from sabia.core.shards.order import DataOrder
from sabia.core.train.guards import NO_LIMITS, GuardConfig, SpikeGuard, outliers

WORDS = ("--shape", "d=32,layers=1,heads=2", "--steps", 120, "--batch", 8, "--lr", 1e-2, "-q")


def guard(steps: int, action: str = "rewind") -> SpikeGuard:
    found = SpikeGuard(GuardConfig(action, 8.0, 64, 32, 8.0, 8, 0.1))
    noise = np.random.default_rng(0).normal(0, 0.05, steps)
    for step in range(steps):
        found.accept(3.0 + noise[step], 1.0 + noise[step])
    return found


def test_limits_come_from_the_last_steps() -> None:
    assert guard(31).limits() == NO_LIMITS
    loss, norm = guard(200).limits()
    assert 3.3 < loss < 3.7 and 75 < norm < 85
    assert guard(200, action="off").limits() == NO_LIMITS
    bad = guard(128)
    for _ in range(20):  # bad steps that were taken do not widen the limits much
        bad.accept(50.0, 9.0)
    assert bad.limits()[0] < 4.2


def test_a_resumed_guard_decides_alike() -> None:
    one, other = guard(150), guard(0)
    other.load(json.loads(json.dumps(one.state())))
    assert one.limits() == other.limits()
    other.reset()
    assert other.limits() == NO_LIMITS


def test_outliers_by_source() -> None:
    losses = np.array([1.0, 1.1, 0.9, 1.05, 5.0, 8.0, 8.2, 7.9, 8.1, np.nan, np.inf])
    groups = np.array([0] * 5 + [1] * 4 + [0, 1])
    found = outliers(losses, groups, 8.0)
    assert np.flatnonzero(found).tolist() == [4, 10]
    assert not outliers(np.ones(3), np.zeros(3), 8.0).any()


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """Runs the command in forked children."""
    found = Commands(tmp_path_factory.mktemp("commands"))
    yield found
    found.close()


def with_noise(folder: Path, samples: list[int], poisoned: bool) -> Path:
    """960 rows of text but for those of the given samples: noise, or rows without a target."""
    tokens = make_tokens(folder, rows=960)
    path = tokens / "part-00000.parquet"
    table = pq.read_table(path)
    bad = set(DataOrder((960,)).rows(0, 960)[samples].tolist())
    draw = np.random.default_rng(1)
    rows = table.to_pylist()
    for number, row in enumerate(rows):
        row["id"] = f"{'bad' if number in bad else 'good'}-{number}"
        row["source"] = "web"
        row["loss_mask"] = [True] * LENGTH
        if number in bad:
            row["input_ids"] = draw.integers(0, 256, LENGTH).tolist()
            row["loss_mask"] = [poisoned] * LENGTH
    metadata = table.schema.metadata
    pq.write_table(pa.Table.from_pylist(rows).replace_schema_metadata(metadata), path)
    return tokens


def final(run: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(run / "final" / "model.safetensors")


SCATTERED = [700, 701, 703, 722, 727]  # of steps 88 and 91
TOGETHER = list(range(696, 712))  # all of steps 88 and 89


@pytest.mark.parametrize("samples", [SCATTERED, TOGETHER])
def test_poisoned_rows_leave_no_trace(
    commands: Commands, tmp_path: Path, samples: list[int]
) -> None:
    """They are named and left out, and the run ends as one that never saw them."""
    runs = {}
    for name, poisoned in (("poisoned", True), ("clean", False)):
        tokens = with_noise(tmp_path / name, samples, poisoned)
        out = tmp_path / f"{name}-run"
        done = commands("pretrain", tokens, *WORDS, "--save-every", 20, "-o", out)
        assert done.returncode == 0, done.stderr
        runs[name] = (out, done.stderr.decode())
    lines = (runs["poisoned"][0] / "skipped.jsonl").read_text().splitlines()
    left_out = [json.loads(line)["name"].rpartition(":")[2] for line in lines]
    bad = DataOrder((960,)).rows(0, 960)[samples].tolist()
    assert sorted(left_out) == sorted(f"bad-{number}" for number in bad)
    assert "part-00000.parquet:bad-" in runs["poisoned"][1]
    assert not (runs["clean"][0] / "skipped.jsonl").exists()
    one, other = (final(run) for run, _ in runs.values())
    assert max(np.abs(one[k] - other[k]).max() for k in one) == 0
    listed = commands(
        "pretrain", tmp_path / "poisoned", *WORDS, "--list-read", "-o", runs["poisoned"][0]
    )
    assert listed.returncode == 0, listed.stderr
    table = pq.read_table(io.BytesIO(listed.stdout))
    assert table.filter(table["left_out"])["sample"].to_pylist() == samples
    assert sorted(table["row"].to_pylist()) == list(range(960))


def test_a_spike_stops_the_run_where_that_is_asked_for(commands: Commands, tmp_path: Path) -> None:
    tokens = with_noise(tmp_path / "tokens", TOGETHER, True)
    done = commands("pretrain", tokens, *WORDS, "--on-spike", "stop", "-o", tmp_path / "run")
    assert done.returncode == 1
    assert b"step 88: loss" in done.stderr and b"parquet:bad-" in done.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--max-rewinds", 0), b"after 0 rewinds"),
        pytest.param(("--max-skipped", "1%"), b"left out by now", marks=pytest.mark.slow),
    ],
)
def test_a_run_fails_at_its_limits(
    commands: Commands, tmp_path: Path, option: tuple, message: bytes
) -> None:
    tokens = with_noise(tmp_path / "tokens", TOGETHER, True)
    words = ("pretrain", tokens, *WORDS, "--save-every", 20, *option, "-o", tmp_path / "run")
    done = commands(*words)
    assert done.returncode == 1
    assert message in done.stderr and b"parquet:bad-" in done.stderr
