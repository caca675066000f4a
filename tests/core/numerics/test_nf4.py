"""NF4: the published values, bytes of bitsandbytes, and checkpoints in its form."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sabia.core.errors import BadData
from sabia.core.model.storage import hub
from sabia.core.numerics import nf4
from sabia.core.spec import from_config, load_spec, new_config


def digest(array: np.ndarray) -> str:
    return hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()


def matrix() -> np.ndarray:
    weight = (np.random.default_rng(0).standard_normal((48, 161)) * 3).astype(np.float32)
    weight[5, :100] = 0
    return weight


def test_blocks_that_are_almost_zero() -> None:
    """Their reciprocals are no float32."""
    weight = np.float32([[0.0, 1e-40, -1e-40, 1e-41] * 16, [0.0] * 64])
    decoded = nf4.encode(weight).decoded()
    assert (decoded[weight == 0] == 0).all() and np.abs(decoded - weight).max() < 2e-40


def test_values_are_those_of_the_paper() -> None:
    """Appendix E of arXiv 2305.14314: 16 values with an exact zero, seven of them below it."""
    assert nf4.VALUES.dtype == np.float32 and len(nf4.VALUES) == 16
    assert list(nf4.VALUES[[0, 7, 15]]) == [-1, 0, 1] and (np.diff(nf4.VALUES) > 0).all()
    published = (
        "-1.0 -0.6962 -0.5251 -0.3949 -0.2844 -0.1848 -0.0911 0.0 0.0796 0.1609 0.2461 0.3379"
    )
    published += " 0.4407 0.5626 0.7230 1.0"
    np.testing.assert_allclose(nf4.VALUES, [float(x) for x in published.split()], atol=5e-5)


def test_the_dynamic_values_are_those_of_bitsandbytes() -> None:
    """The digest is that of `create_dynamic_map` of bitsandbytes 0.50.2."""
    assert digest(nf4.dynamic_values()) == "c01e8b70d775f98d"


@pytest.mark.parametrize("double", [False, True])
def test_bytes_are_those_of_bitsandbytes(double: bool) -> None:
    """Digests of what `quantize_4bit` of bitsandbytes 0.50.2 gives for the same matrix."""
    stored = nf4.encode(matrix(), double)
    assert digest(stored.packed) == "c8d7dba24d056bd0"
    assert stored.largest.dtype == (np.uint8 if double else np.float32)
    if not double:
        assert digest(stored.largest) == "a5fc14f8a5d5ecc1"
        assert digest(stored.decoded()) == "83b47065e3a998c0"
    else:
        assert stored.nested is not None and stored.nested == pytest.approx([7.6004], abs=1e-4)
        assert stored.offset == pytest.approx(7.6004, abs=1e-4)
        assert digest(stored.decoded()) == "691afb8f3cfbc5d8"
        plain = nf4.encode(matrix()).decoded()
        assert 0 < np.abs(stored.decoded() - plain).max() < 0.03 * np.abs(plain).max()


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


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("shape", [(48, 161), (3, 37), (5, 128), (1, 1)])
def test_values_are_those_that_the_library_decodes(
    kind: str, double: bool, shape: tuple[int, int]
) -> None:
    """To the last bit, of its codes and of ours, in float32 and BF16."""
    library = pytest.importorskip("bitsandbytes.functional")
    torch = pytest.importorskip("torch")
    weight = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    settings: Any = {"blocksize": 64, "quant_type": kind, "compress_statistics": double}
    packed, state = library.quantize_4bit(torch.from_numpy(weight), **settings)
    theirs = {"m" if not name else f"m.{name}": part.numpy()
              for name, part in {"": packed, **state.as_dict(packed=True)}.items()}  # fmt: skip
    cases = [(theirs, packed, state)]
    if kind == "nf4":
        ours = {f"m{k}": x for k, x in nf4.file_tensors(nf4.encode(weight, double)).items()}
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert (ours[name].dtype, ours[name].ndim) == (theirs[name].dtype, theirs[name].ndim)
            if not double and "state" not in name:
                np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
        parts = {k[2:]: torch.from_numpy(np.array(x)) for k, x in ours.items()}
        again = library.QuantState.from_dict({k: x for k, x in parts.items() if k}, "cpu")
        cases.append((ours, parts[""], again))
    for tensors, codes, of_codes in cases:
        stored = nf4.read(tensors, "m")
        assert stored is not None and stored.shape == shape
        for dtype in (torch.float32, torch.bfloat16):
            of_codes.dtype = dtype
            values = torch.from_numpy(stored.decoded()).to(dtype)
            assert torch.equal(values, library.dequantize_4bit(codes, of_codes))


def test_fp4_is_decoded_by_the_values_of_its_file() -> None:
    """The digest is that of what bitsandbytes 0.50.2 decodes of the same codes."""
    small = [0, 0.0625 / 12, 8 / 12, 1, 4 / 12, 6 / 12, 2 / 12, 3 / 12]
    values = np.array([*small, *(-x for x in small)], np.float32)
    flat = np.pad(matrix().reshape(-1), (0, -matrix().size % 64)).reshape(-1, 64)
    largest = np.abs(flat).max(1)
    scaled = flat / np.where(largest > 0, largest, 1)[:, None]
    codes = np.abs(scaled[..., None] - values).argmin(-1).astype(np.uint8).reshape(-1)
    packed = (codes[::2] << 4 | codes[1::2])[: matrix().size // 2]
    parts = nf4.file_tensors(nf4.encode(matrix()))
    state = json.loads(parts.pop(f"{nf4.STATE}nf4").tobytes()) | {"quant_type": "fp4"}
    parts |= {"": packed[:, None], ".quant_map": values, nf4.ABSMAX: largest}
    parts[f"{nf4.STATE}fp4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    read = nf4.read({f"m{k}": x for k, x in parts.items()}, "m")
    assert read is not None and digest(read.decoded()) == "4467462bc4184dcb"


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("shape", [(48, 161), (64, 64), (3, 5), (700, 64), (16, 1024)])
def test_files_have_the_planned_size_and_give_the_values_back(
    shape: tuple[int, int], double: bool
) -> None:
    weight = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    for size in (1, 1e-6, 0):  # of other digits in JSON
        stored = nf4.encode(weight * np.float32(size), double)
        parts = {f"a.weight{k}": x for k, x in nf4.file_tensors(stored).items()}
        assert sum(x.nbytes for x in parts.values()) == nf4.stored_bytes(shape, double)
        assert nf4.matrices(parts) == ["a.weight"]
        words = parts | {"a.weight": stored.packed[: stored.packed.size // 4 * 4].view("f4")}
        if stored.packed.size % 4 == 0:  # as with bnb_4bit_quant_storage
            parts = words
        made = nf4.dequantize(parts | {"b": weight})
        assert [*made] == ["b", "a.weight"]
        np.testing.assert_array_equal(made["a.weight"], stored.decoded())


def test_each_value_becomes_the_nearest_of_its_block() -> None:
    """Beside the definition, value by value; odd sizes leave a half-filled block and byte."""
    weight = np.random.default_rng(1).standard_normal((5, 27)).astype(np.float32)
    stored, flat = nf4.encode(weight), weight.reshape(-1).astype(np.float64)
    assert stored.packed.size == 68 and stored.largest.size == 3
    decoded = stored.decoded().reshape(-1)
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
        plain[name] = nf4.encode(plain[name], double).decoded()
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
    with pytest.raises(BadData, match=r"q_proj.weight.absmax is \w+ \[63\] \(expected 64 values"):
        nf4.dequantize(broken)
    with pytest.raises(BadData, match="8 bits of bitsandbytes"):
        nf4.dequantize({"a.weight.SCB": np.zeros(2)})


SHORT = np.zeros(3, np.float32)


@pytest.mark.parametrize(
    ("part", "array", "message"),
    [
        (nf4.ABSMAX, None, r"tensor m.absmax is missing \(expected by m.quant_state"),
        (".quant_map", None, "tensor m.quant_map is missing"),
        (".nested_absmax", None, "tensor m.nested_absmax is missing"),
        (".nested_quant_map", None, "tensor m.nested_quant_map is missing"),
        ("", None, r"tensor m is missing"),
        (f"{nf4.STATE}nf4", None, r"quant_state\S+ is missing \(expected by m.absmax\)"),
        (f"{nf4.STATE}nf4", b"{", r"m.quant_state\S+ cannot be read"),
        (f"{nf4.STATE}nf4", b"[1]", r"m.quant_state\S+ cannot be read"),
        (f"{nf4.STATE}nf4", b'{"quant_type": "nf4", "blocksize": 0, "shape": [8, 8]}', "cannot be"),
        (f"{nf4.STATE}nf4", b'{"quant_type": "nf4", "blocksize": 64, "shape": 8}', "cannot be"),
        ("", SHORT, r"m is float32 \[3\] \(expected 512 values of uint8 for a matrix \[8, 128"),
        (nf4.ABSMAX, SHORT, r"m.absmax is float32 \[3\] \(expected 16 values of uint8"),
        (".quant_map", SHORT, r"m.quant_map is float32 \[3\]"),
        (".nested_absmax", SHORT, r"m.nested_absmax is float32 \[3\]"),
        (".nested_quant_map", SHORT, r"m.nested_quant_map is float32 \[3\]"),
    ],
)  # fmt: skip
def test_damaged_parts_are_named(part: str, array: Any, message: str) -> None:
    weight = np.random.default_rng(1).standard_normal((8, 128)).astype(np.float32)
    tensors = {f"m{k}": x for k, x in nf4.file_tensors(nf4.encode(weight, double=True)).items()}
    assert nf4.read(tensors, "m") is not None and nf4.read(tensors, "other") is None
    if array is None:
        del tensors[f"m{part}"]
    else:
        tensors[f"m{part}"] = np.frombuffer(array, np.uint8) if isinstance(array, bytes) else array
    with pytest.raises(BadData, match=message):
        nf4.read(tensors, "m")
