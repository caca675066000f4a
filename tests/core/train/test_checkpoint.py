"""Checkpoints: what is written is read, what is damaged is passed over, what is old goes."""

import json
from pathlib import Path

import numpy as np
import pytest

from sabia.core.errors import BadData
from sabia.core.train import checkpoint

STATE = {
    "param/a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "m/a": np.full((3, 4), 0.5, np.float32),
    "count": np.array(7, np.int64),
}


def save(place: Path, step: int) -> Path:
    return checkpoint.save(place, step, STATE, {"rng": {"seed": 3}, "data": {"rows": step * 8}})


def test_round_trip(tmp_path: Path) -> None:
    save(tmp_path, 5)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 5
    assert found.manifest["data"] == {"rows": 40}
    state = checkpoint.load(found)
    assert set(state) == set(STATE)
    for name, array in STATE.items():
        assert state[name].dtype == array.dtype
        assert np.array_equal(state[name], array)


def test_many_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 50)
    path = save(tmp_path, 1)
    assert len(list(path.glob("*.safetensors"))) == 3
    found = checkpoint.latest(tmp_path)
    assert np.array_equal(checkpoint.load(found)["m/a"], STATE["m/a"])


def test_pieces_written_by_a_mesh_are_put_together(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = save(tmp_path, 2)
    whole = STATE["param/a"]
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["tensors"] = {"param/a": {"dtype": "float32", "shape": [3, 4], "pieces": []}}
    for number, rows in enumerate((slice(0, 2), slice(2, 3))):
        name = f"state-{number:05d}-of-mesh.safetensors"
        save_file({"param/a": np.ascontiguousarray(whole[rows])}, path / name)
        piece = {"file": name, "offset": [rows.start, 0], "shape": list(whole[rows].shape)}
        manifest["tensors"]["param/a"]["pieces"].append(piece)
    state = checkpoint.load(checkpoint.Checkpoint(path, manifest))
    assert np.array_equal(state["param/a"], whole)


def damage(path: Path, how: str) -> None:
    """Spoil a checkpoint as disks and kills do."""
    file = path / "state-00000.safetensors"
    if how == "flipped bit":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif how == "cut short":
        file.write_bytes(file.read_bytes()[:-4])
    elif how == "no file":
        file.unlink()
    elif how == "no commit mark":
        (path / "COMMITTED").unlink()
    elif how == "edited manifest":
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text.replace('"step": 2', '"step": 9'))
    elif how == "empty manifest":
        (path / "manifest.json").write_text("")


@pytest.mark.parametrize(
    "how",
    ["flipped bit", "cut short", "no file", "no commit mark", "edited manifest", "empty manifest"],
)
def test_damaged_one_is_passed_over(tmp_path: Path, how: str, capfd) -> None:
    save(tmp_path, 1)
    damage(save(tmp_path, 2), how)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert "step-00000002" in capfd.readouterr().err


def test_none_left(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    damage(save(tmp_path, 1), "cut short")
    assert checkpoint.latest(tmp_path) is None


def test_format_of_a_later_version_is_not_guessed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    path = save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(BadData, match="format 2"):
        checkpoint.verify(path)


def test_retention_and_sweep(tmp_path: Path) -> None:
    for step in (10, 20, 30, 100):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, 2)
    assert [p.name for p in checkpoint.committed(tmp_path)] == ["step-00000100", "step-00000030"]
    (tmp_path / ".step-00000200.99999999.tmp").mkdir()
    checkpoint.sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000030", "step-00000100"]


def test_saving_again_replaces(tmp_path: Path) -> None:
    save(tmp_path, 1)
    checkpoint.save(tmp_path, 1, {"param/a": np.zeros(2, np.float32)}, {})
    assert list(checkpoint.load(checkpoint.latest(tmp_path))) == ["param/a"]


def test_failed_save_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path, 2, STATE, {"not": object()})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
