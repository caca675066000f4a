"""One question has one number: text, JSON, rows and charts show the same, to the digits shown."""

import json
import re

import pytest
from plan_calls import call, report

from sabia.core.plan.money.prices import short_money
from sabia.core.plan.output.table import span
from sabia.core.units import format_duration

RUNS = [
    "--params 1.6T --active 49B",
    "--params 8B --tokens 15T --chip h100 --price 2.5,7",
    "--params 70B --chip h200 --chips 512 --preempt 12h",
    "--params 30B --active 3B --chip v5p --lora-rank 16",
    "--params 8B --chip h100 --chips 64 --search",
    "--params 8B --chip h100 --fixed-layout fsdp=32,micro-batch=1",
]


@pytest.mark.parametrize("words", RUNS)
def test_text_json_rows_and_charts_agree(words: str, tmp_path) -> None:
    words = f"{words} --deadline 900d,400d"
    found, path = report(words), tmp_path / "plan.html"
    text = call(f"{words} --plot {path}").stdout
    rows = [json.loads(line) for line in call(f"{words} --to jsonl").stdout.splitlines()]
    lines = [line.split() for line in text.splitlines()]
    for row, flat in zip(found["rows"], rows, strict=True):
        assert {key: flat[key] for key in row} == row
        (cells,) = [cells for cells in lines if cells[:1] == [format_duration(row["deadline_s"])]]
        assert str(row["chips"]) in [cell.replace(",", "") for cell in cells]
        assert span(row["finishes_s"]) in cells
        assert [short_money(cost["cost_usd"]) for cost in row["costs"]] == cells[
            -len(row["costs"]) :
        ]
    cheapest = min((row for row in found["rows"]), key=lambda row: row["chips"])
    assert f"{cheapest['chips']}" in re.search(r"verdict.*", text)[0]
    assert text.strip().splitlines()[0].split()[1] in path.read_text()


def test_a_comparison_and_a_list_give_the_numbers_of_the_plan_alone(tmp_path) -> None:
    words = "--params 70B --deadline 400d --preempt 24h --carbon"
    alone = report(f"{words} --chip h100")
    compared = report(f"{words} --compare h100")["rows"][0]
    listed = report("- ", '{"params": "70B", "deadline": "400d", "preempt": "24h", "carbon": true,'
                    ' "chip": "h100"}\n')["rows"][0]  # fmt: skip
    for row in (compared, listed):
        assert row["stops"] == alone["stops"] and row["carbon"] == alone["carbon"]
        assert row["finishes_s"] == alone["rows"][0]["finishes_s"]
        assert row["chips"] == alone["rows"][0]["chips"]
    flat = json.loads(call(f"{words} --compare h100 --to jsonl").stdout)
    assert flat["carbon_tons_co2e"] == alone["carbon"]["tons_co2e"]
    assert flat["cost_usd"] == min(compared["costs_usd"].values())


def test_a_run_that_stops_make_late_takes_more_chips_or_exits_with_3() -> None:
    words = "--params 70B --chip h100 --preempt 6h --deadline 30d"
    row = report(words)["rows"][0]
    calm = report(words.replace("--preempt 6h ", ""))["rows"][0]
    assert row["work_s"] < row["finishes_s"] <= 30 * 86400 and row["chips"] > calm["chips"]
    late = call(f"{words} --chips {calm['chips']}")
    assert late.code == 3 and late.stdout == ""
    chips, days = re.findall(
        r"with interruptions, .*use --chips (\d+) or --deadline (\d+)d", late.stderr
    )[0]
    assert int(chips) == row["chips"]
    slower = report(words.replace("30d", f"{days}d") + f" --chips {calm['chips']}")["rows"][0]
    assert 30 * 86400 < slower["finishes_s"] <= int(days) * 86400
