"""Models that run on their stored weights give what the decoded models give, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sabia.core.errors import BadData, UsageError  # noqa: E402
from sabia.core.generate.engine import Engine  # noqa: E402
from sabia.core.generate.requests import Request  # noqa: E402
from sabia.core.model.storage import hub  # noqa: E402
from sabia.core.model.storage.safetensors_file import read_tensors, write_tensors  # noqa: E402
from sabia.core.model.storage.stored_weights import load_stored  # noqa: E402
from sabia.core.numerics.schemes import BITSANDBYTES, SCHEMES  # noqa: E402
from sabia.core.numerics.stored import Stored  # noqa: E402
from sabia.core.parallel import split_model_torch  # noqa: E402
from sabia.core.parallel.build_ops import load_ops, ops_as_served  # noqa: E402
from sabia.core.parallel.mesh import Mesh, shard_slices, weight_split  # noqa: E402
from sabia.core.parallel.world import World  # noqa: E402
from sabia.core.quant import export, recipe  # noqa: E402
from sabia.core.quant.hessians import batches  # noqa: E402
from sabia.core.quant.quantize import quantize  # noqa: E402
from sabia.core.spec import ModelSpec, from_config, new_config  # noqa: E402

OPS = load_ops("torch")
FAMILIES = {
    "llama": new_config("llama", hidden=128, layers=2, heads=4, kv_heads=2, ffn=256, vocab=300),
    "qwen3_moe": new_config("qwen3_moe", hidden=128, layers=2, heads=4, vocab=300, tied=False,
                            experts=4, chosen=2, expert_ffn=128),
    "deepseek_v3": new_config("deepseek_v3", hidden=128, layers=2, heads=4, ffn=128, vocab=300,
                              experts=4, chosen=2, expert_ffn=128, shared=1),
}  # fmt: skip


class NoTokenizer:
    stop_ids = ()

    @staticmethod
    def decode(ids: Any) -> str:
        return str(list(ids))


def quantized(family: str, name: str, out: Path) -> ModelSpec:
    """A random model in a format, in a directory."""
    spec, draw = from_config(FAMILIES[family]), np.random.default_rng(0)
    params = {t.name: (draw.standard_normal(t.shape) * 0.1).astype(np.float32)
              for t in spec.tensors()}  # fmt: skip
    rows = [draw.integers(0, 300, 20).tolist() for _ in range(12)]
    asked = recipe.load_recipe(name)
    if name in BITSANDBYTES and family == "qwen3_moe":  # experts too
        asked = replace(asked, components=dict.fromkeys(("attention", "mlp", "expert"), name))
    made = quantize(spec, params, asked, OPS, batches(rows))
    export.export(out, made, None)
    return spec


CASES = [("llama", name) for name, scheme in SCHEMES.items() if scheme.quantizes]
CASES += [("qwen3_moe", "w4a16"), ("qwen3_moe", "nvfp4"), ("deepseek_v3", "fp8")]
CASES += [("llama", name) for name in BITSANDBYTES] + [("qwen3_moe", "nf4")]


FAST = {("llama", "nvfp4a16"), ("llama", "w4a16-asym"), ("qwen3_moe", "w4a16")}
FAST |= {("llama", "nf4-double"), ("qwen3_moe", "nf4")}


@pytest.mark.parametrize(
    ("family", "name"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES],
)
def test_stored_weights_decode_and_generate_as_before(
    family: str, name: str, tmp_path: Path
) -> None:
    quantized(family, name, tmp_path / "q")
    spec, dense = hub.load_model(tmp_path / "q")
    again, stored = load_stored(tmp_path / "q")
    assert again == spec and [*stored] == [*dense]
    kept = {name for name, value in stored.items() if isinstance(value, Stored)}
    linear = {t.name for t in spec.tensors() if t.linear and t.name.startswith("layers.")}
    assert kept == {n for n in linear if not n.endswith(("kv_up", "router"))}
    for dtype in ("float32", "bfloat16"):
        ours, theirs = OPS.to_device(stored, dtype), OPS.to_device(dense, dtype)
        for n in kept:
            assert torch.equal(ours[n].to(theirs[n].dtype), theirs[n]), n
            assert ours[n].shape == stored[n].shape == theirs[n].shape
            assert ours[n].nbytes < 0.6 * 4 * theirs[n].numel()
    for n in kept:
        assert np.array_equal(stored[n].decoded(), dense[n])  # type: ignore[union-attr]
    ops = ops_as_served("torch", spec)
    requests = [Request([5, 9, n], 6, seed=n, n=2, stop_ids=()) for n in range(3)]
    pair = [Engine(spec, params, NoTokenizer(), ops=ops).generate(requests)
            for params in (stored, dense)]  # fmt: skip
    for ours, theirs in zip(*pair, strict=True):
        assert ours.tokens == theirs.tokens
        np.testing.assert_allclose(ours.raw_logprobs, theirs.raw_logprobs, rtol=0, atol=1e-5)


class Alone:
    """The groups of one process of a mesh whose others do not run."""

    def __init__(self, mesh: Mesh, rank: int, _: object) -> None:
        self.mesh, self.coordinates = mesh, mesh.coordinates(rank)

    def along(self, *_: str) -> None:
        return None


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """(name, mesh) → for each process the parameters that it holds of a quantized model."""
    monkeypatch.setattr(split_model_torch, "Groups", Alone)

    def parts_of(name: str, mesh: Mesh) -> list[dict[str, Any]]:
        spec, stored = load_stored(tmp_path / name)
        splits = [split_model_torch.TorchSplit(spec, mesh, World(rank, mesh.size, rank))
                  for rank in range(mesh.size)]  # fmt: skip
        for split in splits:
            ops_as_served("torch", spec, ops=split.ops)
        return [{n: split.to_mesh(n, stored[n], "float32") for n in stored} for split in splits]

    return parts_of


@pytest.mark.parametrize("name", ["nvfp4", "nf4-double"])
def test_processes_of_a_mesh_keep_their_parts_of_what_is_stored(
    name: str, parts: Any, tmp_path: Path
) -> None:
    spec = quantized("llama", name, tmp_path / name)
    dense = OPS.to_device(hub.load_model(tmp_path / name)[1], "float32")
    whole = OPS.to_device(load_stored(tmp_path / name)[1], "float32")
    mesh = Mesh(tensor=2)
    held = parts(name, mesh)
    for tensor in (t for t in spec.tensors() if t.linear and t.name.startswith("layers.")):
        n, split = tensor.name, weight_split(tensor, mesh)
        assert "tensor" in split
        for rank, params in enumerate(held):
            own = dense[n][shard_slices(tensor.shape, split, mesh, rank)]
            assert torch.equal(params[n].to(torch.float32), own), n
            assert params[n].nbytes < 0.52 * whole[n].nbytes


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("w4a16", r"--mesh: tensor=2: layers.0.attn.o: 128 columns in parts of 64 "
                  r"\(expected multiples of 128, whose codes share a scale or a word\)"),
        ("fp8-block", r"layers.0.attn.o: 64 inputs on a device, rounded in groups of 128"),
    ],
)  # fmt: skip
def test_a_mesh_that_cuts_groups_is_refused(
    name: str, said: str, parts: Any, tmp_path: Path
) -> None:
    quantized("llama", name, tmp_path / name)
    with pytest.raises(UsageError, match=said):
        parts(name, Mesh(tensor=2))


def test_jax_decodes_and_damage_is_named(tmp_path: Path) -> None:
    jax_ops = load_ops("jax")
    quantized("llama", "w4a16", tmp_path / "q")
    _, dense = hub.load_model(tmp_path / "q")
    ours = jax_ops.to_device(load_stored(tmp_path / "q")[1], "float32")
    assert all(np.array_equal(ours[n], np.asarray(dense[n], np.float32)) for n in dense)
    file = tmp_path / "q" / "model.safetensors"
    tensors = {name: np.array(array) for name, array in read_tensors(file).items()}
    module = "model.layers.0.mlp.down_proj"
    tensors[f"{module}.weight_scale"] = tensors[f"{module}.weight_scale"][:, :1]
    write_tensors(file, tensors, {"format": "pt"})
    with pytest.raises(BadData, match=r"layers.0.mlp.down cannot be decoded \(scales"):
        load_stored(tmp_path / "q")
