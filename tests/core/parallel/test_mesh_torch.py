"""Gloo processes on every axis make the run of one: 20 losses and each gradient to 1e-5.

One launch of processes runs all the jobs of its size (tests/support/mesh_torch.py).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from training_cases import ENVIRONMENT
from waiting import HANG_S

pytest.importorskip("torch", reason="the torch backend")
WORKER = Path(__file__).parents[2] / "support" / "mesh_torch.py"
TWO = ("dense:fsdp=2", "dense:tensor=2", "tied:pipe=2", "moe:expert=2", "moe:pipe=2:balance")
TWO += ("hybrid:context=2", "moe:context=2:balance", "sinks:tensor=2")
FOUR = ("dense:fsdp=2,tensor=2", "move:moe:fsdp=2,tensor=2:expert=2,pipe=2")
FOUR += ("packed:hybrid:context=2,tensor=2", "updates:moe:fsdp=2,expert=2")
KINDS = ("dense", "tied", "moe", "hybrid", "latent", "sinks", "normed", "encoder")
KINDS += ("dynamic", "longrope")
AXES = ("data=2", "fsdp=2", "tensor=2", "context=2", "pipe=2")
PAIRS = ("fsdp=2,tensor=2", "context=2,tensor=2", "fsdp=2,context=2", "pipe=2,tensor=2")
CLASSIFIER = ("data=2", "fsdp=2", "tensor=2", "pipe=2")
SETTINGS = (
    *("dense:fsdp=2:remat", "dense:tensor=2:remat", "dense:fsdp=2:matmuls", "hybrid:pipe=2:remat"),
    *("dense:context=2:plain", "hybrid:context=2:plain", "moe:fsdp=2:micro", "dense:pipe=2:micro"),
    *("dynamic:context=2:plain", "longrope:context=2:plain", "longrope:pipe=2:micro"),
    *("latent:tensor=2:lora", "latent:fsdp=2:lora", "dense:pipe=2:lora", "tied:tensor=2:freeze"),
    *("dense:pipe=2:freeze", "latent:expert=2:balance", "dense:fsdp=2:muon", "moe:expert=2:muon"),
    *("moe:fsdp=2:adafactor", "dense:tensor=2:adafactor"),
)
ROUNDED = ("dense:fsdp=2:bf16", "dense:context=2:bf16", "dense:pipe=2:bf16", "dense:tensor=2:bf16",
           "moe:expert=2:fp8", "dense:tensor=2:qat-int8")  # fmt: skip


def report(
    size: int, jobs: tuple[str, ...], folder: Path, worker: tuple[str, ...] = (str(WORKER),)
) -> dict:
    """What the first of `size` processes says of the jobs."""
    words = [str(size), str(folder / "store"), *jobs]
    started = [
        subprocess.Popen(
            [sys.executable, *worker, str(rank), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        for rank in range(size)
    ]
    said = [process.communicate(timeout=HANG_S) for process in started]
    for process, (_, errors) in zip(started, said, strict=True):
        assert process.returncode == 0, errors[-3000:]
    line = next(line for line in said[0][0].splitlines() if line.startswith("REPORT"))
    return json.loads(line.removeprefix("REPORT"))


def check(size: int, jobs: tuple[str, ...], folder: Path, **worker: tuple[str, ...]) -> None:
    for job, found in report(size, jobs, folder, **worker).items():
        if job.startswith("move:"):
            assert found == [True, [1, 1]], job
        elif job.startswith("packed:"):
            assert found[0] == pytest.approx(found[1], rel=1e-6), job
        elif job.startswith("updates:"):
            assert max(found.values()) <= 1e-6, (job, found)
        elif job.startswith("memory:"):
            released, kept = found
            assert released < 0.3 and kept > 0.9, (job, found)
        else:
            loss, gradient, name, learnt, *first = found
            where = dict(zip(("first wrong result", "first wrong gradient"), first, strict=True))
            assert gradient <= 1e-5, (job, where, name, gradient)
            assert loss <= 1e-5, (job, where, loss)
            assert learnt > 0.1, (job, learnt)


def test_two_processes(tmp_path: Path) -> None:
    check(2, TWO, tmp_path)


@pytest.mark.slow
def test_four_processes(tmp_path: Path) -> None:
    """Two axes at once; pieces of one mesh on another; documents over the edges of processes."""
    check(4, FOUR, tmp_path)


@pytest.mark.slow
def test_a_classifier(tmp_path: Path) -> None:
    check(2, tuple(f"classifier:{mesh}" for mesh in CLASSIFIER), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_axis(kind: str, tmp_path: Path) -> None:
    experts = ("expert=2",) if kind in ("moe", "latent", "sinks") else ()
    check(2, tuple(f"{kind}:{mesh}" for mesh in (*AXES, *experts)), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_of_axes(kind: str, tmp_path: Path) -> None:
    pairs = PAIRS
    if kind in ("moe", "latent", "sinks"):
        pairs += ("expert=2,fsdp=2", "expert=2,tensor=2", "expert=2,context=2", "pipe=2,expert=2")
    check(4, tuple(f"{kind}:{mesh}" for mesh in pairs), tmp_path)


@pytest.mark.slow
def test_an_axis_is_added_in_one_line(tmp_path: Path) -> None:
    """A second axis of rows works alone and beside others (tests/support/extra_axis.py)."""
    worker = (str(WORKER.with_name("extra_axis.py")), "torch")
    check(2, ("dense:replica=2", "moe:replica=2:micro"), tmp_path, worker=worker)
    check(4, ("dense:replica=2,tensor=2", "moe:replica=2,fsdp=2"), tmp_path, worker=worker)


@pytest.mark.slow
def test_settings(tmp_path: Path) -> None:
    """Recomputation, micro-batches, adapters, frozen tensors, balance terms, optimizers."""
    check(2, SETTINGS, tmp_path)


@pytest.mark.slow
def test_states_move_between_meshes(tmp_path: Path) -> None:
    moves = (
        *("move:dense:fsdp=2,tensor=2:context=2,pipe=2", "move:tied:pipe=2,tensor=2:fsdp=4"),
        *("move:moe:expert=2,fsdp=2:tensor=2,pipe=2", "move:hybrid:tensor=2,pipe=2:data=2,fsdp=2"),
        *("updates:dense:fsdp=2,tensor=2", "packed:dense:context=4", "memory:fsdp=4"),
    )
    check(4, moves, tmp_path)


@pytest.mark.slow
def test_rounded_products(tmp_path: Path) -> None:
    """Narrow numbers round other sums on a mesh: nearly the losses of one device."""
    for job, (loss, _, _, learnt, *_) in report(2, ROUNDED, tmp_path).items():
        assert 0 < loss <= 0.06, (job, loss)
        assert learnt > 0.5, (job, learnt)
