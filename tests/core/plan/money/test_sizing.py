"""Size from chips and time: optima against trying, repeats against the paper, terms by algebra."""

import math

import pytest
from plan_calls import call, report

from sabia.core.plan.money.scaling import BESIROGLU, REPEATED_TOKENS, Budget, Pair, params_for, worn


def test_the_best_pair_is_the_optimum_of_the_law_where_memory_and_data_are_enough():
    budget = Budget(1e24, BESIROGLU, None, math.inf)
    best, optimum = budget.best(), BESIROGLU.optimal(1e24)
    assert best.params == pytest.approx(optimum.params, rel=0.01)
    assert best.train_flops == pytest.approx(1e24)
    assert Budget(1e24, BESIROGLU, None, 5e9).best().params <= 5e9


def test_repeats_of_data_are_worth_less_and_move_the_optimum():
    """arXiv 2305.16264: up to 4 epochs are almost as good as new data; far more are worth R + 1."""
    assert worn(4, 1, REPEATED_TOKENS) == pytest.approx(3.73, abs=0.01)
    assert worn(1e6, 1, REPEATED_TOKENS) == pytest.approx(1 + REPEATED_TOKENS)
    assert worn(1, 1, REPEATED_TOKENS) == 1
    free, bound = (Budget(1e23, BESIROGLU, unique, math.inf) for unique in (None, 3e10))
    pair = free.best()
    assert bound.loss(pair) > free.loss(pair)
    assert bound.loss(bound.best()) <= bound.loss(pair)
    few = Pair(1e9, 2e10)
    assert bound.loss(few) == BESIROGLU.loss(1e9, 2e10)


def test_the_size_that_tokens_are_optimal_for_inverts_the_optimum():
    for flops in (1e20, 1e24):
        best = BESIROGLU.optimal(flops)
        assert params_for(BESIROGLU, best.tokens) == pytest.approx(best.params, rel=1e-9)


def test_chips_and_a_month_give_a_model():
    seen = report("--chips 10000 --chip h100 --deadline 30d --price 2")
    row = seen["rows"][0]
    assert row["train_flops"] == pytest.approx(10000 * 989e12 * 0.4 * 30 * 86400)
    assert row["params"] == pytest.approx(BESIROGLU.optimal(row["train_flops"]).params, rel=0.01)
    assert row["cost_usd"] == pytest.approx(10000 * 720 * 2) and row["fits"]
    assert [round(one["tokens_per_param"]) for one in seen["curve"]][:3] == [5, 10, 20]
    again = report(f"--params {row['params']} --tokens {row['tokens']} --chips 10000 --chip h100"
                   " --deadline 31d")  # fmt: skip
    assert again["rows"][0]["finishes_s"] == pytest.approx(30 * 86400, rel=1e-6)


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [("--tokens-per-param 20", "tokens_per_param", 20), ("--tokens 1T", "tokens", 1e12)],
)
def test_the_ratio_or_the_tokens_may_be_given(words, key, value):
    row = report(f"--chips 256 --chip h100 --deadline 14d {words}")["rows"][0]
    assert row[key] == pytest.approx(value)
    assert row["train_flops"] == pytest.approx(256 * 989e12 * 0.4 * 14 * 86400)


def test_with_interruptions_the_expected_end_is_the_deadline():
    words = "--chips 256 --chip h100 --preempt 6h --restart 20m"
    row = report(f"{words} --deadline 14d")["rows"][0]
    assert row["work_s"] < 14 * 86400
    again = report(f"{words} --params {row['params']} --tokens {row['tokens']} --deadline 15d")
    assert again["rows"][0]["finishes_s"] == pytest.approx(14 * 86400, rel=1e-3)


def test_a_model_that_the_chips_do_not_hold_is_marked():
    seen = report("--chips 8 --chip a100-40gb --deadline 52w")
    assert seen["rows"][0]["fits"] and not seen["curve"][0]["fits"]
    assert "does not fit" in call("--chips 8 --chip a100-40gb --deadline 52w").stdout


@pytest.mark.parametrize(
    "words",
    ["--lora", "--search", "--compare h100,a100", "--active 3B", "--serve-tokens 1T", "--carbon"],
)
def test_what_needs_a_size_is_refused_without_one(words):
    done = call(f"--chips 64 {words}")
    assert done.code == 2 and "--params" in done.stderr


def test_a_missing_size_names_the_question():
    assert "--chips 64 --deadline 30d" in call("--tokens 1T").stderr
    assert "--tokens-per-param" in call("--params 8B --chips 8 --tokens-per-param 20").stderr


PLAN = "--params 8B --tokens 1T --chip h100 --chips 512 --price 2"


def test_a_reservation_is_paid_for_its_term():
    seen = report(f"{PLAN} --reserved 40% --term 90d")["reserved"]
    assert seen["term_cost_usd"] == pytest.approx(512 * 90 * 24 * 2 * 0.6)
    hours = 6 * 8e9 * 1e12 / (989e12 * 0.4) / 3600
    assert seen["by_hour_cost_usd"] == pytest.approx(2 * hours)
    assert seen["used_share"] == pytest.approx(hours / (512 * 90 * 24))
    exact = report(f"{PLAN} --reserved 40% --term {hours / 512 / 0.6}h")["reserved"]
    assert exact["term_cost_usd"] == pytest.approx(exact["by_hour_cost_usd"])
    assert exact["used_share"] == pytest.approx(exact["pays_from_share"])


def test_nights_and_weekends_are_what_production_leaves():
    """Hour by hour over many weeks: 14 h nights, a weekend of 62 h, 15 min lost in each window."""
    seen = report(f"{PLAN} --production 10h")
    idle, plain = seen["idle"], seen["rows"][0]["finishes_s"]
    work = 4 * (14 - 0.25) + (14 + 48 - 0.25)
    assert idle["work_share"] == pytest.approx(work / 168)
    assert idle["finishes_s"] == pytest.approx(plain * 168 / work)
    assert call(f"{PLAN} --production 25h").code == 2
    assert call(f"{PLAN} --production 23h --restart 2h").code == 3


def test_bad_tuning_costs_twice_as_in_the_article():
    """15 days at the tuned MFU, 30 at half of it: up to 15 days of tuning pay."""
    words = "--params 8B --tokens 1T --chip h100 --chips 93 --price 2 --mfu 40% --first-mfu 20%"
    seen = report(f"{words} --tuning 5d")
    tuned, at = seen["rows"][0]["finishes_s"], seen["tuning"]
    assert at["at_once_s"] == pytest.approx(2 * tuned)
    assert at["pays_up_to_s"] == pytest.approx(tuned)
    assert at["saved_usd"] == pytest.approx((tuned - 5 * 86400) / 3600 * 93 * 2)
    assert report(f"{words} --tuning 30d")["tuning"]["saved_usd"] < 0
    assert call(f"{words.replace('20%', '50%')}").code == 2


def test_seventy_billion_parameters_fit_one_gpu_of_80_gb_under_qlora():
    """Seed: QLoRA quantizes the base to 4 bits, so that 70B fine-tune on one 80 GB GPU."""
    words = "--params 70B --stage sft --tokens 50M --lora-rank 16 --chip h100 --chips 1"
    full, quantized = call(words), report(f"{words} --base-format nf4 --deadline 30d")
    assert full.code == 3
    adapters = quantized["adapter_params"] * 16
    assert quantized["state_bytes"] - adapters == pytest.approx(70e9 * 4.127 / 8, rel=1e-6)
    assert call("--params 70B --base-format nf4").code == 2


def test_compute_is_compared_with_the_threshold_of_the_law():
    seen = report("--params 405B --tokens 15.6T --chip h100 --carbon")["carbon"]
    assert seen["share_of_systemic_flops"] == pytest.approx(3.79, abs=0.01)
