"""A run that is killed or stopped at any moment ends as one that never was.

CPU, fp32: the final weights are the same bit for bit, the metrics tell one history, and the list of
what was read has each sample once. What batches truly held is recorded apart from that list.
Three sources are mixed by stages, the smallest of them read several times.
"""

import errno
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from training_cases import SHAPE, Commands, difference, losses, make_tokens

STEPS, BATCH, ROWS = 12, 8, 24
LONG = 160
MIX = ("--mix", "web=3,books=2,notes=1",
       "--then", "50%:web=1,notes=2;decay:books=1,notes=1")  # fmt: skip
WORDS = ("--shape", SHAPE, "--batch", BATCH, "--lr", 1e-2, "--peak-flops", "1T", *MIX, "-q")


@pytest.fixture(scope="module")
def sabia(tmp_path_factory) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, sabia: Commands) -> Path:
    """A run that was never interrupted; its folder also holds the token rows."""
    folder = tmp_path_factory.mktemp("whole")
    make_tokens(folder / "tokens", ROWS, ("web", "books", "web", "notes"))
    done = sabia(*words(folder, folder / "run"), reads=folder / "reads")
    assert done.returncode == 0, done.stderr
    samples = listed(sabia, folder, folder / "run")
    notes = [row["row"] for row in samples if row["source"] == "notes"]
    assert len(set(notes)) == ROWS // 4
    assert len(notes) >= 4 * len(set(notes))  # epochs of the smallest source
    return folder


def words(whole: Path, out: Path, *more: object, steps: int = STEPS) -> tuple[object, ...]:
    given = ("--steps", steps, "--save-every", 3 if steps == STEPS else 2)
    return ("pretrain", whole / "tokens", *WORDS, *given, "-o", out, *more)


def weights(run: Path) -> bytes:
    return (run / "final" / "model.safetensors").read_bytes()


def listed(sabia: Commands, whole: Path, out: Path, steps: int = STEPS) -> list[dict]:
    """What the run says it has read."""
    done = sabia(*words(whole, out, "--list-read", "--to", "jsonl", steps=steps))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def read_once(samples: list[dict], steps: int) -> None:
    """Every sample up to the end once, in order, eight a step."""
    assert [row["sample"] for row in samples] == list(range(steps * BATCH))
    assert [row["step"] for row in samples] == [1 + n // BATCH for n in range(steps * BATCH)]
    assert not any(row["left_out"] for row in samples)


def truly_read(reads: Path) -> dict[int, list[str]]:
    """Step → hashes of its rows; a step that was taken again must have read the same."""
    found: dict[int, list[str]] = {}
    for line in reads.read_text().splitlines():
        step, rows = json.loads(line)
        assert found.setdefault(step, rows) == rows
    return found


def in_order(reads: dict[int, list[str]]) -> list[str]:
    return [row for step in sorted(reads) for row in reads[step]]


def hashes(whole: Path, samples: list[dict]) -> list[str]:
    """Of the rows that the list names, from the file: they are numbered source by source."""
    table = pq.read_table(whole / "tokens" / "part-00000.parquet").to_pylist()
    ordered = [row for name in ("web", "books", "notes") for row in table if row["source"] == name]
    for row in samples:
        assert ordered[row["row"]]["source"] == row["source"]
    found = (np.array(ordered[row["row"]]["input_ids"], np.int32) for row in samples)
    return [hashlib.blake2b(row.tobytes()).hexdigest()[:16] for row in found]


def same(whole: Path, out: Path, steps: int = STEPS, run: str = "run") -> None:
    """Nothing shows that the run was interrupted."""
    assert weights(out) == weights(whole / run)
    assert losses(out) == losses(whole / run)
    assert list(losses(out)) == list(range(1, steps + 1))
    strays = [p for p in (out / "checkpoints").iterdir() if p.name.startswith(".")]
    assert not strays


def resumed(whole: Path, out: Path, sabia: Commands, *more: object) -> bytes:
    """The same command again ends as the run that was never interrupted; what it said."""
    done = sabia(*words(whole, out, *more))
    assert done.returncode == 0, done.stderr
    same(whole, out)
    return done.stderr


def stopped_at(step: int, whole: Path, out: Path, sabia: Commands, *more: object) -> Path:
    """A run that was stopped behind a step; its newest checkpoint."""
    done = sabia(*words(whole, out, *more), at=("step", step - 1, "SIGTERM"))
    assert done.returncode == 75, done.stderr
    return out / "checkpoints" / f"step-{step:08d}"


def test_killed_between_steps(whole: Path, tmp_path: Path, sabia: Commands) -> None:
    command, reads = words(whole, tmp_path / "run"), tmp_path / "reads"
    killed = sabia(*command, at=("step", 8, "SIGKILL"), reads=reads)
    assert killed.returncode == -9
    assert not (tmp_path / "run" / "final").exists()
    done = sabia(*command, reads=reads)
    assert done.returncode == 0, done.stderr
    same(whole, tmp_path / "run")
    samples = listed(sabia, whole, tmp_path / "run")
    read_once(samples, STEPS)
    assert samples == listed(sabia, whole, whole / "run")
    assert truly_read(reads) == truly_read(whole / "reads")
    assert in_order(truly_read(reads)) == hashes(whole, samples)


def test_killed_again_and_again_while_writing(whole: Path, tmp_path: Path, sabia: Commands) -> None:
    """Each life is killed a few file operations later than the last, until one gets through."""
    command = words(whole, tmp_path / "run")
    codes = []
    while not codes or codes[-1] == -9:
        done = sabia(*command, at=("file", 2 + 5 * len(codes), "SIGKILL"))
        codes.append(done.returncode)
    assert codes[-1] == 0, done.stderr
    assert len(codes) >= 4
    same(whole, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("event", ["file", "step"])
def test_killed_at_every_moment(whole: Path, tmp_path: Path, event: str, sabia: Commands) -> None:
    """For each n: killed at the n-th occurrence, then resumed and never killed again."""
    for number in range(200):
        out = tmp_path / f"run{number}"
        killed = sabia(*words(whole, out), at=(event, number, "SIGKILL"))
        if killed.returncode == 0:
            break
        assert killed.returncode == -9, killed.stderr
        resumed(whole, out, sabia)
    assert number >= STEPS


@pytest.mark.slow
@pytest.mark.parametrize("url", [False, True])
def test_killed_twenty_times(whole: Path, tmp_path: Path, url: bool, sabia: Commands) -> None:
    """At random moments: of the clock, between steps, and at file operations of saves.

    With a URL, the local directory is lost at every fourth death.
    """
    since = time.monotonic()
    done = sabia(*words(whole, whole / f"long-{url}", steps=LONG), reads=tmp_path / "wanted")
    assert done.returncode == 0, done.stderr
    took = time.monotonic() - since
    out, reads, draw = tmp_path / "run", tmp_path / "reads", random.Random(20 + url)
    more = ("--checkpoint-url", f"file://{tmp_path}/store") if url else ()
    moments = {
        "time": lambda: draw.uniform(0, 0.1 * took),
        "step": lambda: draw.randrange(6),
        "file": lambda: draw.randrange(50),
    }
    deaths = 0
    while deaths < 20:
        event = draw.choice(list(moments))
        at = (event, moments[event](), "SIGKILL")
        killed = sabia(*words(whole, out, *more, steps=LONG), at=at, reads=reads)
        assert killed.returncode == -9, (deaths, at, killed.stderr)
        deaths += 1
        if url and deaths % 4 == 0:
            shutil.rmtree(out)
    done = sabia(*words(whole, out, *more, steps=LONG), reads=reads)
    assert done.returncode == 0, done.stderr
    if url:  # the metrics of what was lost are lost
        assert weights(out) == weights(whole / f"long-{url}")
    else:
        same(whole, out, LONG, f"long-{url}")
    samples = listed(sabia, whole, out, LONG)
    read_once(samples, LONG)
    assert samples == listed(sabia, whole, whole / f"long-{url}", LONG)
    assert truly_read(reads) == truly_read(tmp_path / "wanted")
    assert in_order(truly_read(reads)) == hashes(whole, samples)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_signal_saves_and_exits_75(whole: Path, tmp_path: Path, name: str, sabia: Commands) -> None:
    stopped = sabia(*words(whole, tmp_path / "run"), at=("step", 7, name))
    assert stopped.returncode == 75
    assert b"stopped at step 8 of 12; the state is saved" in stopped.stderr
    assert stopped.stdout == b""
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-00000006",
        "step-00000008",
    ]
    read_once(listed(sabia, whole, tmp_path / "run"), 8)
    resumed(whole, tmp_path / "run", sabia)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    """Change one bit of one byte in the middle."""
    found = bytearray(path.read_bytes())
    found[len(found) // 2] ^= 1
    path.write_bytes(found)


STATE = "state-00000-00000.safetensors"
DAMAGE = [(STATE, flip), (STATE, cut), (STATE, Path.unlink), ("manifest.json", flip),
          ("manifest.json", cut), ("COMMITTED", Path.unlink)]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "harm"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (n > 1)) for n, case in enumerate(DAMAGE)],
)
def test_corrupt_checkpoint(whole: Path, tmp_path: Path, name: str, harm, sabia: Commands) -> None:
    """One warning, and the one before is used."""
    newest = stopped_at(8, whole, tmp_path / "run", sabia)
    harm(newest / name)
    said = resumed(whole, tmp_path / "run", sabia).decode()
    warnings = [line for line in said.splitlines() if "warning" in line]
    assert len(warnings) == 1, said
    assert "warning: checkpoint step-00000008: " in said
    assert "looking for the checkpoint before it" in said
    if name == STATE and harm is not Path.unlink:
        assert f"{name} is corrupt" in said


def test_directory_is_lost(whole: Path, tmp_path: Path, sabia: Commands) -> None:
    """A run goes on from its URL; a corrupt checkpoint there is passed over, too."""
    more = ("--checkpoint-url", f"file://{tmp_path}/store")
    stopped_at(8, whole, tmp_path / "run", sabia, *more)
    shutil.rmtree(tmp_path / "run")
    flip(tmp_path / "store" / "step-00000008" / STATE)
    done = sabia(*words(whole, tmp_path / "run", *more), reads=tmp_path / "reads")
    assert done.returncode == 0, done.stderr
    assert weights(tmp_path / "run") == weights(whole / "run")
    read = list(truly_read(tmp_path / "reads"))  # what was saved during an upload is not there
    assert read == list(range(read[0], STEPS)) and read[0] in (3, 6)
    assert done.stderr.count(b"warning") == 1, done.stderr
    assert listed(sabia, whole, tmp_path / "run") == listed(sabia, whole, whole / "run")


def test_rows_that_were_left_out_stay_so(whole: Path, tmp_path: Path, sabia: Commands) -> None:
    """Checkpoints know them, too, so that a lost directory does not bring them back."""
    ends = []
    for name in ("kept", "lost"):
        out, more = tmp_path / name, ("--checkpoint-url", f"file://{tmp_path}/{name}-store")
        stopped_at(3, whole, out, sabia, *more)
        said = {"row": 20, "name": "notes", "step": 4, "loss": 9.0}
        (out / "skipped.jsonl").write_text(json.dumps(said) + "\n")
        stopped_at(4, whole, out, sabia, *more)
        if name == "lost":
            shutil.rmtree(out)
        done = sabia(*words(whole, out, *more))
        assert done.returncode == 0, done.stderr
        assert json.loads((out / "skipped.jsonl").read_text()) == said
        ends.append((weights(out), listed(sabia, whole, out)))
    assert ends[0] == ends[1]
    assert {row["row"] for row in ends[0][1] if row["left_out"]} == {20}
    assert weights(out) != weights(whole / "run")


def test_url_of_another_run(whole: Path, tmp_path: Path, sabia: Commands) -> None:
    """Its checkpoints are refused as its directory is, and --force starts over."""
    more = ("--checkpoint-url", f"file://{tmp_path}/store")
    stopped_at(8, whole, tmp_path / "other", sabia, *more, "--seed", 1)
    refused = sabia(*words(whole, tmp_path / "run", *more))
    assert refused.returncode == 2, refused.stderr
    assert b"holds another run (seed 1, now 0)" in refused.stderr
    assert refused.stderr.count(b"\n") == 1
    done = sabia(*words(whole, tmp_path / "run", *more, "--force"), reads=tmp_path / "reads")
    assert done.returncode == 0, done.stderr
    same(whole, tmp_path / "run")
    assert list(truly_read(tmp_path / "reads")) == list(range(STEPS))


def test_free_options_may_change(whole: Path, tmp_path: Path, sabia: Commands) -> None:
    stopped_at(5, whole, tmp_path / "run", sabia, "--micro-batch", 3)
    more = ("--remat", "full", "--micro-batch", 1, "--keep-checkpoints", 5, "--log-every", 2)
    again = words(whole, tmp_path / "run", *more, "--save-every", 2)
    stopped = sabia(*again, at=("step", 3, "SIGTERM"))
    assert stopped.returncode == 75
    done = sabia(*words(whole, tmp_path / "run", "--export-dtype", "bfloat16"))
    assert done.returncode == 0, done.stderr
    ours, theirs = losses(tmp_path / "run"), losses(whole / "run")
    assert {5, 6, 8, 12} <= set(ours)
    assert max(abs(ours[step] - theirs[step]) for step in ours) <= 1e-6


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--lr", 2e-2), "lr 0.01, now 0.02"),
        (("--batch", 4), "batch 8, now 4"),
        (("--mix", "web=2,notes=1"), "mix web=3,books=2,notes=1, now web=2,notes=1"),
        (("--seed", 1, "--optimizer", "muon"), "seed 0, now 1; optimizer adamw, now muon"),
        (("--precision", "bf16"), "precision fp32, now bf16"),
    ],
)
def test_other_options_are_refused(whole: Path, more, named: str, sabia: Commands) -> None:
    before = {path: path.stat().st_mtime_ns for path in (whole / "run").rglob("*")}
    refused = sabia(*words(whole, whole / "run", *more))
    assert refused.returncode == 2
    assert f"holds another run ({named})" in refused.stderr.decode()
    assert {path: path.stat().st_mtime_ns for path in (whole / "run").rglob("*")} == before


def test_no_room_for_a_checkpoint(whole: Path, tmp_path: Path, sabia: Commands) -> None:
    """A quota is met in the middle of a save: one line, and the checkpoint before is good."""
    newest = stopped_at(4, whole, tmp_path / "run", sabia)
    limit = (newest / STATE).stat().st_size - 1000
    full = sabia(*words(whole, tmp_path / "run"), limit=limit)
    assert full.returncode == 1, full.stderr
    said = full.stderr.decode()
    assert "checkpoints: File too large (free disk space, then run again)" in said
    assert said.count("\n") == 1, said
    kept = sorted(path.name for path in newest.parent.iterdir())
    assert kept == ["step-00000003", newest.name]
    resumed(whole, tmp_path / "run", sabia)


@pytest.mark.slow
@pytest.mark.parametrize("mishap", ["ENOSPC", "EIO"])
def test_disk_fails_at_every_moment(
    whole: Path, tmp_path: Path, mishap: str, sabia: Commands
) -> None:
    """Each file operation fails in turn, in the background or not: one line, and run again."""
    codes = []
    for number in range(200):
        out = tmp_path / f"run{number}"
        full = sabia(*words(whole, out), at=("file", number, mishap))
        codes.append(full.returncode)
        said = full.stderr.decode()
        assert full.returncode in (0, 1), said
        if full.returncode:
            assert said.count("\n") == 1, said
            assert "sabia pretrain: error: " in said and f" {out}/" in said
            assert os.strerror(getattr(errno, mishap)) in said
        resumed(whole, out, sabia)
        if codes[-4:] == [0] * 4:  # three of the record beside the run, which may fail
            break
    assert codes.count(1) >= STEPS


SETTINGS = {
    **{name: ("--optimizer", name) for name in ("muon", "lion", "adafactor", "soap")},
    **{name: ("--precision", name) for name in ("bf16", "fp8", "qat-int8")},
    "nvfp4": ("--precision", "nvfp4", "--bf16-tail", "--shape", "d=32,layers=4,heads=2"),
    "experts": (
        "--shape",
        "family=deepseek_v3,d=32,layers=2,heads=2,experts=4,chosen=2",
        "--balance",
        0.1,
    ),
    "lora": ("--lora-rank", 4),
    "micro-batch": ("--micro-batch", 3, "--remat", "full", "--z-loss", 1e-3),
    "freeze": ("--freeze", "embed|norm", "--schedule", "cosine", "--then", "50%:notes=1"),
    "mup": ("--mup-base", 16, "--clip-norm", 0, "--shape", f"{SHAPE},tied=false"),
}


@pytest.mark.slow
@pytest.mark.parametrize("more", SETTINGS.values(), ids=SETTINGS)
def test_killed_under_other_settings(whole: Path, tmp_path: Path, more, sabia: Commands) -> None:
    """The state of every optimizer is saved whole, and random numbers are those of the step."""
    done = sabia(*words(whole, tmp_path / "one", *more))
    assert done.returncode == 0, done.stderr
    killed = sabia(*words(whole, tmp_path / "run", *more), at=("step", 8, "SIGKILL"))
    assert killed.returncode == -9, killed.stderr
    done = sabia(*words(whole, tmp_path / "run", *more))
    assert done.returncode == 0, done.stderr
    same(tmp_path, tmp_path / "run", run="one")
    assert weights(tmp_path / "run") != weights(whole / "run") or "--micro-batch" in more


@pytest.mark.slow
def test_signals_at_any_time(whole: Path, tmp_path: Path, sabia: Commands) -> None:
    """From the start to writing the model: 75 and one line, or the end of the run.

    Before the command has begun anything, a signal may just end it.
    """
    since = time.monotonic()
    stopped = sabia(*words(whole, tmp_path / "one"))
    took, draw = time.monotonic() - since, random.Random(1)
    codes = []
    for number in range(16):
        out = tmp_path / f"run{number}"
        stopped = sabia(*words(whole, out), at=("time", draw.uniform(0.05, took), "SIGTERM"))
        codes.append(stopped.returncode)
        expected = (0, 75) if out.exists() else (75, -15)
        assert stopped.returncode in expected, (stopped.returncode, stopped.stderr)
        assert stopped.stderr.count(b"\n") == (stopped.returncode == 75), stopped.stderr
        resumed(whole, out, sabia)
    assert 75 in codes


@pytest.mark.slow  # test_resume_meshes has a fast one
@pytest.mark.parametrize("first", ["jax", "torch"])
def test_other_backend_takes_over(whole: Path, tmp_path: Path, first: str, sabia: Commands) -> None:
    pytest.importorskip("jax", reason="the jax backend")
    command, second = words(whole, tmp_path / "run"), {"torch": "jax", "jax": "torch"}[first]
    stopped = sabia(*command, "--backend", first, at=("step", 5, "SIGTERM"))
    assert stopped.returncode == 75, stopped.stderr
    done = sabia(*command, "--backend", second)
    assert done.returncode == 0, done.stderr
    assert difference(whole / "run", tmp_path / "run") <= 1e-5
    path = next((tmp_path / "run" / "checkpoints").glob("step-00000012"))
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["backend"] == second
    assert manifest["data"]["rows"] == STEPS * BATCH
