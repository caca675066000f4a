"""Counts against published models, hand-made sums, and the three FLOP conventions."""

import os
from pathlib import Path

import pytest

from sabia.core.errors import UsageError
from sabia.core.spec import (
    ModelSpec,
    active_parameter_count,
    from_config,
    load_spec,
    matmul_parameter_count,
    new_config,
    parameter_count,
    training_flops_per_token,
)


def llama_405b() -> ModelSpec:
    shape = {"hidden": 16384, "layers": 126, "heads": 128, "kv_heads": 8, "ffn": 53248}
    return from_config(new_config("llama", **shape, vocab=128256, tied=False))


def test_llama_405b_parameters_and_flops() -> None:
    spec = llama_405b()
    assert parameter_count(spec) == active_parameter_count(spec) == 405_853_388_800
    assert training_flops_per_token(spec, 8192, "6nd") == pytest.approx(2.4225e12, rel=1e-4)
    attention = 126 * 8192 * 128 * 128
    causal = training_flops_per_token(spec, 8192, "causal")
    assert causal == pytest.approx(2.524e12, rel=1e-3)
    assert causal - training_flops_per_token(spec, 8192, "6nd") == 6 * attention
    assert training_flops_per_token(spec, 8192, "palm") - causal == 6 * attention


def test_small_model_by_hand() -> None:
    config = new_config("qwen3", hidden=64, layers=2, vocab=101, heads=4, kv_heads=1, ffn=96)
    config["attention_bias"] = True
    attention = 64 * 64 * 2 + 64 * 16 * 2 + (64 + 16 + 16 + 64) + 2 * 16
    layer = attention + 3 * 64 * 96 + 2 * 64
    spec = from_config(config)
    assert parameter_count(spec) == 101 * 64 + 2 * layer + 64
    assert matmul_parameter_count(spec) == 101 * 64 + 2 * (64 * 64 * 2 + 64 * 16 * 2 + 3 * 64 * 96)
    untied = from_config(config | {"tie_word_embeddings": False})
    assert parameter_count(untied) == parameter_count(spec) + 101 * 64
    assert matmul_parameter_count(untied) == matmul_parameter_count(spec)


def test_a_window_bounds_the_attention_term() -> None:
    config = new_config("qwen3", hidden=64, layers=2, vocab=101, heads=4)
    windowed = config | {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}
    full, short = from_config(config), from_config(windowed)
    at = [training_flops_per_token(spec, 1000, "palm") for spec in (full, short)]
    assert at[0] - at[1] == 12 * 64 * 900
    assert training_flops_per_token(short, 50) == training_flops_per_token(full, 50)


def test_an_unknown_convention_is_refused() -> None:
    with pytest.raises(UsageError, match="expected one of 6nd, palm, causal"):
        training_flops_per_token(llama_405b(), 8192, "8nd")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "count"), [("Meta-Llama-3.1-70B", 70_553_706_496), ("Qwen3-8B", 8_190_735_360)]
)
def test_published_parameter_counts(name: str, count: int) -> None:
    data = os.environ.get("SABIA_TEST_DATA")
    if not data:
        pytest.skip("SABIA_TEST_DATA is not set: no published configs")
    (file,) = Path(data, "configs").glob(f"*{name}.json")
    assert parameter_count(load_spec(file)) == count


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("DeepSeek-V3", 671_026_419_200, 37.55e9),  # published: 671B, 37B
        ("Qwen3-235B-A22B", 235_093_634_560, 22.19e9),  # 235B, 22B
        ("Mixtral-8x7B-v0.1", 46_702_792_704, 12.88e9),  # 46.7B, 12.9B
    ],
)
def test_published_counts_of_mixtures(name: str, total: int, active: float) -> None:
    data = os.environ.get("SABIA_TEST_DATA")
    if not data:
        pytest.skip("SABIA_TEST_DATA is not set: no published configs")
    (file,) = Path(data, "configs").glob(f"*{name}.json")
    spec = load_spec(file)
    assert parameter_count(spec) == total
    assert active_parameter_count(spec) == pytest.approx(active, rel=1e-3)


def test_a_token_meets_its_share_of_the_experts() -> None:
    shape = {"hidden": 64, "layers": 1, "vocab": 101, "heads": 4, "ffn": 96}
    spec = from_config(new_config("qwen3_moe", **shape, experts=8, chosen=2, expert_ffn=32))
    idle = 6 * 3 * 64 * 32
    assert parameter_count(spec) - active_parameter_count(spec) == idle
    assert matmul_parameter_count(spec) == active_parameter_count(spec) - 2 * 16 - 3 * 64
