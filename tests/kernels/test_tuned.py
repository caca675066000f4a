"""Block sizes that were measured on a device: read by kernel and key; wrong files are refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from sabia.kernels.runtime import tuned

DEFAULT = (128, 64, 8, 2)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    monkeypatch.setattr(tuned, "_device_name", lambda index: "NVIDIA X-1 80GB")
    tuned.blocks_of.cache_clear()
    yield
    tuned.blocks_of.cache_clear()


def on(kind: str) -> SimpleNamespace:
    return SimpleNamespace(device=SimpleNamespace(type=kind, index=0))


def write(folder: Path, table: object) -> None:
    (folder / "nvidia-x-1-80gb.json").write_text(json.dumps(table))


def test_measured_blocks_are_used_on_their_device_only(tmp_path: Path) -> None:
    rows = {"128 bfloat16": {"blocks": [64, 32, 4, 3], "gain": 1.1}}
    write(tmp_path, {"blocks": {"attention.forward": rows}})

    def blocks(kernel: str, key: str, kind: str = "cuda") -> tuple[int, ...]:
        return tuned.tuned_blocks(kernel, key, on(kind), DEFAULT)

    assert blocks("attention.forward", "128 bfloat16") == (64, 32, 4, 3)
    assert blocks("attention.forward", "64 bfloat16") == DEFAULT
    assert blocks("attention.backward", "128 bfloat16") == DEFAULT
    assert blocks("attention.forward", "128 bfloat16", "cpu") == DEFAULT


def test_a_device_without_a_file_keeps_the_defaults() -> None:
    assert tuned.tuned_blocks("x", "y", on("cuda"), DEFAULT) == DEFAULT


@pytest.mark.parametrize("table", [[], {}, {"blocks": {"k": {"y": {}}}}, {"blocks": {"k": 3}}])
def test_a_bad_file_is_named(table: object, tmp_path: Path) -> None:
    write(tmp_path, table)
    with pytest.raises(ValueError, match=r"nvidia-x-1-80gb\.json"):
        tuned.tuned_blocks("k", "y", on("cuda"), DEFAULT)


def test_another_number_of_blocks_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"blocks": {"k": {"y": {"blocks": [1]}}}})
    with pytest.raises(ValueError, match="1 tuned blocks"):
        tuned.tuned_blocks("k", "y", on("cuda"), DEFAULT)
