"""`sabia sft merge`: models by hand, tensor by tensor, and the checkpoints of a run."""

import json
from pathlib import Path

import numpy as np
import pytest
from in_process import sabia
from safetensors.numpy import load_file

from sabia.core.model.storage import hub
from sabia.core.spec import from_config, new_config


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base and three models near it."""
    folder = tmp_path_factory.mktemp("models")
    spec = from_config(new_config(hidden=16, layers=2, heads=2, vocab=31))
    base = {k: np.array(v) for k, v in hub.init_params(spec, 0).items()}
    for number in range(4):
        rng = np.random.default_rng(number)
        params = {
            k: v + (0.1 * rng.standard_normal(v.shape) if number else 0) for k, v in base.items()
        }
        params = {k: v.astype(np.float32) for k, v in params.items()}
        hub.save_model(folder / f"{number}", spec, params)
    return [folder / f"{number}" for number in range(4)]


def tensors(path: Path) -> dict[str, np.ndarray]:
    return load_file(path / "model.safetensors")


def merged(out: Path, *words: object) -> dict[str, np.ndarray]:
    done = sabia("sft", "merge", *words, "-o", out)
    assert done.exit_code == 0, done.output
    return tensors(out)


def test_linear_with_weights_by_pattern(models: list[Path], tmp_path: Path) -> None:
    words = (*models[1:3], "--weights", "1,3", "--for", r"mlp\.=0,2")
    found, (a, b) = merged(tmp_path / "out", *words), map(tensors, models[1:3])
    for name, tensor in found.items():
        w = (0.0, 1.0) if "mlp." in name else (0.25, 0.75)
        assert np.allclose(tensor, w[0] * a[name] + w[1] * b[name], atol=1e-6), name
        assert tensor.dtype == a[name].dtype
    assert any("mlp." in name for name in found)


def test_slerp(models: list[Path], tmp_path: Path) -> None:
    found = merged(tmp_path / "out", *models[1:3], "--method", "slerp", "--weights", "0.3,0.7")
    a, b = map(tensors, models[1:3])
    for name, tensor in found.items():
        x, y = a[name].ravel().astype(float), b[name].ravel().astype(float)
        angle = np.arccos(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
        wanted = (np.sin(0.3 * angle) * x + np.sin(0.7 * angle) * y) / np.sin(angle)
        assert np.allclose(tensor.ravel(), wanted, atol=2e-6), name


def test_ties(models: list[Path], tmp_path: Path) -> None:
    words = (*models[1:], "--method", "ties", "--base", models[0], "--density", "40%",
             "--scale", "0.8", "--weights", "1,1,2")  # fmt: skip
    found, base = merged(tmp_path / "out", *words), tensors(models[0])
    others, shares = [tensors(path) for path in models[1:]], (0.25, 0.25, 0.5)
    for name, tensor in found.items():
        vectors = []
        for other in others:
            v = other[name].ravel() - base[name].ravel()
            kept = np.argsort(-np.abs(v), kind="stable")[: max(1, round(0.4 * v.size))]
            vectors.append(np.where(np.isin(np.arange(v.size), kept), v, 0))
        for index in range(tensor.size):
            values = [(w, v[index]) for w, v in zip(shares, vectors, strict=True)]
            sign = np.sign(sum(w * v for w, v in values))
            same = [(w, v) for w, v in values if np.sign(v) == sign and sign]
            mean = sum(w * v for w, v in same) / sum(w for w, _ in same) if same else 0.0
            wanted = base[name].ravel()[index] + 0.8 * mean
            assert tensor.ravel()[index] == pytest.approx(wanted, abs=1e-6), name
            if index > 200:
                break


def test_what_does_not_fit_is_refused(models: list[Path], tmp_path: Path) -> None:
    spec = from_config(new_config(hidden=16, layers=1, heads=2, vocab=31))
    hub.save_model(tmp_path / "small", spec, hub.init_params(spec, 0))
    for words, message in (
        ((models[1],), "expected two or more"),
        ((models[1], tmp_path / "small"), "is not of the shape of"),
        ((*models[1:], "--method", "slerp"), "slerp of 3 models"),
        ((*models[1:3], "--weights", "1"), "expected 2 numbers"),
        ((*models[1:3], "--for", "absent=1,1"), "matches no tensor"),
        ((*models[1:3], "--method", "ties"), "--base: is missing"),
        ((*models[1:3], "--density", "0.3"), "--density: only with"),
    ):
        done = sabia("sft", "merge", *words, "-o", tmp_path / "out")
        assert done.exit_code == 2 and message in done.output, done.output
    assert not (tmp_path / "out").exists()


def test_checkpoints_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from training_cases import make_tokens

    words = ("pretrain", make_tokens(tmp_path / "tokens"), "--shape", "d=16,layers=1,heads=2",
             "--steps", "4", "--save-every", "1", "--keep-checkpoints", "3", "-q",
             "--export-dtype", "float32", "-o", tmp_path / "run")  # fmt: skip
    done = sabia(*words)
    assert done.exit_code == 0, done.output
    from sabia.core.train.checkpoint import local
    from sabia.core.train.checkpoint.reader import Reader

    folder = tmp_path / "run" / "checkpoints"
    readers = [Reader(local.verify(local.path_of(folder, step))) for step in (2, 3, 4)]
    found = merged(tmp_path / "out", tmp_path / "run", "--checkpoints", "3")
    wanted = np.mean([np.asarray(reader["param/embed"]) for reader in readers], 0)
    assert np.allclose(found["model.embed_tokens.weight"], wanted, atol=1e-6)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_size"] == 16
    done = sabia("sft", "merge", tmp_path / "run", "--checkpoints", "9", "-o", tmp_path / "no")
    assert done.exit_code == 2 and "has 3" in done.output
