"""A plan from a config.json counts as the model itself does."""

import json

import pytest

from sabia.core.errors import UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan import answer, request
from sabia.core.plan.counting.counts import count_model

LLAMA_3_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return str(tmp_path)


def test_published_size_and_tokens_per_parameter(config):
    counts = count_model(config, 8192)
    assert counts.params == counts.active_params == 8_030_261_248
    assert (counts.layers, counts.hidden) == (32, 4096)
    assert 15e12 / counts.params == pytest.approx(1868, abs=1)


def test_operations_leave_out_the_input_lookup(config):
    counts = count_model(config, 8192)
    norms = (2 * 32 + 1) * 4096
    assert counts.matmul_params == 8_030_261_248 - 128_256 * 4096 - norms
    output = answer.answer(PlanOptions(model=config, tokens=1e12, price="2"))
    assert output.report["train_flops"] == 6 * counts.matmul_params * 1e12
    assert "N = 7.5B without the input lookup" in output.text


@pytest.mark.parametrize(("positions", "tokens"), [(512, 512), (131_072, 8192)])
def test_without_seq_a_sequence_is_no_longer_than_the_positions_of_the_config(
    tmp_path, positions, tokens
):
    fields = LLAMA_3_8B | {"max_position_embeddings": positions}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assumed = request.build(PlanOptions(model=str(tmp_path), price="2"))
    why = ", the positions of the config" if tokens < 8192 else ""
    assert f"sequences of {tokens}{why}" in assumed.assumed
    assert assumed.run.sequence == tokens
    given = request.build(PlanOptions(model=str(tmp_path), seq=1024, price="2"))
    assert given.run.sequence == 1024 and not any("sequence" in text for text in given.assumed)


@pytest.mark.parametrize("sequence", [2048, 8192])
def test_attention_is_noted_with_its_share(config, sequence):
    output = answer.answer(PlanOptions(model=config, seq=sequence, price="2"))
    by_hand = 6 * 32 * sequence * 4096 / (6 * output.report["matmul_params"])
    assert output.report["attention_flops_share_not_counted"] == pytest.approx(by_hand)
    assert any(f"it would add {by_hand:.0%}" in note for note in output.notes)


def test_counts_beside_a_config_are_refused(config):
    with pytest.raises(UsageError, match="--active: not together with --model"):
        answer.answer(PlanOptions(model=config, active=1e9))
