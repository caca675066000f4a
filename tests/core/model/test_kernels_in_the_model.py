"""Whole models by the kernels of sabia.kernels give the loss and gradients that they give without.

Kernels run interpreted, in processes of their own (tests/support/model_kernels.py): SABIA_KERNELS
and the interpreters' switches are read while modules are imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sabia.core.errors import MissingBackend, UsageError
from sabia.core.ops import kernel_choice
from sabia.core.ops.kernel_choice import requested_kernels
from sabia.core.parallel import build_ops
from sabia.core.spec import ModelSpec, from_config

from .conftest import CONFIGS

WORKER = Path(__file__).parents[2] / "support" / "model_kernels.py"
TOLERANCE = 1e-4
HURRY = "--xla_backend_optimization_level=0"
OWN = {
    "torch": {"SABIA_KERNELS": "triton", "TRITON_INTERPRET": "1"},
    "jax": {"SABIA_KERNELS": "pallas", "PALLAS_INTERPRET": "1"},
}
MESH = "sinks@context=2,tensor=2,expert=2"


def found(folder: Path, backend: str, models: tuple[str, ...], **requested: str) -> dict:
    environment = {
        k: v for k, v in os.environ.items() if not k.endswith(("_KERNELS", "_INTERPRET"))
    }
    environment |= {"OMP_NUM_THREADS": "1", "XLA_FLAGS": HURRY} | requested
    file = folder / f"{'_'.join(requested.values()) or 'auto'}.npz"
    words = [sys.executable, str(WORKER), backend, str(file), *models]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(np.load(file))


def agree(folder: Path, backend: str, *models: str, **requested: str) -> None:
    without, by_kernels = (found(folder, backend, models, **more) for more in ({}, requested))
    assert set(without) == set(by_kernels)
    for name, array in without.items():
        gap = np.linalg.norm(array - by_kernels[name]) / (np.linalg.norm(array) or 1.0)
        assert gap <= TOLERANCE, name
    assert any((without[name] != by_kernels[name]).any() for name in without)  # something else ran


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_the_reference_of_every_kernel(backend: str, tmp_path: Path) -> None:
    pytest.importorskip(backend)
    agree(tmp_path, backend, "sinks", SABIA_KERNELS="reference")


@pytest.mark.slow
def test_attention_by_shard_map_on_eight_devices(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    agree(tmp_path, "jax", MESH, SABIA_KERNELS="reference")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["capped", "sinks", "latent"])
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_our_own_kernels_interpreted(backend: str, model: str, tmp_path: Path) -> None:
    pytest.importorskip(backend)
    agree(tmp_path, backend, model, **OWN[backend])


@pytest.mark.slow
def test_our_own_kernels_on_eight_devices(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    agree(tmp_path, "jax", MESH, **OWN["jax"])


@pytest.mark.parametrize(
    ("backend", "text", "said"),
    [
        ("torch", "fast", "'fast' .expected one of auto, reference"),
        ("jax", "triton", "'triton' with jax"),
        ("torch", "pallas", "'pallas' with torch"),
        ("torch", "attention=pallas", "attention=pallas with torch"),
        ("jax", "rms_norm=pallas", "rms_norm=pallas with jax"),
        ("jax", "rope=library", "rope=library with jax"),
    ],
)
def test_what_there_is_not_is_refused(
    backend: str, text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernel_choice.VARIABLE, text)
    with pytest.raises(UsageError, match=said):
        requested_kernels(backend)


def test_names_go_to_the_operations_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel_choice.VARIABLE, "library")
    assert requested_kernels("torch") == {
        "attention": "library",
        "grouped_matmul": "library",
        "rms_norm": "library",
        "vocabulary_loss": None,
    }
    monkeypatch.setenv(kernel_choice.VARIABLE, "attention=pallas, grouped_matmul=auto")
    requested = requested_kernels("jax")
    assert requested["attention"] == "pallas" and requested["grouped_matmul"] is None


def described(backend: str, spec: ModelSpec) -> str:
    return build_ops.describe(spec, backend, "float32", 64, packed=True)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_run_says_what_computes_or_why_it_cannot(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(backend)
    spec = from_config(CONFIGS["gpt-oss"])
    for name in ("SABIA_KERNELS", "TRITON_INTERPRET", "PALLAS_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    text = described(backend, spec)
    assert text.startswith("kernels on cpu: attention by ") and "vocabulary_loss by eager" in text
    monkeypatch.setenv("SABIA_KERNELS", "grouped_matmul=reference,vocabulary_loss=reference")
    told = described(backend, spec)
    assert "grouped_matmul by reference" in told and "vocabulary_loss by reference" in told
    monkeypatch.setenv("SABIA_KERNELS", OWN[backend]["SABIA_KERNELS"])
    with pytest.raises(MissingBackend, match=r"cannot serve: .*; use SABIA_KERNELS=auto"):
        described(backend, spec)
    monkeypatch.setenv("SABIA_KERNELS", "library")
    without = {"torch": "grouped_mm takes bfloat16", "jax": "cap or sinks"}[backend]
    with pytest.raises(MissingBackend, match=without):
        described(backend, spec)
