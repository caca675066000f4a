"""Where the article on training a 1.6T model departs from its own formulas, and what follows it.

Row 20 (what fits for generation and LoRA) and the corrections to tables 1 and 2.
Source: maritaca.ai/en/blog/como-treinamos-modelos.
"""

import datetime

import pytest
from plain_models import attention_layer, decoder, weights_fit, with_experts

from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan import answer, compute, memory, request
from sabia.core.plan.chips import find_chip
from sabia.core.plan.counting.assumed import assumed_architecture
from sabia.core.plan.counting.operations import adapter_params, training_flops_per_token
from sabia.core.plan.output import generation
from sabia.core.plan.serving.decode import find_format, weight_bytes

TODAY = datetime.date(2026, 9, 1)  # the prices on file are then a month old
TRILLION = assumed_architecture(1e12, 32e9)


def figures(**settings):
    return answer.answer(PlanOptions(params=1.6e12, active=49e9, **settings), TODAY).report


def test_row_20_one_trillion_in_fp8_fits_eight_b200():
    b200 = find_chip("b200")
    assert weight_bytes(TRILLION, find_format("fp8")) == pytest.approx(1.0e12, rel=1e-3)
    assert 8 * b200.usable_hbm_bytes == pytest.approx(1.532e12, rel=1e-3)
    assert weights_fit(TRILLION, b200, 8, "fp8")
    asked = PlanOptions(
        stage="serve", params=1e12, active=32e9, weights="fp8", chips=8, price="4.4"
    )
    best = generation.serve(request.build(asked)).report["best"]
    assert best["replica_chips"] == 8 and best["batch"] > 100  # "comfortably"


def test_row_20_in_bf16_it_needs_b300():
    b200, b300 = find_chip("b200"), find_chip("b300")
    assert weight_bytes(TRILLION, find_format("bf16")) == pytest.approx(2.0e12, rel=1e-3)
    assert not weights_fit(TRILLION, b200, 8, "bf16")
    assert weights_fit(TRILLION, b300, 8, "bf16")
    assert 8 * b300.hbm_bytes == pytest.approx(2.3e12, rel=0.01)


def test_row_20_lora_of_one_trillion_fits_eight_b300_and_not_eight_b200():
    adapters = memory.ADAPTERS.bytes_per_param * adapter_params(TRILLION, 32)
    live = TRILLION.depth * TRILLION.hidden * 8 * 8192 * memory.ACTIVATION_BYTES  # a row on each
    held = weight_bytes(TRILLION, find_format("bf16")) + adapters + live
    assert held < 8 * find_chip("b300").usable_hbm_bytes
    assert held > 8 * find_chip("b200").usable_hbm_bytes


def test_table_2_without_rounding_to_one_hundred(request):
    path = request.config.rootpath / "examples" / "pyramid.toml"
    rows = answer.answer(PlanOptions(budget=str(path)), TODAY).report["rows"]
    assert round(100 * rows[0]["share"]) == 47  # printed 46
    assert round(rows[2]["cost_usd"] / 1e6, 2) == 0.35  # printed 0.36


def test_table_1_big_cloud_without_rounding_to_a_five():
    cost = figures(price="12")["rows"][0]["costs"][0]["cost_usd"]
    assert round(cost / 1e6, 3) == 0.544  # printed 0.55


def test_the_unrounded_hours_make_table_1():
    rounded = [45_000 / 24 / days for days in (30, 14, 7)]
    assert rounded == pytest.approx([62.5, 133.9, 267.9], abs=0.05)  # would print 62 and 268
    rows = figures()["rows"]
    assert [round(row["compute_min_chips"]) for row in rows] == [63, 135, 270]


def test_150_by_memory_is_152_and_on_180_gb_162():
    report = figures()
    assert report["total_bytes"] / 1e12 == pytest.approx(29.1, abs=0.01)  # below its 30 to 35 TB
    assert report["memory_min_chips"] == 152
    assert [compute.whole_chips(size / 192e9) for size in (30e12, 35e12)] == [157, 183]
    planned = figures(hbm=180e9)
    assert (planned["state_min_chips"], planned["memory_min_chips"]) == (143, 162)


def test_150_hold_the_run_by_accumulating():
    report = figures(chips=150)
    assert report["accumulated_min_chips"] <= 150 < report["memory_min_chips"]


def test_sixteen_bytes_a_parameter_is_one_of_several_conventions():
    held = {name: recipe.bytes_per_param for name, recipe in memory.RECIPES.items()}
    assert held["adamw16"] == 16  # the article: BF16 gradients
    assert held["megatron18"] == 18  # FP32 gradients
    assert held["jax10"] == 10  # BF16 weights and FP32 moments, no master copy
    assert held["bf16-moments"] == 12  # DeepSeek-V3
    sizes = [figures(state_recipe=name)["state_bytes"] / 1e12 for name in ("megatron18", "jax10")]
    assert sizes == pytest.approx([28.8, 16.0])


def test_attention_that_6nd_leaves_out():
    """61 layers of 128 heads with latent keys of 192 and values of 128, at 8K."""
    layer = attention_layer(7168, 128, 128, 160, 0)
    assert layer.score_width == 128 * (192 + 128)
    mixed = with_experts(layer, 7168, 256, 8, 2048)
    model = decoder("x", 7168, 1, tuple([mixed] * 61))
    plain = training_flops_per_token(model, 8192, "6nd")
    causal = training_flops_per_token(model, 8192, "causal") - plain
    full = training_flops_per_token(model, 8192, "palm") - plain
    assert causal / (6 * 49e9) == pytest.approx(0.21, abs=0.005)
    assert full / (6 * 49e9) == pytest.approx(0.42, abs=0.005)


def test_lora_weeks_from_exact_figures():
    report = figures(lora=True, chips=20, deadline="10w")["rows"][0]["finishes_s"] / 604800
    assert report == pytest.approx(9.0, abs=0.005)
    from_rounded = 13 * (150 / 20) * 0.7 / 7
    assert from_rounded == pytest.approx(9.75)  # "~10"


def test_the_upload_that_a_save_still_lacks_is_lost_at_a_stop():
    """The interval is the upload; a stop loses half an interval of work and a whole upload."""
    report = figures(chips=300, preempt=6 * 3600.0, bucket_gbps=8)["stops"]
    assert report["interval_s"] == report["upload_s"] == pytest.approx(2400)
    assert report["lost_per_stop_s"] == pytest.approx(2400 / 2 + 2400)
