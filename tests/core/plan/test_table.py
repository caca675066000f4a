"""The text of a plan: columns, rounding, lateness, and what a reader is told beside it."""

import datetime
import re
from pathlib import Path

import pytest

from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.plan import answer
from sabia.core.plan.money.prices import format_rate, short_money
from sabia.core.plan.output import remarks, table


def run(params=1.6e12, active=49e9, today=None, **settings):
    return answer.answer(PlanOptions(params=params, active=active, **settings), today)


def test_columns_line_up():
    lines = table.columns(["A", "LONG", "C"], [["aa", "1", "22222"], ["a", "10", "3"]])
    assert lines == ["A   LONG      C", "aa     1  22222", "a     10      3"]


def test_the_head_of_a_wide_table_takes_several_lines():
    lines = table.columns(["NAME", "AN, HOUR-LY RATE", "B"], [["a" * 60, "12345678", "c" * 9]])
    assert [line.split() for line in lines[:2]] == [["AN,"], ["HOUR-LY"]]
    assert lines[2].split() == ["NAME", "RATE", "B"] and max(map(len, lines)) == 81


def test_labelled_lines_wrap_in_a_terminal():
    text = "verdict   one two three four\nper day   12345 678 90\nTHE  TABLE  STAYS  AS  IT  IS"
    text += "\ncommand   sabia pretrain --mesh data=2\nneocloud                      2  4"
    assert table.wrapped(text, 80) == text
    assert table.wrapped(text, 20).split("\n") == [
        "verdict   one two", "          three four", "per day   12345 678", "          90",
        "THE  TABLE  STAYS  AS  IT  IS", "command   sabia \\", "          pretrain \\",
        "          --mesh \\", "          data=2", "neocloud                      2  4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("usd", "text"),
    [(199_630, "$0.20M"), (544_444, "$0.54M"), (15_840, "$15.8K"), (25.3, "$25.30"),
     (3.2e9, "$3.20B")],
)  # fmt: skip
def test_money_is_short(usd, text):
    assert short_money(usd) == text


def test_rates_show_cents_only_where_there_are_any():
    assert (format_rate(12.0), format_rate(4.4)) == ("$12", "$4.40")


def test_times_keep_a_decimal_of_days():
    assert [table.span(s) for s in (604_800, 1_074_560, 7200)] == ["7.0d", "12.4d", "2h"]


def test_a_late_row_says_so_and_the_verdict_says_what_it_needs():
    text = run(chips=150).text
    assert "12.6d late" in text
    assert "7d would need 271." in text
    assert "3.7M tokens" in text and "accumulate 2 micro-batches" in text


def test_a_short_run_is_told_in_hours():
    assert "finishes in 11.8h" in run(8e9, 8e9, tokens=20e9, chip="h100", deadline="12h").text


def test_lora_counts_four_operations():
    assert "(4ND, LoRA)" in run(lora=True).text


def test_own_prices_head_their_columns():
    text = run(price="$4.4,12usd/h").text
    assert "AT $4.40/H" in text and "AT $12/H" in text
    assert "prices seen" not in text


def test_memory_is_as_the_article_has_it_unless_given():
    assert run().report["memory_min_chips"] == 152
    planned = run(hbm=180e9)
    assert planned.report["memory_min_chips"] == 162
    assert not any("usable" in note for note in planned.notes)


def test_old_prices_warn_in_one_line():
    assert run(today=datetime.date(2026, 8, 2)).warnings == []
    (line,) = run(today=datetime.date(2027, 1, 1)).warnings
    assert "neocloud $4.40, big cloud $12 last seen 153 days ago" in line


def test_far_too_few_tokens_warn():
    lines = run(8e9, 8e9, tokens=1e8, price="1").warnings
    assert len(lines) == 1 and "far from any known run" in lines[0]


def test_stops_view():
    text = run(chips=150, preempt=6 * 3600.0, bucket_gbps=8.0).text
    assert "one every 6.7d, 36% within 3 days, a preemption every 6h" in text
    assert "40 min to storage; one every 40 min" in text
    assert "neocloud at 50%, " in text and "NEOCLOUD" in text and "$2.20" in text
    calm = run(chips=150, failure_rate=0.0).text
    assert "150 chips failing 0% a day: no failure" in calm
    assert "one at the end" in calm


def test_remarks_are_plain_lines():
    assert remarks.stale_lines((), datetime.date(2026, 1, 1)) == []


def test_every_text_has_a_use_and_every_use_a_text():
    folder = Path(answer.__file__).parent
    sources = [path.read_text() for path in (folder / "answer.py", *folder.glob("output/*.py"))]
    texts = table._lines()
    named = {name for name in texts if not name.startswith("resource_")}
    assert named <= set(re.findall(r'"(\w+)"', "".join(sources)))
    assert set(re.findall(r'words\(\s*"(\w+)"', "".join(sources))) <= texts.keys()
