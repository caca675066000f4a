"""Pyramids of runs: hours given or computed, ranges, groups, and files that are refused."""

import pytest

from sabia.core.errors import BadData, UsageError
from sabia.core.plan import answer, compute
from sabia.core.plan.settings import Settings


def sums(tmp_path, text, **settings):
    path = tmp_path / "pyramid.toml"
    path.write_text(text)
    return answer.answer(Settings(budget=str(path), **settings))


def test_an_item_may_give_a_model_instead_of_hours(tmp_path):
    text = '[[item]]\nname = "a"\nruns = 2\nparams = "1.6T"\nactive = "49B"\ntokens = "500B"\n'
    found = sums(tmp_path, text)
    assert found.report["rows"][0]["chip_hours_each"] == pytest.approx(45_370.4, rel=1e-6)
    assert found.report["chip_hours"] == pytest.approx(2 * 45_370.4, rel=1e-6)
    halved = sums(tmp_path, text, mfu=compute.DEFAULT_MFU / 2)
    assert halved.report["chip_hours"] == pytest.approx(4 * 45_370.4, rel=1e-6)


def test_a_range_of_runs_counts_by_its_middle(tmp_path):
    found = sums(tmp_path, '[[item]]\nname = "a"\nruns = [1, 2]\nchip_hours = "45K"\n')
    assert found.report["rows"][0]["runs"] == 1.5
    assert found.report["chip_hours"] == 67_500
    assert "1-2" in found.text


def test_price_flag_over_file_over_data(tmp_path):
    item = '[[item]]\nname = "a"\nchip_hours = 10\n'
    assert sums(tmp_path, item).report["cost_usd"] == pytest.approx(44)
    assert sums(tmp_path, "price = 2\n" + item).report["cost_usd"] == pytest.approx(20)
    flag = sums(tmp_path, "price = 2\n" + item, price="$3")
    assert flag.report["cost_usd"] == pytest.approx(30)


def test_shares_and_groups_add_up(tmp_path):
    item = '[[item]]\nname = "{}"\ngroup = "{}"\nchip_hours = {}\n'
    text = "".join(item.format(*x) for x in [("a", "g", 1), ("b", "g", 2), ("c", "", 5)])
    found = sums(tmp_path, text).report
    assert sum(row["share"] for row in found["rows"]) == pytest.approx(1)
    assert [(g["group"], g["chip_hours"]) for g in found["groups"]] == [("g", 3)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("price = 4", "no items"),
        ("item = 3", "no items"),
        ("[[item]]\nname = 'a'", "either chip_hours or params"),
        ("[[item]]\nname = 'a'\nchip_hours = 1\nparams = '1B'", "either chip_hours or params"),
        ("[[item]]\nname = 'a'\nparams = '1B'", "no tokens"),
        ("[[item]]\nname = 'a'\nhours = 1", "unknown hours"),
        ("[[item]]\nname = 'a'\nchip_hours = 1\nruns = [2, 1]", "runs"),
        ("prices = 4\n[[item]]\nname = 'a'\nchip_hours = 1", "unknown prices"),
        ("price = 0\n[[item]]\nname = 'a'\nchip_hours = 1", "more than 0"),
        ("[[item", "expected TOML"),
    ],
)
def test_faulty_files_are_refused(tmp_path, text, words):
    with pytest.raises(BadData, match=words):
        sums(tmp_path, text)


def test_a_missing_file_and_stray_settings_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        answer.answer(Settings(budget=str(tmp_path / "none.toml")))
    with pytest.raises(UsageError, match="belongs to one run"):
        answer.answer(Settings(budget="x.toml", tokens=1e9))
