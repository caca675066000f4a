"""`sabia quantize` killed at any time goes on after its last finished layer, to the same bytes."""

import errno
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import stage
from waiting import until

from sabia.core.errors import BadData

pytest.importorskip("torch")
LAYERS = 4


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sabia.core.model.storage import hub
    from sabia.core.spec import from_config, new_config
    from sabia.core.text.tokenize.tokenizer_training import train_bpe

    root = tmp_path_factory.mktemp("m")
    tokenizer = train_bpe(["dois mais três são cinco"] * 4, 300)
    tokenizer.save(root / "t")
    config = new_config(hidden=64, layers=LAYERS, heads=4, vocab=tokenizer.vocab_size, tied=False)
    spec = from_config(config)
    hub.save_model(root / "m", spec, hub.init_params(spec, 0), tokenizer_from=root / "t")
    lines = [json.dumps({"text": "dois mais três são " * (3 + i)}) for i in range(12)]
    (root / "docs.jsonl").write_text("\n".join(lines) + "\n")
    make(root, root / "whole")
    return root


def make(root: Path, out: Path, **settings: Any) -> None:
    given = {"recipe": "w4", "model": root / "m"} | settings
    inputs = (str(root / "docs.jsonl"),)
    stage("quantize", inputs=inputs, out=out, to="jsonl", json=True, **given)


def started(root: Path, out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "sabia.cli.main", "quantize", root / "docs.jsonl", "--model",
               root / "m", "-o", out, "--recipe", "w4", "--json"]  # fmt: skip
    return subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def finished(out: Path) -> int:
    return len(list(layers(out).glob("layer-*.json")))


def layers(out: Path) -> Path:
    return out.with_name(f"{out.name}.layers")


def content(folder: Path) -> dict[str, bytes]:
    names = ("model.safetensors", "config.json", "tokenizer.json")
    return {name: (folder / name).read_bytes() for name in names}


def killed_after(root: Path, out: Path, count: int, draw: random.Random) -> None:
    """Kill a run once `count` layers are finished, or at its end if that comes first."""
    process = started(root, out)
    until(lambda: finished(out) >= count or process.poll() is not None)
    if draw.random() < 0.5:  # while the next layer is computed or written
        until(lambda: bool(list(layers(out).glob(f"*{count:05d}*")) or process.poll() == 0))
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_at_the_layer(world: Path, tmp_path: Path, seed: int) -> None:
    draw, out = random.Random(seed), tmp_path / "q"
    for count in range(1, LAYERS + 1) if seed else (3,):
        killed_after(world, out, count, draw)
        if out.exists():  # it was so fast that only the end was left
            break
        assert finished(out) >= count
    kept, complete = finished(out), (out / "quantization.json").exists()
    last = started(world, out)
    _, text = last.communicate()
    assert last.returncode == 0 and content(out) == content(world / "whole")
    expected = "already made" if complete else f"{kept} of {LAYERS + 1} parts are finished"
    assert expected.encode() in text
    ours, theirs = (
        json.loads((p / "quantization.json").read_text()) for p in (out, world / "whole")
    )
    for name in ("layers", "divergence", "loaders", "size_after_bytes"):
        assert ours[name] == theirs[name]
    assert not layers(out).exists()


def interrupted(
    world: Path, out: Path, monkeypatch: pytest.MonkeyPatch, after: int, **settings: Any
) -> None:
    """A run in this process that ends like a killed one after some layers."""
    from sabia.core.quant import directory

    class Killed(BaseException):
        pass

    keep = directory._keep

    def kept(work: Any, part: Any, done: Any) -> None:
        keep(work, part, done)
        if len(done.records) == after:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(directory, "_keep", kept)
        make(world, out, **settings)
    assert finished(out) == after


@pytest.mark.parametrize("name", [
    "layer-00002.safetensors", "states-00002.safetensors",
    pytest.param("layer-00000.safetensors", marks=pytest.mark.slow),
    pytest.param("layer-00001.json", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_flipped_byte_in_a_finished_layer_is_found(
    world: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    out = tmp_path / "q"
    interrupted(world, out, monkeypatch, 3)
    path = layers(out) / name
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(data)
    make(world, out)
    assert "is damaged" in capsys.readouterr().err
    assert content(out) == content(world / "whole")


@pytest.mark.parametrize("after", [1, LAYERS, LAYERS + 1])
def test_finished_layers_are_not_made_again(
    world: Path, tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sabia.core.quant.quantize import Rounding

    out, made = tmp_path / "q", list[Any]()
    interrupted(world, out, monkeypatch, after)
    part = Rounding.part
    monkeypatch.setattr(Rounding, "part", lambda self, n: made.append(n) or part(self, n))
    make(world, out)
    assert made == [*range(LAYERS), None][after:]
    assert content(out) == content(world / "whole")


@pytest.mark.parametrize("recipe", ["nf4", "nf4-double"])
def test_nf4_goes_on_at_the_layer(
    world: Path, tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    make(world, tmp_path / "whole", recipe=recipe)
    interrupted(world, tmp_path / "q", monkeypatch, 2, recipe=recipe)
    capsys.readouterr()
    make(world, tmp_path / "q", recipe=recipe)
    assert f"2 of {LAYERS + 1} parts are finished" in capsys.readouterr().err
    assert content(tmp_path / "q") == content(tmp_path / "whole")
    card = (tmp_path / "q" / "README.md").read_text()
    assert "files as bitsandbytes" in card and f"| {recipe} | rtn |" in card


def test_layers_of_another_run_are_made_again(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "q"
    interrupted(world, out, monkeypatch, 3)
    make(world, out, recipe="w8")
    assert "of another run" in capsys.readouterr().err
    assert not layers(out).exists()
    assert {
        row["bits"] for row in json.loads((out / "quantization.json").read_text())["layers"]
    } == {8}


def test_a_broken_model_leaves_nothing(world: Path, tmp_path: Path) -> None:
    from sabia.core.model.storage import hub

    spec, params = hub.load_model(world / "m")
    name = "layers.3.mlp.down"
    broken = {n: np.array(a, np.float32) for n, a in params.items()}
    broken[name][3, 4] = np.nan
    hub.save_model(tmp_path / "m", spec, broken, tokenizer_from=world / "m")
    with pytest.raises(BadData, match=rf"{name} has 1 NaN"):
        make(world, tmp_path / "q", model=tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BadData, match="cut short"):
        make(world, tmp_path / "q", model=tmp_path / "m")
    tensors = hub.to_hf(spec, params)
    tensors.pop("model.layers.3.mlp.down_proj.weight")
    shutil.rmtree(tmp_path / "m")
    hub.write_checkpoint(tmp_path / "m", spec.config, tensors, tokenizer_from=world / "m")
    with pytest.raises(BadData, match=r"down_proj\.weight is missing"):
        make(world, tmp_path / "q", model=tmp_path / "m")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


@pytest.mark.slow
def test_twenty_kills(world: Path, tmp_path: Path) -> None:
    """At random moments of runs that begin anew: same bytes, and finished layers are kept."""
    draw, out, kills, kept = random.Random(2), tmp_path / "q", 0, 0
    whole = started(world, tmp_path / "timed")
    begin = time.monotonic()
    whole.communicate()
    length = time.monotonic() - begin
    while kills < 20:
        process = started(world, out)
        time.sleep(draw.uniform(0.2, 1) * length)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate()
        if (out / "quantization.json").exists():  # complete: the next begins from nothing
            assert content(out) == content(world / "whole")
            shutil.rmtree(out)
            shutil.rmtree(layers(out), ignore_errors=True)
            kept = 0
        else:
            assert finished(out) >= kept
            kept = finished(out)
    last = started(world, out)
    last.communicate()
    assert last.returncode == 0 and content(out) == content(world / "whole")
    assert not layers(out).exists()


def test_a_full_disk_leaves_nothing(world: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from sabia.core.quant import finished as module

    written = module.write_tensors

    def full(path: Path, tensors: Any) -> None:
        if len(list(layers(tmp_path / "q").glob("layer-*.json"))) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        written(path, tensors)

    monkeypatch.setattr(module, "write_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        make(world, tmp_path / "q")
    assert not list(tmp_path.iterdir())
