"""Operations by convention and with adapters, through a plan, against figures by hand."""

import json

import pytest

from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan.placed import plan_of

L, H, V, F, HEADS, KV = 32, 4096, 128256, 14336, 32, 8
LLAMA_3_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": V,
    "hidden_size": H, "intermediate_size": F, "num_hidden_layers": L,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
HEAD = H // HEADS
MATRICES = L * (2 * H * H + 2 * H * KV * HEAD + 3 * H * F) + V * H


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return str(tmp_path)


@pytest.mark.parametrize(("convention", "share"), [("6nd", 0), ("causal", 0.5), ("palm", 1)])
def test_attention_counts_as_the_convention_says(model, convention, share):
    _, plan = plan_of(PlanOptions(model=model, seq=8192, tokens=1e12, convention=convention))
    per_token = 6 * MATRICES + share * 12 * L * 8192 * H
    assert plan.run.train_flops == pytest.approx(per_token * 1e12, rel=1e-12)
    assert plan.work_chip_s == pytest.approx(per_token * 1e12 / (0.4 * 2.25e15))


def test_adapters_cost_four_of_six_and_their_own(model):
    rank = 16
    edges = L * (2 * (H + H) + 2 * (H + KV * HEAD) + 3 * (H + F))
    _, plan = plan_of(PlanOptions(model=model, tokens=1e9, lora_rank=rank))
    adapters = rank * edges
    assert plan.run.adapter_params == adapters
    assert plan.run.train_flops == pytest.approx((4 * MATRICES + 6 * adapters) * 1e9, rel=1e-9)
    held = 2 * plan.run.params + 16 * adapters
    assert plan.run.state_bytes == held
    assert plan.run.checkpoint_bytes == 12 * adapters


def test_tokens_of_fine_tuning_are_those_of_its_examples():
    asked = PlanOptions(
        params=7e9, stage="sft", items=100e3, prompt_tokens=400, output_tokens=600, repeats=3,
        chip="h100", price="2",
    )  # fmt: skip
    _, plan = plan_of(asked)
    assert plan.run.tokens == 3e8
    assert plan.chip_hours == pytest.approx(8.85, abs=0.01)  # ≈ $18 at $2 an hour
