"""Checkpoints: what is written is read, what is damaged is passed over, what is old goes."""

import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from sabia.core.errors import BadData, Failed, UsageError
from sabia.core.model.storage.lazy_array import LazyArray
from sabia.core.train.checkpoint import local, pieces
from sabia.core.train.checkpoint.pieces import Piece, blocks
from sabia.core.train.checkpoint.pieces import whole_pieces as whole
from sabia.core.train.checkpoint.reader import Reader, latest
from sabia.core.train.checkpoint.saver import Saver

STATE = {
    "param/a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "param/narrow": np.arange(5).astype(ml_dtypes.bfloat16),
    "m/a": np.full((3, 4), 0.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "count": np.array(7, np.int64),
}
META = {"rng": {"seed": 3}}


def save(place: Path, step: int, state=STATE, **settings) -> Path:
    with Saver(place, **settings) as saver:
        saver.save(step, whole(state), META | {"data": {"rows": step * 8}})
    return local.path_of(place, step)


def same(state: dict[str, np.ndarray], found: Reader) -> None:
    assert set(found) == set(state)
    for name, array in state.items():
        read = found.read(name)
        assert (read.dtype, read.shape) == (array.dtype, array.shape)
        assert read.tobytes() == array.tobytes()


def test_round_trip(tmp_path: Path) -> None:
    save(tmp_path, 5)
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 5
    assert found.manifest["data"] == {"rows": 40}
    same(STATE, Reader(found))
    assert float(Reader(found)["count"]) == 7
    assert np.array_equal(np.asarray(Reader(found)["param/a"]), STATE["param/a"])


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    """The library that defines the format reads them."""
    (file,) = save(tmp_path, 1).glob("*.safetensors")
    found = load_file(file)
    assert set(found) == set(STATE)
    assert all(found[name].tobytes() == array.tobytes() for name, array in STATE.items())


def test_many_files(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pieces, "FILE_BYTES", 50)
    assert len(list(save(tmp_path, 1).glob("*.safetensors"))) == 4
    same(STATE, Reader(latest(tmp_path)))


def test_blocks_are_small_and_in_order() -> None:
    array = np.arange(1000, dtype=np.int32).reshape(100, 10)
    asked = []

    def fetch(start: int, stop: int) -> np.ndarray:
        asked.append((start, stop))
        return array[start:stop]

    found = list(blocks(LazyArray((100, 10), array.dtype, fetch), limit=1200))
    assert asked == [(0, 30), (30, 60), (60, 90), (90, 100)]
    assert b"".join(found) == array.tobytes()
    assert b"".join(blocks(array.T, limit=500)) == array.T.tobytes()


def test_rows_of_lazy_arrays() -> None:
    array = np.arange(24).reshape(2, 3, 4)
    lazy = LazyArray(array.shape, array.dtype, lambda a, b: array[a:b])
    rows = list(lazy)
    assert [np.asarray(r).tolist() for r in rows] == array.tolist()
    assert np.array_equal(rows[1].fetch(1, 3), array[1, 1:3])
    assert [float(v) for v in rows[0].row(0)] == [0, 1, 2, 3]


def cuts(array: np.ndarray, parts: tuple[int, int]) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Boxes of a matrix over a mesh of rows x columns, uneven where it does not divide."""
    row = 0
    for block in np.array_split(array, parts[0]):
        column = 0
        for box in np.array_split(block, parts[1], axis=1):
            yield (row, column), box
            column += box.shape[1]
        row += len(block)


@pytest.mark.parametrize("wrote", [(1, 1), (4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("reads", [(1, 1), (3, 1), (1, 4), (3, 2)])
def test_any_mesh_reads_what_any_mesh_wrote(tmp_path: Path, wrote, reads) -> None:
    array = np.random.default_rng(0).normal(size=(7, 9)).astype(np.float32)
    pieces = [Piece("w", box, at, array.shape) for at, box in cuts(array, wrote)]
    with Saver(tmp_path) as saver:
        saver.save(1, pieces, {})
    reader = Reader(latest(tmp_path))
    for at, box in cuts(array, reads):
        before = reader.bytes_read
        assert np.array_equal(reader.read("w", at, box.shape), box)
        assert reader.bytes_read - before == box.nbytes


def test_boxes_of_more_axes(tmp_path: Path) -> None:
    array = np.arange(2 * 3 * 4 * 5, dtype=np.int64).reshape(2, 3, 4, 5)
    halves = [Piece("x", array[:, :, :2], (0, 0, 0, 0), array.shape)]
    halves += [Piece("x", array[:, :, 2:], (0, 0, 2, 0), array.shape)]
    with Saver(tmp_path) as saver:
        saver.save(1, halves, {})
    reader = Reader(latest(tmp_path))
    draw = np.random.default_rng(1)
    for _ in range(50):
        begin = [int(draw.integers(0, n)) for n in array.shape]
        end = [int(draw.integers(b + 1, n + 1)) for b, n in zip(begin, array.shape, strict=True)]
        box = array[tuple(slice(b, e) for b, e in zip(begin, end, strict=True))]
        assert np.array_equal(reader.read("x", begin, box.shape), box)


def test_boxes_outside_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    reader = Reader(latest(tmp_path))
    with pytest.raises(BadData, match="outside"):
        reader.read("param/a", (2, 0), (2, 4))
    with pytest.raises(BadData, match="no tensor nothing"):
        reader.read("nothing")
    with pytest.raises(UsageError, match="piece of x"):
        Piece("x", np.zeros((2, 2)), (3, 0), (4, 2))


def test_pieces_that_do_not_make_up_the_tensor_are_not_committed(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="hold 2 of 4"), Saver(tmp_path) as saver:
        saver.save(1, [Piece("x", np.zeros(2), (0,), (4,))], {})
    assert not list(tmp_path.iterdir())


def damage(path: Path, how: str) -> None:
    """Spoil a checkpoint as disks and kills do."""
    file = path / "state-00000-00000.safetensors"
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


DAMAGES = ["flipped bit", "cut short", "no file", "no commit mark", "edited manifest",
           "empty manifest"]  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_one_is_passed_over(tmp_path: Path, how: str, capfd) -> None:
    save(tmp_path, 1)
    damage(save(tmp_path, 2), how)
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 1
    warnings = capfd.readouterr().err
    assert "step-00000002" in warnings
    assert warnings.count("warning:") == 1


def test_none_good_is_not_the_same_as_none(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    damage(save(tmp_path, 1), "cut short")
    with pytest.raises(BadData, match=r"none of 1 checkpoints is valid.*--force"):
        latest(tmp_path)


def test_reader_checks_what_was_not_checked(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    damage(path, "flipped bit")
    with pytest.raises(BadData, match="corrupt"):
        Reader(local.open_checkpoint(path)).read("param/a")


def test_format_of_a_later_version_is_not_guessed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(local, "FORMAT", 3)
    path = save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(BadData, match="format 3"):
        local.verify(path)


@pytest.mark.parametrize(
    ("steps", "current", "keep", "every", "left"),
    [
        ([10, 20, 30, 100], 100, 2, 0, [30, 100]),
        ([10, 20, 30, 100], 100, 0, 0, [100]),
        ([10, 20, 30, 40, 50], 50, 1, 20, [20, 40, 50]),
        ([10, 20, 30, 40], 20, 2, 0, [10, 20]),  # the run went back to 20: 30 and 40 are void
        ([10], 10, 5, 0, [10]),
    ],
)
def test_retention(steps, current, keep, every, left) -> None:
    gone = local.steps_to_delete(steps, current, keep, every)
    assert sorted(set(steps) - set(gone)) == left


def test_retention_and_sweep_on_disk(tmp_path: Path) -> None:
    for step in (10, 20, 30, 100):
        save(tmp_path, step, keep=2, keep_every=20)
    assert local.steps(tmp_path) == [100, 30, 20]
    (tmp_path / ".step-00000200.saving").mkdir()
    local.remove_leftovers(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_saving_again_replaces(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 1, {"param/a": np.zeros(2, np.float32)})
    assert list(Reader(latest(tmp_path))) == ["param/a"]
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_failed_save_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(TypeError), Saver(tmp_path) as saver:
        saver.save(2, whole(STATE), {"not": object()})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_manifest_says_where_every_byte_is(tmp_path: Path) -> None:
    manifest = json.loads((save(tmp_path, 4) / "manifest.json").read_text())
    assert manifest["rng"] == {"seed": 3}
    (name,) = manifest["files"]
    assert manifest["files"][name]["size"] == (tmp_path / "step-00000004" / name).stat().st_size
    piece = {"file": name, "key": "param/a", "offset": [0, 0], "shape": [3, 4]}
    assert manifest["tensors"]["param/a"] == {
        "dtype": "float32", "shape": [3, 4], "pieces": [piece]}  # fmt: skip
