"""Families that do not train here: counted as transformers builds them, as their makers publish."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sabia.core.errors import UsageError
from sabia.core.plan.catalogue import read_data
from sabia.core.plan.counting.dialects import described
from sabia.core.plan.counting.known import architecture_from, architecture_of
from sabia.core.plan.counting.operations import operations
from sabia.core.plan.device.step_work import products

# small configurations, and the parameters that transformers 5.23.0 builds for them (routing biases,
# which it keeps as buffers, counted too); `judge`: what it does not read from the same fields
FAMILIES = json.loads((Path(__file__).parent / "families.json").read_text())
NAMED = [f"{row['config']['model_type']}-{n}" for n, row in enumerate(FAMILIES)]


@pytest.mark.parametrize("row", FAMILIES, ids=NAMED)
def test_counts_are_those_of_the_families_own_code(row: dict[str, Any]) -> None:
    assert architecture_from(row["config"]).params == row["params"]


@pytest.mark.slow
@pytest.mark.parametrize("row", FAMILIES, ids=NAMED)
def test_the_recorded_counts_are_transformers(row: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the judge here")
    torch = pytest.importorskip("torch", reason="transformers needs torch")
    fields = {**row["config"], **row.get("judge", {})}
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    biases = [t for name, t in model.named_buffers() if "e_score_correction_bias" in name]
    assert sum(t.numel() for t in [*model.parameters(), *biases]) == row["params"]


def test_every_dialect_is_tried() -> None:
    published = {config["model_type"] for _, config, _, _ in PUBLISHED}
    assert (
        set(read_data("families.toml")["family"])
        <= {row["config"]["model_type"] for row in FAMILIES} | published
    )


def test_every_word_of_a_description_is_read() -> None:
    source = Path(described.__file__).read_text()
    for family, row in read_data("families.toml")["family"].items():
        unknown = [name for name in row.get("layers", {}) if f'"{name}"' not in source]
        assert not unknown, family


@pytest.mark.parametrize("row", FAMILIES, ids=NAMED)
def test_a_field_that_nobody_knows_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="second_stream_width"):
        architecture_from(row["config"] | {"second_stream_width": 32})


def llama4(**fields: Any) -> dict[str, Any]:
    return {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 202048,
        "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_experts_per_tok": 1,
        **fields,
    }  # fmt: skip


def deepseek_v2(**fields: Any) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v2", "vocab_size": 102400, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, **fields,
    }  # fmt: skip


def glm4_moe(**fields: Any) -> dict[str, Any]:
    return {
        "model_type": "glm4_moe", "vocab_size": 151552, "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "attention_bias": True, **fields,
    }  # fmt: skip


def nemotron_super() -> dict[str, Any]:
    wide = {"attention": {"n_heads_in_group": 8, "no_op": False}, "ffn": {"ffn_mult": 5.25}}
    thin = {"attention": {"n_heads_in_group": None, "no_op": True}}
    factors = [1.3125] * 10 + [1.0] * 8 + [0.5] * 6 + [2.625] * 5 + [3.28125, 5.25]
    blocks = [wide] * 48 + [wide | {"ffn": {"ffn_mult": 2.625}}]
    blocks += [thin | {"ffn": {"ffn_mult": factor}} for factor in factors]
    return {
        "model_type": "nemotron-nas", "hidden_size": 8192, "num_hidden_layers": 80,
        "num_attention_heads": 64, "vocab_size": 128256, "block_configs": blocks,
    }  # fmt: skip


def minimax_m3() -> dict[str, Any]:
    where = [0] * 3 + [1] * 57
    return {
        "model_type": "minimax_m3", "hidden_size": 6144, "intermediate_size": 3072,
        "num_hidden_layers": 60, "num_attention_heads": 64, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 200064, "dense_intermediate_size": 12288,
        "shared_intermediate_size": 3072, "num_local_experts": 128, "num_experts_per_tok": 4,
        "n_shared_experts": 1, "use_routing_bias": True, "use_qk_norm": True,
        "qk_norm_type": "per_head", "moe_layer_freq": where,
        "sparse_attention_config": {
            "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16, "sparse_block_size": 128, "sparse_local_block": 1,
            "sparse_attention_freq": where,
        },
    }  # fmt: skip


# (name, the sizes in its config.json, total and active parameters): of transformers' models built
# from the published files, except MiMo-7B, Nemotron Super and Kimi K2, whose makers give 7.6B (as
# counted without the predicting layer), 49.9B and 1026.4B (1T).
PUBLISHED = [
    ("Llama-4-Scout", llama4(num_local_experts=16), 107_769_861_120, 17.17e9),
    ("Llama-4-Maverick", llama4(num_local_experts=128, interleave_moe_layer_step=2),
     400_711_848_960, 17.18e9),
    ("Qwen2.5-7B", {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "tie_word_embeddings": False}, 7_615_616_512, 7.616e9),
    ("Qwen1.5-MoE-A2.7B", {
        "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
        "vocab_size": 151936, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
     14_315_784_192, 2.69e9),
    ("DeepSeek-V2", deepseek_v2(
        hidden_size=5120, intermediate_size=12288, num_hidden_layers=60, num_attention_heads=128,
        q_lora_rank=1536, n_routed_experts=160, moe_intermediate_size=1536),
     235_741_434_880, 21.4e9),
    ("DeepSeek-V2-Lite", deepseek_v2(
        hidden_size=2048, intermediate_size=10944, num_hidden_layers=27, num_attention_heads=16,
        q_lora_rank=None, n_routed_experts=64, moe_intermediate_size=1408), 15_706_484_224, 2.66e9),
    ("GLM-4.5-Air", glm4_moe(
        hidden_size=4096, intermediate_size=10944, num_hidden_layers=46, n_routed_experts=128,
        moe_intermediate_size=1408, first_k_dense_replace=1), 106_852_251_264, 13.42e9),
    ("GPT-NeoX-20B", {
        "model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576,
        "num_hidden_layers": 44, "num_attention_heads": 64, "vocab_size": 50432},
     20_554_567_680, 20.55e9),
    ("DBRX", {
        "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "vocab_size": 100352,
        "attn_config": {"kv_n_heads": 8}, "ffn_config": {
            "ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}},
     131_596_523_520, 36.47e9),
    ("Jamba-v0.1", {
        "model_type": "jamba", "vocab_size": 65536, "hidden_size": 4096, "num_hidden_layers": 32,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_experts": 16, "num_experts_per_tok": 2, "mamba_dt_rank": 256},
     51_570_323_328, 12.11e9),
    ("Kimi-Linear-48B-A3B", {
        "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304,
        "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_hidden_layers": 27,
        "num_attention_heads": 32, "num_shared_experts": 1, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "num_experts_per_token": 8, "num_experts": 256, "first_k_dense_replace": 1,
        "linear_attn_config": {
            "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4,
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27]}}, 49_122_681_728, 3.484e9),
    ("Command-R", {
        "model_type": "cohere", "vocab_size": 256000, "hidden_size": 8192,
        "intermediate_size": 22528, "num_hidden_layers": 40, "num_attention_heads": 64},
     34_980_831_232, 34.98e9),
    ("GPT-2", {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
               "n_positions": 1024, "vocab_size": 50257}, 124_439_808, 124.4e6),
    ("Phi-3-mini", {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
        "vocab_size": 32064, "sliding_window": 2047}, 3_821_079_552, 3.821e9),
    ("Gemma-7B", {
        "model_type": "gemma", "hidden_size": 3072, "intermediate_size": 24576,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": 256, "vocab_size": 256000}, 8_537_680_896, 8.538e9),
    ("BLOOM", {"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112,
               "vocab_size": 250880}, 176_247_271_424, 176.25e9),
    ("MPT-7B", {"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32,
                "vocab_size": 50432, "attn_config": {"alibi": True}}, 6_649_286_656, 6.649e9),
    ("MiMo-7B", {
        "model_type": "mimo", "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151680, "attention_bias": True}, 7_622_619_136, 7.62e9),
    ("Nemotron-Super-49B", nemotron_super(), 49_867_145_216, 49.87e9),
    ("MiniMax-M3", minimax_m3(), 426_174_572_928, 25.96e9),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "total", "active"), [row[1:] for row in PUBLISHED], ids=[row[0] for row in PUBLISHED]
)
def test_published_sizes(config: dict[str, Any], total: int, active: float) -> None:
    model = architecture_from(config)
    assert model.params == total
    assert model.active_params == pytest.approx(active, rel=2e-3)


def test_a_model_with_sight_is_its_language_model(tmp_path: Path) -> None:
    text = llama4(num_local_experts=16)
    whole = {"model_type": "llama4", "text_config": text, "vision_config": {"hidden_size": 1408}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert architecture_of(tmp_path).params == architecture_from(text).params
    with pytest.raises(UsageError, match="text_config is missing"):
        architecture_from({"model_type": "llama4"})


def test_kimi_is_read_as_its_kin(tmp_path: Path) -> None:
    kimi = {
        "model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
        "vocab_size": 163840, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "first_k_dense_replace": 1,
        "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "moe_intermediate_size": 2048, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    assert architecture_from(kimi).params == pytest.approx(1026.4e9, rel=1e-4)
    sees = {"model_type": "kimi_k25", "text_config": kimi}
    assert architecture_from(sees).params == architecture_from(kimi).params


@pytest.mark.parametrize(
    ("name", "total", "active", "predicting"),
    [
        ("deepseek-ai--DeepSeek-V4-Pro", 1_598_837_347_742, 49.8e9, 25_840_145_979),
        ("meta-llama--Llama-4-Scout-17B-16E-Instruct", 107_769_861_120, 17.17e9, 0),
    ],
)
def test_published_configs(name: str, total: int, active: float, predicting: int) -> None:
    data = os.environ.get("SABIA_TEST_DATA")
    if not data:
        pytest.skip("SABIA_TEST_DATA is not set: no published configs")
    model = architecture_of(Path(data, "configs", f"{name}.json"))
    extra = sum(kind.count * kind.params for kind in model.extra) + model.extra_params
    assert (model.params, extra) == (total, predicting)
    assert model.active_params == pytest.approx(active, rel=2e-3)


def test_what_does_not_train_here_says_so() -> None:
    assert architecture_from(llama4(num_local_experts=16)).counted_only
    llama = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 101,
             "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
    assert not architecture_from(llama).counted_only
    seen = architecture_from({"model_type": "qwen3_vl", "text_config": llama | {"head_dim": 16,
                              "num_key_value_heads": 2,
                              "model_type": "qwen3_vl_text"}})  # fmt: skip
    assert seen.counted_only and seen.name == "qwen3_vl_text"


def test_llama_4_attends_to_chunks_in_three_of_four_layers() -> None:
    model = architecture_from(llama4(num_local_experts=16))
    assert {kind.window: kind.count for kind in model.layers} == {8192: 36, None: 12}
    short = operations(model, 8192, "palm").mixing
    assert operations(model, 16384, "palm").mixing == short * (36 + 12 * 2) / 48


def test_keys_that_are_merged_or_chosen() -> None:
    small = next(row for row in FAMILIES if row["config"]["model_type"] == "deepseek_v4")
    model = architecture_from(small["config"])
    seen = {kind.sparse and kind.sparse.pooled: kind for kind in model.layers}
    assert seen[None].keys(4096) == 8
    assert seen[128].keys(4096) == 8 + 32
    assert seen[4].keys(4096) == 8 + 4
    assert seen[4].score_products(4096) == 12 * 2 * 4 * 32 + 2 * 8 * 1024
    assert seen[4].cache_width == (32 + 8) // 4 and seen[None].state_width == 8 * 32


def test_a_state_space_layer_has_a_state_and_no_scores() -> None:
    small = next(row for row in FAMILIES if row["config"]["model_type"] == "nemotron_h")
    model = architecture_from(small["config"])
    state = next(kind for kind in model.layers if kind.state_products)
    assert (state.score_width, state.mlp_params, state.stream_norms) == (0, 0, 1)
    assert state.state_products == 2 * 64 * 16
    assert model.depth == 6
    routed = next(kind for kind in model.layers if kind.experts)
    assert routed.expert_params == 8 * 2 * 24 * 32 and routed.heads == 0


@pytest.mark.parametrize("row", FAMILIES, ids=NAMED)
def test_the_products_of_a_layer_are_all_its_matrices(row: dict[str, Any]) -> None:
    for kind in architecture_from(row["config"]).layers:
        layer_products = list(products(kind))
        assert all(one.inner > 0 and one.params > 0 for one in layer_products)
        assert sum(one.params for one in layer_products) == pytest.approx(kind.matmul_params)


def test_a_negative_number_of_layers_is_refused() -> None:
    config = next(r["config"] for r in FAMILIES if r["config"]["model_type"] == "deepseek_v32")
    with pytest.raises(UsageError, match=r"first_k_dense_replace is -1 \(expected 0 or more\)"):
        architecture_from(config | {"first_k_dense_replace": -1})
