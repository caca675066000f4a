"""Eight virtual devices on every axis make the run of one: losses and each gradient to 1e-5."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from training_cases import ENVIRONMENT

pytest.importorskip("jax", reason="the jax backend")
WORKER = Path(__file__).parents[2] / "support" / "mesh_jax.py"
HURRY = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}  # most of the time is compilation
ALL = ("data=2", "fsdp=2", "tensor=2", "context=2", "fsdp=2,tensor=2", "fsdp=2,context=2,tensor=2")
EXPERT = ("expert=2", "fsdp=2,tensor=2,expert=2")


def check(model: str, *meshes: str, worker: tuple[str, ...] = (str(WORKER),)) -> None:
    words = [sys.executable, *worker, model, *meshes]
    done = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT | HURRY)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "nvoluntary full rematerialization" not in done.stderr
    found = json.loads(done.stdout)
    assert found["learnt"] > 0.1 and set(found["meshes"]) == set(meshes)
    for mesh, (loss, gradient, name) in found["meshes"].items():
        assert loss <= 1e-5, (mesh, loss)
        assert gradient <= 1e-5, (mesh, name, gradient)


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        pytest.param("moe", "fsdp=2,tensor=2,expert=2", marks=pytest.mark.slow),
        pytest.param("hybrid", "fsdp=2,context=2,tensor=2", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_of_eight(model: str, mesh: str) -> None:
    check(model, mesh)


@pytest.mark.slow
def test_an_axis_is_added_in_one_line() -> None:
    worker = (str(WORKER.with_name("extra_axis.py")), "jax")
    check("dense", "replica=2", "replica=2,fsdp=2,tensor=2", worker=worker)


@pytest.mark.slow
def test_a_classifier() -> None:
    check("classifier", "data=2", "fsdp=2,tensor=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "dense",
        "tied",
        "moe",
        "hybrid",
        "latent",
        "sinks",
        "normed",
        "encoder",
        "dynamic",
        "longrope",
    ],
)
def test_every_mesh(model: str) -> None:
    check(model, *ALL, *(EXPERT if model in ("moe", "latent", "sinks") else ()))
