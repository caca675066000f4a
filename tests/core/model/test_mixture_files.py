"""Files of mixtures: transformers' bytes come back, and what is not computed is handed on."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from sabia.core.model.storage import hub
from sabia.core.spec import from_config

from .conftest import perturbed
from .mixtures import MIXTURES
from .test_hub import same_bytes


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "deepseek-v3", "gpt-oss"])
def test_what_transformers_wrote_comes_back_byte_for_byte(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the judge here")
    torch = pytest.importorskip("torch", reason="transformers needs torch")
    config = transformers.AutoConfig.for_model(**MIXTURES[name])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    spec, params = hub.load_model(tmp_path / "theirs")
    hub.save_model(tmp_path / "ours", spec, params)
    assert same_bytes(*(hub.read_checkpoint(tmp_path / n) for n in ("theirs", "ours")))
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values())
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=1))


def with_prediction_layer(path: Path, fp8: bool = False) -> dict[str, np.ndarray]:
    """A DeepSeek directory with a multi-token prediction layer; its tensors."""
    config = MIXTURES["deepseek-v3"] | {"num_nextn_predict_layers": 1}
    tensors = hub.to_hf(from_config(config), perturbed(from_config(config)))
    extra = np.random.default_rng(1).standard_normal((6, 4), np.float32)
    tensors["model.layers.2.eh_proj.weight"] = extra.astype(ml_dtypes.bfloat16)
    if fp8:
        config |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}
        tensors["model.layers.2.eh_proj.weight"] = extra.astype(ml_dtypes.float8_e4m3fn)
        tensors["model.layers.2.eh_proj.weight_scale_inv"] = np.full((2, 1), 2, np.float32)
    hub.write_checkpoint(path, config, tensors)
    return tensors


def test_prediction_layers_are_handed_on(tmp_path: Path) -> None:
    tensors = with_prediction_layer(tmp_path / "base")
    spec, params = hub.load_model(tmp_path / "base")
    hub.save_model(tmp_path / "next", spec, params, kept_from=tmp_path / "base")
    assert same_bytes(hub.read_checkpoint(tmp_path / "next"), tensors)
    hub.save_model(tmp_path / "alone", spec, params)
    assert tensors.keys() - hub.read_checkpoint(tmp_path / "alone").keys() == {
        "model.layers.2.eh_proj.weight"
    }


def test_prediction_layers_of_a_quantized_model_are_decoded(tmp_path: Path) -> None:
    tensors = with_prediction_layer(tmp_path / "base", fp8=True)
    spec, params = hub.load_model(tmp_path / "base")
    hub.save_model(tmp_path / "next", spec, params, kept_from=tmp_path / "base")
    found = hub.read_checkpoint(tmp_path / "next")["model.layers.2.eh_proj.weight"]
    codes = tensors["model.layers.2.eh_proj.weight"]
    np.testing.assert_array_equal(found, codes.astype(np.float32) * 2)
    assert "quantization_config" not in json.loads((tmp_path / "next/config.json").read_text())


def test_mxfp4_experts_load_as_their_decoded_matrices(tmp_path: Path) -> None:
    config: dict[str, Any] = MIXTURES["gpt-oss"] | {"hidden_size": 64, "intermediate_size": 32}
    spec = from_config(config)
    tensors = hub.to_hf(spec, perturbed(spec))
    random = np.random.default_rng(2)
    for name in [n for n in tensors if n.endswith(("_up_proj", "down_proj"))]:
        experts, inner, out = tensors.pop(name).shape
        blocks = random.integers(0, 256, (experts, out, inner // 32, 16), np.uint8)
        tensors[name + "_blocks"] = blocks
        tensors[name + "_scales"] = np.full(blocks.shape[:3], 125, np.uint8)
    hub.write_checkpoint(
        tmp_path, config | {"quantization_config": {"quant_method": "mxfp4"}}, tensors
    )
    _, params = hub.load_model(tmp_path)
    codes = tensors["model.layers.1.mlp.experts.gate_up_proj_blocks"][3, 7, 1, 2]  # row 7: up 3
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) / 4
    wanted = [values[code % 8] * (-1 if code > 7 else 1) for code in (codes % 16, codes // 16)]
    found = params["layers.1.mlp.experts.up"][3, 3, 36:38]  # column 32 + 2·2
    np.testing.assert_array_equal(found.astype(np.float32), wanted)
