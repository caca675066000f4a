"""NF4: the published values, bytes of bitsandbytes, and checkpoints in its form."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sabia.core.errors import BadData, UsageError
from sabia.core.model.storage import hub
from sabia.core.numerics import nf4
from sabia.core.spec import from_config, load_spec, new_config


def digest(array: np.ndarray) -> str:
    return hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()


def matrix() -> np.ndarray:
    weight = (np.random.default_rng(0).standard_normal((48, 161)) * 3).astype(np.float32)
    weight[5, :100] = 0
    return weight


def test_values_are_those_of_the_paper() -> None:
    """Appendix E of arXiv 2305.14314: 16 values with an exact zero, seven of them below it."""
    assert nf4.VALUES.dtype == np.float32 and len(nf4.VALUES) == 16
    assert list(nf4.VALUES[[0, 7, 15]]) == [-1, 0, 1] and (np.diff(nf4.VALUES) > 0).all()
    published = (
        "-1.0 -0.6962 -0.5251 -0.3949 -0.2844 -0.1848 -0.0911 0.0 0.0796 0.1609 0.2461 0.3379"
    )
    published += " 0.4407 0.5626 0.7230 1.0"
    np.testing.assert_allclose(nf4.VALUES, [float(x) for x in published.split()], atol=5e-5)


@pytest.mark.parametrize("double", [False, True])
def test_bytes_are_those_of_bitsandbytes(double: bool) -> None:
    """Digests of what `quantize_4bit` of bitsandbytes 0.50.2 gives for the same matrix."""
    stored = nf4.encode(matrix(), double)
    assert digest(stored.packed) == "c8d7dba24d056bd0"
    assert stored.largest.dtype == (np.uint8 if double else np.float32)
    if not double:
        assert digest(stored.largest) == "a5fc14f8a5d5ecc1"
        assert digest(nf4.decode(stored)) == "83b47065e3a998c0"
    else:
        assert stored.nested is not None and stored.nested == pytest.approx([7.6004], abs=1e-4)
        assert stored.offset == pytest.approx(7.6004, abs=1e-4)
        plain = nf4.decode(nf4.encode(matrix()))
        assert 0 < np.abs(nf4.decode(stored) - plain).max() < 0.03 * np.abs(plain).max()


@pytest.mark.parametrize("double", [False, True])
def test_bytes_beside_the_library(double: bool) -> None:
    library = pytest.importorskip("bitsandbytes.functional")
    torch = pytest.importorskip("torch")
    weight = np.random.default_rng(3).standard_normal((7, 130)).astype(np.float32)
    packed, state = library.quantize_4bit(
        torch.from_numpy(weight), blocksize=64, quant_type="nf4", compress_statistics=double
    )
    ours = nf4.encode(weight, double)
    np.testing.assert_array_equal(ours.packed, packed.numpy().reshape(-1))
    off = ours.largest.astype(np.float32) - state.absmax.numpy()
    assert np.abs(off).max() <= double and (off != 0).sum() <= 1


def test_each_value_becomes_the_nearest_of_its_block() -> None:
    """Beside the definition, value by value; odd sizes leave a half-filled block and byte."""
    weight = np.random.default_rng(1).standard_normal((5, 27)).astype(np.float32)
    stored, flat = nf4.encode(weight), weight.reshape(-1).astype(np.float64)
    assert stored.packed.size == 68 and stored.largest.size == 3
    decoded = nf4.decode(stored).reshape(-1)
    for start in range(0, flat.size, 64):
        block = flat[start : start + 64]
        peak = np.abs(block).max()
        distance = np.abs(block[:, None] / peak - nf4.VALUES.astype(np.float64))
        expected = nf4.VALUES[distance.argmin(1)] * np.float32(peak)
        np.testing.assert_array_equal(decoded[start : start + 64], expected)


def checkpoint(weight: np.ndarray, name: str, double: bool) -> dict[str, np.ndarray]:
    """A matrix as bitsandbytes writes it."""
    stored = nf4.encode(weight, double)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16",
                             "shape": list(weight.shape)}  # fmt: skip
    parts = {"": stored.packed[:, None], ".absmax": stored.largest, ".quant_map": nf4.VALUES}
    if stored.nested is not None:
        state |= {"nested_blocksize": 256, "nested_offset": float(stored.offset)}
        parts |= {".nested_absmax": stored.nested, ".nested_quant_map": nf4.dynamic_values()}
    parts[f"{nf4.STATE}nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return {name + suffix: array for suffix, array in parts.items()}


@pytest.mark.parametrize("double", [False, True])
def test_a_model_in_nf4_is_read(double: bool, tmp_path: Path) -> None:
    from sabia.core.model.storage.safetensors_file import read_tensors, write_tensors

    spec = from_config(new_config(hidden=64, layers=2, heads=4, vocab=100, tied=False))
    hub.save_model(tmp_path, spec, hub.init_params(spec, 0))
    tensors = {
        k: np.array(x, np.float32) for k, x in read_tensors(tmp_path / "model.safetensors").items()
    }
    plain = dict(tensors)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        tensors |= checkpoint(tensors[name], name, double)
        plain[name] = nf4.decode(nf4.encode(plain[name], double))
    write_tensors(tmp_path / "model.safetensors", tensors)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, params = hub.load_model(tmp_path)
    expected = hub.from_hf(load_spec(tmp_path), plain)
    assert params.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(np.asarray(params[name], np.float32), array, err_msg=name)
    key = "model.layers.0.self_attn.q_proj.weight"
    broken = {k: x[:-1] if k == f"{key}.absmax" else x for k, x in tensors.items()}
    with pytest.raises(BadData, match=r"q_proj.weight: cannot be decoded as NF4"):
        nf4.dequantize(broken)
    with pytest.raises(BadData, match="8 bits or FP4 of bitsandbytes"):
        nf4.dequantize({"a.weight.SCB": np.zeros(2)})


def test_nf4_is_no_recipe() -> None:
    from sabia.core.quant.recipe import load_recipe

    with pytest.raises(UsageError, match="--recipe: 'nf4'"):
        load_recipe("nf4")
