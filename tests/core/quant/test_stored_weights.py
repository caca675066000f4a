"""Models that run on their stored weights give what the decoded models give, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sabia.core.errors import BadData  # noqa: E402
from sabia.core.generate.engine import Engine  # noqa: E402
from sabia.core.generate.requests import Request  # noqa: E402
from sabia.core.model.storage import hub  # noqa: E402
from sabia.core.model.storage.safetensors_file import read_tensors, write_tensors  # noqa: E402
from sabia.core.model.storage.stored_weights import load_stored  # noqa: E402
from sabia.core.numerics.schemes import BITSANDBYTES, SCHEMES  # noqa: E402
from sabia.core.numerics.stored import Stored  # noqa: E402
from sabia.core.ops.backend import load_ops  # noqa: E402
from sabia.core.parallel.build_ops import ops_as_served  # noqa: E402
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
