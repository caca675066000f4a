"""Configurations become models, and nothing in them that changes the maths is overlooked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sabia.core.errors import BadData, SabiaError, UsageError
from sabia.core.spec import from_config, inverse_frequencies, load_spec, new_config
from sabia.core.spec.rope import Rope

BASE = new_config("llama", hidden=64, layers=3, vocab=101, heads=4, kv_heads=2, head_dim=20)


def test_table_is_ordered_named_and_shaped() -> None:
    table = {t.name: t for t in from_config(BASE).tensors()}
    assert [*table][:: len(table) - 1] == ["embed", "final_norm"]  # tied: no head
    assert table["layers.2.attn.q"].shape == (80, 64)
    assert table["layers.2.attn.k"].shape == (40, 64)
    assert table["layers.2.attn.o"].axes == ("embed", "heads")
    assert table["layers.2.attn.o"].hf == "model.layers.2.self_attn.o_proj.weight"
    assert all(len(t.shape) == len(t.axes) for t in table.values())
    assert len({t.hf for t in table.values()}) == len(table)


def test_flags_follow_the_kind_of_tensor() -> None:
    table = {t.name: t for t in from_config(BASE | {"attention_bias": True}).tensors()}
    assert table["embed"].decay and not table["embed"].muon
    assert table["layers.0.mlp.up"].decay and table["layers.0.mlp.up"].muon
    for name in ("layers.0.attn.norm", "layers.0.attn.q_bias", "layers.0.attn.o_bias"):
        tensor = table[name]
        assert not tensor.decay and not tensor.muon and tensor.dtype_class == "vector"
    residual, plain = table["layers.0.mlp.down"].init, table["layers.0.mlp.up"].init
    assert residual.std == pytest.approx(plain.std / 6**0.5)


def test_equal_models_are_equal_whatever_their_files_say_besides() -> None:
    assert from_config(BASE) == from_config(BASE | {"eos_token_id": 7, "torch_dtype": "bfloat16"})
    assert hash(from_config(BASE)) == hash(from_config(BASE | {"use_cache": False}))
    assert from_config(BASE) != from_config(BASE | {"rms_norm_eps": 1e-5})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"num_experts": 8}, "num_experts"),
        ({"new_flag": False}, "new_flag"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "beta": 1}}, "beta"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "key-value"),
        ({"head_dim": 15}, "head_dim"),
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 3}, "layer_types"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 3}, "use_sliding_window"),
        ({"model_type": "qwen3", "mlp_bias": True}, "mlp_bias"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict, named: str) -> None:
    with pytest.raises(UsageError, match=named) as error:
        from_config(BASE | change)
    assert "\n" not in str(error.value) and "expected" in str(error.value)


def test_empty_unknown_fields_are_no_error() -> None:
    assert from_config(BASE | {"sliding_window": None}) == from_config(BASE)


def test_both_spellings_of_rope_agree() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    old = {"rope_theta": 5e5, "rope_scaling": scaling | {"type": "llama3"}}
    new = {"rope_theta": None} | {
        "rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}
    }
    assert from_config(BASE | old) == from_config(BASE | new) != from_config(BASE)


def test_llama3_frequencies_keep_short_and_stretch_long_waves() -> None:
    plain = inverse_frequencies(Rope(64, 5e5))
    scaled = inverse_frequencies(Rope(64, 5e5, "llama3", 8.0, 1.0, 4.0, 8192))
    assert scaled[0] == plain[0] == 1.0
    assert scaled[-1] == pytest.approx(plain[-1] / 8)
    ratios = [s / p for s, p in zip(scaled, plain, strict=True)]
    assert ratios == sorted(ratios, reverse=True) and any(0.13 < r < 0.99 for r in ratios)
    linear = inverse_frequencies(Rope(64, 5e5, "linear", 4.0))
    assert linear == pytest.approx([p / 4 for p in plain])


def test_qwen3_windows_start_at_their_layer() -> None:
    config = BASE | {"model_type": "qwen3", "sliding_window": 7, "max_window_layers": 1}
    assert [x.mixer.window for x in from_config(config).layers] == [None] * 3
    windowed = from_config(config | {"use_sliding_window": True})
    assert [x.mixer.window for x in windowed.layers] == [None, 7, 7]
    assert all(x.mixer.qk_norm for x in windowed.layers)


def test_load_spec_reads_directories_and_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    assert load_spec(tmp_path) == load_spec(tmp_path / "config.json") == from_config(BASE)
    with pytest.raises(UsageError, match="does not exist"):
        load_spec(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadData, match="not JSON"):
        load_spec(tmp_path)


def test_only_the_standard_library_is_imported() -> None:
    code = (
        "import sys; before = set(sys.modules); import sabia.core.spec; "
        "roots = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(roots - set(sys.stdlib_module_names) - {'sabia'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["Llama-4", "DeepSeek-V4"])
def test_published_configs_of_other_families_are_refused_by_name(name: str) -> None:
    data = os.environ.get("SABIA_TEST_DATA")
    if not data:
        pytest.skip("SABIA_TEST_DATA is not set: no published configs")
    (file,) = Path(data, "configs").glob(f"*{name}*.json")
    with pytest.raises(SabiaError, match="model_type"):
        load_spec(file)
