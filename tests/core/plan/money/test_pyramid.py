"""Pyramids of runs: hours given or computed, API calls, storage, sums, files that are refused."""

import datetime

import pytest

from sabia.core.errors import BadData, UsageError
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan import answer

TODAY = datetime.date(2026, 11, 21)


def sums(tmp_path, text, **settings):
    path = tmp_path / "pyramid.toml"
    path.write_text(text)
    return answer.answer(PlanOptions(budget=str(path), **settings), TODAY)


def test_an_item_may_give_a_model_instead_of_hours(tmp_path):
    text = '[[item]]\nname = "a"\nruns = 2\nparams = "1.6T"\nactive = "49B"\ntokens = "500B"\n'
    output = sums(tmp_path, text)
    assert output.report["rows"][0]["chip_hours_each"] == pytest.approx(45_370.4, rel=1e-6)
    assert output.report["chip_hours"] == pytest.approx(2 * 45_370.4, rel=1e-6)
    halved = sums(tmp_path, text, mfu=PlanOptions.assumed("mfu") / 2)
    assert halved.report["chip_hours"] == pytest.approx(4 * 45_370.4, rel=1e-6)


def test_a_range_of_runs_counts_by_its_middle(tmp_path):
    output = sums(tmp_path, '[[item]]\nname = "a"\nruns = [1, 2]\nchip_hours = "45K"\n')
    assert output.report["rows"][0]["runs"] == 1.5
    assert output.report["chip_hours"] == 67_500
    assert "1-2" in output.text


def test_price_flag_over_file_over_data(tmp_path):
    item = '[[item]]\nname = "a"\nchip_hours = 10\n'
    assert sums(tmp_path, item).report["cost_usd"] == pytest.approx(44)
    assert sums(tmp_path, "price = 2\n" + item).report["cost_usd"] == pytest.approx(20)
    flag = sums(tmp_path, "price = 2\n" + item, price="$3")
    assert flag.report["cost_usd"] == pytest.approx(30)


def test_shares_and_groups_add_up(tmp_path):
    item = '[[item]]\nname = "{}"\ngroup = "{}"\nchip_hours = {}\n'
    text = "".join(item.format(*x) for x in [("a", "g", 1), ("b", "g", 2), ("c", "", 5)])
    output = sums(tmp_path, text).report
    assert sum(row["share"] for row in output["rows"]) == pytest.approx(1)
    assert [(g["group"], g["chip_hours"]) for g in output["groups"]] == [("g", 3)]


def test_api_calls_are_paid_by_the_token(tmp_path):
    text = """
[[item]]
name = "judge"
runs = 500
input_tokens = "40M"
output_tokens = "2M"
usd_per_million = [0.5, 2.0]
"""
    row = sums(tmp_path, text).report["rows"][0]
    assert (row["kind"], row["provider"], row["chip"]) == ("judge", "by use", "")
    assert row["usd_each"] == pytest.approx(24)
    assert (row["chip_hours"], row["cost_usd"]) == (0, pytest.approx(12_000))


def test_rollouts_by_a_measured_speed(tmp_path):
    text = """
goodput = 0.8
[[item]]
name = "rollouts"
tokens = "3.6B"
tokens_per_chip_s = 1000
"""
    row = sums(tmp_path, text).report["rows"][0]
    assert (row["kind"], row["chip_hours"]) == ("rollout", pytest.approx(1000 / 0.8))


def test_an_evaluation_is_worked_out(tmp_path):
    from sabia.core.plan.chips import find_chip
    from sabia.core.plan.serving.asked import table_cost

    suite = {"items": 1000, "prompt_tokens": 800, "output_tokens": 600, "params": "8B",
             "judge_calls": 5, "judge_prompt_tokens": 1500, "judge_output_tokens": 60,
             "judge_usd_per_million": [0.5, 2.0]}  # fmt: skip
    keys = "\n".join(f"{k} = {v!r}" for k, v in suite.items())
    output = sums(tmp_path, f'[[item]]\nname = "e"\nruns = 3\n[item.evaluation]\n{keys}\n')
    once = table_cost(suite, find_chip("b200"), "e")
    assert output.report["chip_hours"] == pytest.approx(3 * once.chip_hours)
    assert output.report["cost_usd"] == pytest.approx(3 * once.cost_usd(4.4))
    assert output.report["kinds"][0]["kind"] == "evaluation"


def test_storage_by_size_and_time(tmp_path):
    text = """
[[item]]
name = "checkpoints"
storage = "100TB"
keep = "90d"
usd_per_gb_month = 0.02
"""
    row = sums(tmp_path, text).report["rows"][0]
    assert (row["kind"], row["cost_usd"]) == ("storage", pytest.approx(100e3 * 3 * 0.02))


def test_goodput_lora_mfu_and_chip_of_one_item(tmp_path):
    model = 'params = "1.6T"\nactive = "49B"\ntokens = "500B"\n'
    text = f"""
mfu = 0.4
goodput = "90%"
price = 4.4
[[item]]
name = "file's"
{model}
[[item]]
name = "own"
chip = "h100"
mfu = "30%"
lora = true
goodput = 1
{model}
[[item]]
name = "as paid"
chip_hours = 100
"""
    rows = sums(tmp_path, text).report["rows"]
    assert rows[0]["chip_hours"] == pytest.approx(45_370.4 / 0.9, rel=1e-6)
    own = 4 * 49e9 * 500e9 / (989e12 * 0.3) / 3600
    assert (rows[1]["chip"], rows[1]["chip_hours"]) == ("h100", pytest.approx(own))
    assert rows[2]["chip_hours"] == 100


def test_offers_on_file_and_who_is_paid(tmp_path):
    text = """
[[item]]
name = "small"
provider = "verda"
chip = "h100"
chip_hours = 100
[[item]]
name = "spot"
provider = "google"
chip = "v5p"
spot = true
chip_hours = 100
[[item]]
name = "own"
price = 2
chip_hours = 100
"""
    output = sums(tmp_path, text, price="9").report
    paid = {row["provider"]: row["cost_usd"] for row in output["providers"]}
    assert set(paid) == {"verda", "google", "own price"}
    assert paid["own price"] == 200
    assert paid["verda"] == pytest.approx(229)
    assert output["price_usd_per_chip_hour"] is None
    assert "paid to" in sums(tmp_path, text).text


def test_a_contingency_is_put_on_top(tmp_path):
    text = 'price = 2\ncontingency = "10%"\n[[item]]\nname = "a"\nchip_hours = 1000\n'
    output = sums(tmp_path, text)
    assert (output.report["cost_usd"], output.report["contingency_usd"]) == (2000, 200)
    assert output.report["rows"][0]["share"] == 1
    assert "= with contingency" in output.text and "$2.2K" in output.text


def test_a_price_that_is_too_old_is_not_used(tmp_path):
    path = tmp_path / "pyramid.toml"
    path.write_text('[[item]]\nname = "a"\nchip_hours = 10\n')
    with pytest.raises(UsageError, match=r"--budget: .*more than 365 days old.*--price"):
        answer.answer(PlanOptions(budget=str(path)), datetime.date(2030, 1, 1))
    path.write_text('price = 2\n[[item]]\nname = "a"\nchip_hours = 10\n')
    assert answer.answer(PlanOptions(budget=str(path)), datetime.date(2030, 1, 1)).warnings == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("price = 4", "no items"),
        ("item = 3", "no items"),
        ("[[item]]\nname = 'a'", "has no resources of a run .expected one of chip_hours"),
        ("[[item]]\nname = 'a'\nchip_hours = 1\nparams = '1B'", "has chip_hours and params"),
        ("[[item]]\nname = 'a'\nparams = '1B'", "has no tokens"),
        ("[[item]]\nname = 'a'\nchip_hours = 1\nhours = 1", "unknown hours"),
        ("[[item]]\nname = 'a'\nchip_hours = 1\nkind = 'fun'", "kind 'fun' .expected one of"),
        ("[[item]]\nname = 'a'\nchip_hours = 1\ntokens = 1", "unknown tokens"),
        ("goodput = 0\n[[item]]\nname = 'a'\nchip_hours = 1", "goodput 0 .expected more than 0"),
        ("[[item]]\nname = 'a'\nstorage = '1TB'", "has no keep"),
        ("[[item]]\nname = 'a'\nstorage = '1TB'\nkeep = '1d'", "usd_per_gb_month None"),
        ("[[item]]\nname = 'a'\nusd_per_million = [1, 2]", "has no input_tokens"),
        ("[[item]]\nname = 'a'\ntokens_per_chip_s = 0", "expected more than 0"),
        ("[[item]]\nname = 'a'\nevaluation = 3", "expected a TOML table"),
        ("item = [3]", "expected a TOML table with a name"),
        ("[[item]]\nname = 'a'\nchip_hours = 1\nruns = [2, 1]", "runs"),
        ("prices = 4\n[[item]]\nname = 'a'\nchip_hours = 1", "unknown prices"),
        ("price = 0\n[[item]]\nname = 'a'\nchip_hours = 1", "more than 0"),
    ],
)
def test_faulty_files_are_refused(tmp_path, text, words):
    with pytest.raises(BadData, match=words):
        sums(tmp_path, text)


def test_a_missing_file_and_stray_settings_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        answer.answer(PlanOptions(budget=str(tmp_path / "none.toml")))
    with pytest.raises(UsageError, match="expected TOML"):
        sums(tmp_path, "[[item")
    with pytest.raises(UsageError, match="--tokens: not together with --budget"):
        answer.answer(PlanOptions(budget="x.toml", tokens=1e9))
