"""Model directories: bytes kept, bad ones refused, whole or not at all."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sabia.core.errors import BadData, MissingBackend, UsageError
from sabia.core.model.storage import hub
from sabia.core.model.storage.safetensors_file import read_tensors, write_tensors
from sabia.core.parallel import build_ops
from sabia.core.spec import from_config
from sabia.core.spec.tensors import TableRow

from .conftest import CONFIGS, perturbed


def same_bytes(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Equal names, dtypes, shapes and bytes."""
    return a.keys() == b.keys() and all(
        (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
        for x, y in ((np.asarray(a[n]), np.asarray(b[n])) for n in a)
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama3", "float32"),
        ("gemma3", "bfloat16"),
        ("olmo2", "bfloat16"),
        ("minicpm3", "bfloat16"),
        ("qwen3-next", "bfloat16"),
        ("qwen3.5-moe", "bfloat16"),
    ],
)
def test_what_transformers_wrote_comes_back_byte_for_byte(
    name: str, dtype: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the judge here")
    torch = pytest.importorskip("torch", reason="transformers needs torch")
    config = transformers.AutoConfig.for_model(**CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    assert (tmp_path / "theirs" / hub.INDEX).is_file()
    spec, params = hub.load_model(tmp_path / "theirs")
    assert {a.dtype.name for a in params.values()} == {dtype}
    hub.save_model(tmp_path / "ours", spec, params, max_shard_bytes=60_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 3
    theirs, ours = (hub.read_checkpoint(tmp_path / name) for name in ("theirs", "ours"))
    assert same_bytes(theirs, ours)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()) and loaded.dtype == getattr(torch, dtype)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=1))


def test_our_files_are_read_by_the_library_and_its_files_by_us(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = {
        "b": np.arange(7, dtype=np.float32).astype(ml_dtypes.bfloat16),
        "a": np.ones((2, 0, 3), np.float32),
        "e8": np.arange(3, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn),
        "i": np.array(5, np.int64),
        "t": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "flags": np.array([True, False]),
    }
    write_tensors(tmp_path / "ours", tensors, {"format": "pt"})
    assert same_bytes(read_tensors(tmp_path / "ours"), tensors)
    del tensors["e8"]  # the library's NumPy reader knows no fp8
    write_tensors(tmp_path / "ours", tensors, {"format": "pt"})
    assert same_bytes(load_file(tmp_path / "ours"), tensors)
    save_file({n: np.array(a, order="C") for n, a in tensors.items()}, tmp_path / "theirs")
    assert same_bytes(read_tensors(tmp_path / "theirs"), tensors)
    write_tensors(tmp_path / "empty", {})
    assert read_tensors(tmp_path / "empty") == {}


@pytest.mark.parametrize("backend_name", build_ops.BACKENDS)
def test_bfloat16_survives_both_backends(backend_name: str, tiny: Any) -> None:
    pytest.importorskip(backend_name, reason=f"{backend_name} is not installed")
    ops = build_ops.load_ops(backend_name)
    params = {n: a.astype(ml_dtypes.bfloat16) for n, a in tiny[1].items()}
    assert same_bytes(ops.to_numpy(ops.to_device(params)), params)


def test_moving_bytes_needs_neither_torch_nor_jax(tiny: Any, tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    hub.save_model(checkpoint, *tiny)
    code = (
        "import sys; from sabia.core.model.storage import hub; "
        f"spec, params = hub.load_model({str(checkpoint)!r}); "
        f"hub.save_model({str(tmp_path / 'copy')!r}, spec, params); "
        "print({'torch', 'jax', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    copy = hub.read_checkpoint(tmp_path / "copy")
    assert same_bytes(copy, hub.read_checkpoint(checkpoint))


def broken(tmp_path: Path, change: Any) -> Path:
    """A model directory whose tensors went through `change`."""
    spec = from_config(CONFIGS["llama3"])
    tensors = hub.to_hf(spec, perturbed(spec))
    change(tensors)
    hub.write_checkpoint(tmp_path / "model", spec.config, tensors)
    return tmp_path / "model"


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(NORM), f"{NORM} is missing"),
        (lambda t: t.update({NORM: np.ones(5, np.float32)}), f"{NORM} has shape"),
        (lambda t: t.update({"extra": np.ones(5, np.float32)}), "extra is unknown"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    change: Any, named: str, tmp_path: Path
) -> None:
    with pytest.raises(BadData, match=named):
        hub.load_model(broken(tmp_path, change))


def test_stored_tied_heads_and_rotary_buffers_are_no_error(tmp_path: Path) -> None:
    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(10, np.float32)

    spec, params = hub.load_model(broken(tmp_path, add))
    assert set(params) == {t.name for t in spec.tensors()}


@pytest.mark.parametrize("keep", [4, 200, -8])
def test_files_cut_short_are_bad_data(keep: int, tmp_path: Path) -> None:
    model = broken(tmp_path, lambda tensors: None)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(BadData, match="safetensors"):
        hub.load_model(model)


def test_a_missing_shard_and_an_empty_directory_are_told_apart(tmp_path: Path) -> None:
    spec = from_config(CONFIGS["llama3"])
    hub.save_model(tmp_path / "m", spec, perturbed(spec), max_shard_bytes=60_000)
    next((tmp_path / "m").glob("*-00002-*")).unlink()
    with pytest.raises(BadData, match=r"00002-of-\d+.safetensors is missing"):
        hub.load_model(tmp_path / "m")
    (tmp_path / "config.json").write_text(json.dumps(spec.config))
    with pytest.raises(UsageError, match="no safetensors"):
        hub.load_model(tmp_path)


def test_saving_replaces_whole_directories_and_copies_the_tokenizer(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, params = tiny
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    target = tmp_path / "model"
    hub.save_model(target, spec, params, tokenizer_from=tmp_path / "tok")
    assert (target / "tokenizer.json").read_text() == "{}"
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    half = {n: a.astype(ml_dtypes.bfloat16) for n, a in params.items()}
    hub.save_model(target, spec, half)
    assert not (target / "tokenizer.json").exists()
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    monkeypatch.setattr(hub, "write_tensors", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hub.save_model(target, spec, params)
    assert same_bytes(hub.load_model(target)[1], half)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "tok"]
    monkeypatch.undo()
    with pytest.raises(UsageError, match="no tokenizer files"):
        hub.save_model(target, spec, params, tokenizer_from=tmp_path)


def test_parameters_that_do_not_fit_the_spec_are_not_saved(tiny: Any, tmp_path: Path) -> None:
    spec, params = tiny
    with pytest.raises(UsageError, match="final_norm"):
        hub.save_model(tmp_path / "m", spec, {n: a for n, a in params.items() if n != "final_norm"})
    with pytest.raises(UsageError, match="final_norm"):
        hub.save_model(tmp_path / "m", spec, params | {"final_norm": np.ones(3, np.float32)})
    assert not (tmp_path / "m").exists()


def test_unknown_and_absent_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="torch, jax"):
        build_ops.load_ops("numpy")

    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(build_ops, "import_module", absent)
    with pytest.raises(MissingBackend, match="jax"):
        build_ops.load_ops("jax")


def test_stacked_tensors_are_one_file_tensor_a_slice() -> None:
    row = TableRow("experts", (3, 2, 4), ("expert", "mlp", "embed"), "mlp", active_share=(1, 3))
    stacked = row.tensor("layers.0.", ("e.0", "e.1", "e.2"), 0.02, 0)
    spec: Any = SimpleNamespace(tensors=lambda: (stacked,), tied=False, ignored=(), kept=())
    spec.family = "x"
    files = {f"e.{n}": np.full((2, 4), n, np.float32) for n in range(3)}
    params = hub.from_hf(spec, files)
    assert params["layers.0.experts"].shape == (3, 2, 4)
    assert same_bytes(hub.to_hf(spec, params), files)
    with pytest.raises(BadData, match=r"e\.1 is missing"):
        hub.from_hf(spec, {n: a for n, a in files.items() if n != "e.1"})
