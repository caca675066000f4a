"""The views of serving, GRPO and evaluation: figures agree with their text, gaps are told."""

import json
import sys
from pathlib import Path

import pytest

from sabia.core.errors import Infeasible, UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan import request
from sabia.core.plan.output.generation import evaluate, grpo, serve
from sabia.core.plan.serving.decode import published_ratio

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))


def see(view, **settings):
    stage = {serve: "serve", grpo: "grpo", evaluate: "eval"}[view]
    seen_view = view(request.build(PlanOptions(stage=stage, **settings)))
    json.dumps(seen_view.report)
    return seen_view


def test_serving_a_trillion_parameters():
    view = see(serve, params=1e12, active=32e9, weights="fp8", chips=64, price="4.40")
    best = view.report["best"]
    assert best["replica_chips"] == 8
    assert best["weight_bytes"] == pytest.approx(1e12, rel=1e-3)
    whole = view.report["cluster"]
    assert whole["replicas"] == 8
    assert whole["output_tokens_per_s"] == pytest.approx(64 * best["output_tokens_per_s_chip"])
    usd = 3600 / best["output_tokens_per_s_chip"]
    both = best["usd_per_million_input"] + best["usd_per_million_output"]
    assert both == pytest.approx(4.4 / 3600 * 1e6 / 3600 * usd)
    assert "replicas of 8 B200" in view.text and "memory limits the speed" in view.text
    assert "cache bf16" in view.text and "weights" not in view.report["assumed"]


def test_serving_as_asked():
    view = see(
        serve, params=8e9, chip="h100", replica_chips=2, batch=16, prompt_tokens=4000,
        output_tokens=200, cache="fp8",
    )  # fmt: skip
    assert [(r["replica_chips"], r["batch"]) for r in view.report["replicas"]] == [(2, 16)]
    assert view.report["assumed"] == ["weights bf16"]
    with pytest.raises(UsageError, match=r"--replica-chips: 3 .* 1, 2"):
        see(serve, params=8e9, chip="h100", replica_chips=3)
    with pytest.raises(Infeasible, match="use 16 chips or --weights fp8 or --weights int8"):
        see(serve, params=1e12, active=32e9, chips=8)


TEST_TIME = {"params": 8e9, "chip": "h100", "price": "2", "output_tokens": 500}


def test_test_time_compute_is_paid_as_generated_tokens():
    plain = see(serve, **TEST_TIME).report["best"]
    view = see(serve, **TEST_TIME, thinking_tokens=2000, samples=8)
    best, seen = view.report["best"], view.report["test_time"]
    assert best["output_tokens"] == 2500 and plain["output_tokens"] == 500
    assert "test_time" not in see(serve, **TEST_TIME).report
    usd = best["usd_per_million_input"] * 1000 + 8 * best["usd_per_million_output"] * 2500
    assert seen["usd_per_request"] == pytest.approx(usd / 1e6)
    once = plain["usd_per_million_input"] * 1000 + plain["usd_per_million_output"] * 500
    assert seen["usd_per_plain_request"] == pytest.approx(once / 1e6)
    assert seen["times_plain"] == pytest.approx(usd / once) and seen["times_plain"] > 20
    assert "8 x 2,000 + 500 tokens a request" in view.text
    assert seen["seconds_per_answer"] > 2 * seen["plain_seconds_per_answer"]


def test_one_sample_without_thinking_is_the_plain_request():
    seen = see(serve, **TEST_TIME, samples=1).report["test_time"]
    assert seen["times_plain"] == pytest.approx(1)


def test_chips_of_a_rate_of_requests_are_the_fewest():
    for samples, rate in ((1, 5.0), (4, 3.7), (16, 100.0)):
        asked = TEST_TIME | {"thinking_tokens": 1000, "samples": samples}
        cluster = see(serve, **asked, requests=rate).report["cluster"]
        size = cluster["chips"] // cluster["replicas"]
        assert cluster["requests_per_s"] >= rate
        assert cluster["requests_per_s"] * (1 - size / cluster["chips"]) < rate
        assert cluster["usd_per_hour"] == pytest.approx(2 * cluster["chips"])


def test_thinking_counts_in_evaluations_and_grpo_too():
    asked = {"params": 8e9, "chip": "h100", "price": "2", "items": 100, "repeats": 3}
    thought = see(evaluate, **asked, thinking_tokens=4000).report["parts"][0]
    assert thought["output_tokens"] == 300 * 5000
    grown = see(grpo, params=8e9, chip="h100", chips=16, price="2", thinking_tokens=4000)
    assert grown.report["tokens"] == 64 * 16 * 6000


def test_grpo_on_the_same_chips():
    asked = {"params": 30e9, "active": 3e9, "chip": "h100", "chips": 32, "price": "2"}
    view = see(grpo, **asked, output_tokens=3000, output_limit=8000, steps=100)
    report = view.report
    assert sum(report["parts_s"].values()) == pytest.approx(report["step_s"])
    assert report["samples"] == 64 * 16
    assert report["tokens"] == 64 * 16 * 4000
    assert report["cost_usd"] == pytest.approx(100 * report["step_s"] * 32 * 2 / 3600)
    peaks = report["generating_bytes_per_chip"], report["training_bytes_per_chip"]
    assert report["peak_bytes_per_chip"] == max(peaks)
    train = 6 * 3e9 * report["tokens"] / (32 * 989e12 * 0.4)
    assert report["parts_s"]["training"] == pytest.approx(train)
    assert report["parts_s"]["log-probs"] == pytest.approx(2 / 3 * train)
    lora = see(grpo, **asked, lora=True, no_reference=True).report
    tokens = lora["tokens"] / report["tokens"]
    assert lora["parts_s"]["training"] == pytest.approx(2 / 3 * train * tokens)
    assert lora["parts_s"]["log-probs"] == pytest.approx(train / 3 * tokens)
    assert lora["training_bytes_per_chip"] < report["training_bytes_per_chip"]


def test_grpo_on_two_sides_with_a_judge():
    asked = {"params": 30e9, "active": 3e9, "chip": "h100", "chips": 32, "generation_chips": 16}
    seen = see(grpo, **asked, judge_calls=8, judge_price="0.5,2", reward_time=5.0)
    assert "judge     8,192 calls per step of 3,000 + 200 tokens, $15.56" in seen.text
    report = seen.report
    assert report["judge_usd_per_step"] == pytest.approx(1024 * 8 * (3000 * 0.5 + 200 * 2) / 1e6)
    assert report["parts_s"]["reward"] == 5.0
    own = see(grpo, **asked, judge_calls=8, judge_params=32e9).report
    assert own["parts_s"]["reward"] > 5 and own["judge_usd_per_step"] == 0
    with pytest.raises(UsageError, match="no judge is given"):
        see(grpo, **asked, judge_calls=8)
    with pytest.raises(UsageError, match="leave none to train"):
        see(grpo, **asked | {"generation_chips": 32})


def test_grpo_finds_chips_that_hold_the_state():
    view = see(grpo, params=8e9, chip="h100")
    assert view.report["chips"] == 8
    assert "8 chips to train" in view.text


def test_grpo_with_a_predicted_training_step():
    asked = {"params": 8e9, "chip": "h100", "chips": 16, "price": "2", "no_reference": True}
    searched = see(grpo, **asked, search=True).report
    assert 0.1 < searched["training_mfu"] < 0.7
    assert see(grpo, **asked, mfu=0.3).report["training_mfu"] == 0.3
    train = 6 * 8e9 * searched["tokens"] / (16 * 989e12 * searched["training_mfu"])
    assert searched["parts_s"]["training"] == pytest.approx(train)
    fixed = see(grpo, **asked, fixed_layout="fsdp=8,pipe=2,micro_batch=1").report
    assert fixed["training_mfu"] != searched["training_mfu"]


def test_grpo_refuses_chips_that_cannot_hold_the_trainer():
    with pytest.raises(Infeasible, match=r"4 b300 needs 507 GB each .* on 8 or more"):
        see(grpo, params=1e12, active=32e9, lora=True, chip="b300", chips=4, weights="nvfp4")


def test_a_share_of_memory_may_be_given():
    asked = {"params": 8e9, "chip": "h100", "replica_chips": 1, "price": "2"}
    batches = [see(serve, **asked, utilisation=u).report["best"]["batch"] for u in (0.5, 0.9)]
    assert batches[0] < batches[1] == see(serve, **asked).report["best"]["batch"]


def test_an_evaluation_with_a_rubric_judge():
    asked = {"params": 8e9, "price": "4.40", "items": 5000, "judge_calls": 10}
    view = see(evaluate, **asked, judge_params=235e9, judge_active=22e9)
    parts = {part["part"]: part for part in view.report["parts"]}
    assert parts["verdicts"]["calls"] == 50_000
    assert view.report["cost_usd"] == pytest.approx(4.4 * view.report["chip_hours"])
    assert "verdicts cost the most" in view.text
    bought = see(evaluate, **asked, judge_price="1,4", api_price="0.1,0.4").report
    assert bought["chip_hours"] == 0
    verdicts, answers = 50_000 * (3000 * 1 + 200 * 4), 5000 * 1000 * 0.5
    assert bought["cost_usd"] == pytest.approx((verdicts + answers) / 1e6)


def test_what_is_said_of_published_runs_is_what_the_bench_finds():
    import statistics

    from bench_generation import ERRORS, KINDS

    dense = [row for row in KINDS["load"] if row["model"].startswith("llama-3")]
    sparse = [row for row in KINDS["load"] if not row["model"].startswith("llama-3")]
    judgements = {"dense": ("load", dense), "sparse": ("load", sparse)}
    for name, (kind, rows) in (judgements | {"grpo": ("grpo", KINDS["grpo"])}).items():
        times = sorted(1 / (1 + ERRORS[kind](row)) for row in rows)
        last, ratio = len(times) - 1, published_ratio(name)
        assert ratio.rows == len(times)
        expected = times[round(0.1 * last)], statistics.median(times), times[round(0.9 * last)]
        assert (ratio.low, ratio.middle, ratio.high) == pytest.approx(expected, abs=0.006)
        inside = sum(ratio.low - 0.006 <= time <= ratio.high + 0.006 for time in times)
        assert inside >= 0.78 * len(times)
