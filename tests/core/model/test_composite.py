"""Language models inside models with sight: read, computed, and handed on with all their parts."""

from pathlib import Path

import numpy as np
import pytest

from sabia.core.errors import BadData, UsageError
from sabia.core.model.storage import hub
from sabia.core.spec import from_config, load_spec

from .conftest import CONFIGS, perturbed
from .test_hub import same_bytes
from .test_transformers import relative, scores

VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
QWEN = {
    "model_type": "qwen3_5_moe",
    "text_config": CONFIGS["qwen3.5-moe"],
    "vision_config": VISION | {"out_hidden_size": 72, "num_position_embeddings": 16},
    "image_token_id": 290,
    "tie_word_embeddings": False,
}
GEMMA = {
    "model_type": "gemma3",
    "text_config": CONFIGS["gemma3"],
    "vision_config": {"hidden_size": 16},
    "mm_tokens_per_image": 4,
}


def directory(path: Path, stacked: bool) -> Path:
    """A Qwen3.5 with experts one by one or stacked, a tensor of sight and one of prediction."""
    spec = from_config(QWEN)
    arrays = hub.to_hf(spec, perturbed(spec))
    if stacked:
        for layer in range(len(spec.layers)):
            prefix = f"model.language_model.layers.{layer}.mlp.experts."
            one = {
                name: np.stack([arrays.pop(f"{prefix}{n}.{name}_proj.weight") for n in range(5)])
                for name in ("gate", "up", "down")
            }
            arrays[prefix + "gate_up_proj"] = np.concatenate((one["gate"], one["up"]), 1)
            arrays[prefix + "down_proj"] = one["down"]
    arrays["mtp.fc.weight"] = np.ones((3, 2), np.float32)
    arrays["model.visual.pos_embed.weight"] = np.ones((2, 2), np.float32)
    hub.write_checkpoint(path, QWEN, arrays)
    return path


@pytest.mark.parametrize("stacked", [False, True])
def test_both_layouts_of_experts_give_the_model_and_come_back(
    stacked: bool, tmp_path: Path
) -> None:
    model = directory(tmp_path / "model", stacked)
    spec, params = hub.load_model(model)
    right = perturbed(from_config(QWEN))
    assert same_bytes(params, right)
    kept = hub.unused_tensors(spec, model)
    assert set(kept) == {"mtp.fc.weight", "model.visual.pos_embed.weight"}
    assert same_bytes(hub.to_hf(spec, params) | kept, hub.read_checkpoint(model))


def test_the_judge_computes_the_same_from_the_whole_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the judge here")
    torch = pytest.importorskip("torch", reason="transformers needs torch")
    from sabia.core.parallel.build_ops import load_ops

    from .test_transformers import IDS

    model = directory(tmp_path / "model", stacked=True)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"]
    with torch.no_grad():
        logits = theirs(torch.from_numpy(IDS), use_cache=False).logits.numpy()
    spec, params = hub.load_model(model)
    ops = load_ops("torch")
    ours = scores(spec, ops.to_device(params, "float32"), ops)
    assert relative(ours, logits) <= 2e-6


def test_gemma_s_language_model_has_its_own_prefix() -> None:
    names = [str(t.hf) for t in from_config(GEMMA).tensors()]
    assert all(name.startswith("language_model.model.") for name in names)
    assert from_config(GEMMA).tied and len(names) == len(set(names))
    with pytest.raises(UsageError, match="novelty"):
        from_config(GEMMA | {"novelty": 3})
    with pytest.raises(UsageError, match="text_config"):
        from_config({"model_type": "gemma3"})


@pytest.mark.parametrize("size", [8, 1 << 62])
def test_a_list_of_tensors_that_cannot_be_read_is_bad_data(size: int, tmp_path: Path) -> None:
    model = directory(tmp_path / "model", stacked=False)
    (model / "model.safetensors").write_bytes(size.to_bytes(8, "little") + b"nonsense")
    with pytest.raises(BadData, match="list of tensors"):
        load_spec(model)
