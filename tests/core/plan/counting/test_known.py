"""An Architecture counts as the model core does, to the element, in every family that trains."""

import json
import os
from pathlib import Path

import pytest

from sabia.core import spec
from sabia.core.errors import BadData, UsageError
from sabia.core.model.lora import LoraConfig, lora_tensors
from sabia.core.plan.counting.architecture import LayerKind
from sabia.core.plan.counting.blocks import from_spec
from sabia.core.plan.counting.counts import count_model
from sabia.core.plan.counting.known import architecture_from, architecture_of
from sabia.core.plan.counting.operations import adapter_params, training_flops_per_token
from sabia.core.spec.from_scratch import MOE_FAMILIES

SMALL = {"hidden": 64, "layers": 6, "vocab": 101, "heads": 4, "ffn": 96}
TEXTS = [name for name in spec.families() if name in {
    "llama", "qwen3", "mistral", "gemma2", "gemma3", "olmo2", "mixtral", "deepseek_v3",
    "qwen3_moe", "qwen3_next",
}]  # fmt: skip
OTHERS = {
    "qwen2": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 101,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "gemma": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 101,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
    },
    "gpt_oss": {
        "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4, "vocab_size": 101,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 8,
        "num_experts_per_tok": 2, "sliding_window": 16,
    },
    "qwen3_5_text": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "vocab_size": 101,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "qwen3_5_moe_text": {
        "hidden_size": 64, "num_hidden_layers": 8, "vocab_size": 101, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
    },
    "minicpm": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 101,
        "num_attention_heads": 4, "num_key_value_heads": 2, "scale_emb": 12, "scale_depth": 1.4,
        "dim_model_base": 16,
    },
    "minicpm3": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 101,
        "num_attention_heads": 4, "num_key_value_heads": 4, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 4, "kv_lora_rank": 24, "q_lora_rank": 20,
    },
    "phi3": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 101,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 16,
        "partial_rotary_factor": 0.75,
    },
    "modernbert": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5, "vocab_size": 101,
        "num_attention_heads": 4, "attention_bias": True, "local_attention": 32,
    },
}  # fmt: skip


def config_of(family: str) -> dict[str, object]:
    if family in OTHERS:
        return OTHERS[family] | {"model_type": family}
    sizes = dict(SMALL)
    if family in MOE_FAMILIES:
        sizes |= {"experts": 8, "chosen": 2, "expert_ffn": 32}
    if family != "deepseek_v3":
        sizes |= {"kv_heads": 2}
    return spec.new_config(family, **sizes)


@pytest.mark.parametrize("family", [*TEXTS, *OTHERS])
def test_counts_and_operations_are_those_of_the_model_core(family: str) -> None:
    model = spec.from_config(config_of(family))
    architecture = from_spec(model)
    assert architecture.params == spec.parameter_count(model)
    assert architecture.active_params == spec.active_parameter_count(model)
    assert architecture.matmul_params == spec.matmul_parameter_count(model)
    assert architecture.depth == len(model.layers)
    for convention in ("6nd", "palm", "causal"):
        for sequence in (8, 100, 4096):
            judge = spec.training_flops_per_token(model, sequence, convention)
            ours = training_flops_per_token(architecture, sequence, convention)
            assert ours == pytest.approx(judge, rel=1e-14), (convention, sequence)


@pytest.mark.parametrize("family", [*TEXTS, *OTHERS])
def test_adapters_are_those_that_training_adds(family: str) -> None:
    model = spec.from_config(config_of(family))
    judge = sum(tensor.size for tensor in lora_tensors(model, LoraConfig(rank=3)))
    assert adapter_params(from_spec(model), 3) == judge


def test_unlike_layers_are_kinds_of_their_own() -> None:
    model = architecture_from(config_of("gpt_oss"))
    assert [(kind.count, kind.window) for kind in model.layers] == [(2, 16), (2, None)]
    hybrid = architecture_from(config_of("qwen3_5_text"))
    assert [(kind.count, kind.score_width > 0) for kind in hybrid.layers] == [(6, False), (2, True)]
    state = hybrid.layers[0]
    assert state.state_products == 3 * 4 * 8 * 8
    assert state.state_width == 4 * 8 * 8 + 3 * (2 * 16 + 32)
    assert state.cache_width == 0


def test_sizes_of_grouped_and_latent_attention() -> None:
    kind = architecture_from(config_of("llama")).layers[0]
    assert (kind.query_width, kind.key_width, kind.value_width) == (64, 32, 32)
    assert (kind.cache_width, kind.score_width, kind.kv_heads) == (64, 128, 2)
    latent = architecture_from(config_of("deepseek_v3")).layers[0]  # heads 4 of 16 + 8, latent 64
    assert (latent.query_width, latent.value_width) == (4 * 24, 4 * 16)
    assert (latent.cache_width, latent.score_width) == (64 + 8, 4 * (24 + 16))


def test_a_classifier_is_refused() -> None:
    config = config_of("llama") | {"architectures": ["LlamaForSequenceClassification"]}
    with pytest.raises(UsageError, match="classifier of 2 labels"):
        architecture_from(config)


@pytest.mark.parametrize(
    ("text", "error", "named"),
    [
        ("{", BadData, "not JSON"),
        ('{"model_type": "t5"}', UsageError, "model_type 't5' is none of"),
        ('{"model_type": "llama", "hidden_size": 64}', UsageError, "num_attention_heads"),
    ],
)
def test_what_cannot_be_counted_is_refused(
    tmp_path: Path, text: str, error: type[Exception], named: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=named):
        architecture_of(tmp_path)


def test_the_planner_counts_whole_elements(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("mixtral")))
    counts = count_model(str(tmp_path), 64)
    assert isinstance(counts.active_params, int) and isinstance(counts.matmul_params, int)
    assert isinstance(architecture_of(tmp_path).layers[0], LayerKind)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("DeepSeek-V3", 671_026_419_200, 37_552_297_472),
        ("Qwen3-235B-A22B", 235_093_634_560, 22_190_763_520),
        ("Mixtral-8x7B-v0.1", 46_702_792_704, 12_879_925_248),
        ("Meta-Llama-3.1-70B", 70_553_706_496, 70_553_706_496),
        ("Qwen3-8B", 8_190_735_360, 8_190_735_360),
        ("Qwen3.5-397B-A17B", 396_346_350_336, 17_349_040_896),
    ],
)
def test_published_configs(name: str, total: int, active: int) -> None:
    data = os.environ.get("SABIA_TEST_DATA")
    if not data:
        pytest.skip("SABIA_TEST_DATA is not set: no published configs")
    (file,) = Path(data, "configs").glob(f"*{name}.json")
    model = architecture_of(file)
    assert (model.params, model.active_params) == (total, active)


def test_every_family_is_tried() -> None:
    whole = {"gemma3_text", "qwen3_5", "qwen3_5_moe"}  # as gemma3 writes; as the texts inside
    assert {*TEXTS, *OTHERS} | whole == set(spec.families())
