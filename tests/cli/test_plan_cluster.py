"""sabia plan-cluster as a user calls it: streams, formats, exit codes, one-line errors."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plan_calls import call, process, report

ROOT = Path(__file__).parent.parent.parent
ARTICLE = "--params 1.6T --active 49B"
FULL = f"{ARTICLE} --tokens 500B --seq 8k --chip b200 --deadline 30d,14d,7d"
HEAD = "DEADLINE BY COMPUTE BY MEMORY USE FINISHES NEOCLOUD $4.40 BIG CLOUD $12"


def test_the_table_of_the_article() -> None:
    lines = [line.split() for line in call(FULL).stdout.splitlines()]
    start = lines.index(HEAD.split())
    assert lines[start + 1 : start + 4] == [
        ["30d", "64", "152", "152", "12.4d", "$0.20M", "$0.54M"],
        ["14d", "136", "152", "152", "12.4d", "$0.20M", "$0.54M"],
        ["7d", "271", "152", "271", "7.0d", "$0.20M", "$0.54M"],
    ]


def test_the_lines_around_the_table() -> None:
    text = " ".join(call(FULL).stdout.split())
    for words in (
        "1.6T total / 49B active (assumed 61 layers, hidden 7168) compute 1.47e23 FLOP (6ND)",
        "b200 2.25 PFLOP/s x 40% MFU = 0.90 PFLOP/s/GPU 45,370 GPU-hours",
        "state 25.6 TB (16 B/param) + activations 3.5 TB (4M tokens live) = 29.1 TB",
        "memory-bound: 152 B200, finishes in 12.4 days, $0.20M. "
        "With gradient accumulation 134 hold the state.",
    ):
        assert words in text


def test_the_bare_call_is_the_same_plan_with_its_assumptions() -> None:
    bare, full = call(ARTICLE), call(FULL)
    assert bare.stdout.splitlines()[:8] == full.stdout.splitlines()[:8]
    for words in ("500B tokens", "192 GB", "every byte usable", "40% MFU", "prices seen 20"):
        assert words in bare.stdout
    assert "usable the state" not in bare.stderr


def test_the_plain_plan_ends_with_what_the_search_finds() -> None:
    lines = call(ARTICLE).stdout.splitlines()
    basis, found = lines[-2:]
    assert basis.startswith("basis     the arithmetic of the article: 40% MFU is assumed")
    searched = call(f"{ARTICLE} --search").stdout
    (verdict,) = re.findall(r"(?m)^verdict   (.*)$", searched)
    assert found == f"search    {verdict} --search shows the layouts."
    beside = report(ARTICLE)["search"]
    row = report(f"{ARTICLE} --search")["rows"][0]
    assert beside["error"] is None
    assert [beside[key] for key in ("chips", "finishes_s", "mfu", "layout")] == [
        row[key] for key in ("chips", "finishes_s", "mfu", "layout")
    ]
    none = call("--params 8B --lora --chips 8").stdout.splitlines()[-1]
    assert none.startswith("search    finds none: --lora: ") and "--lora-rank" in none


def test_json_has_the_promised_keys_and_figures() -> None:
    found = report(ARTICLE)
    expected = {
        "schema_version": 2, "params": 1.6e12, "active_params": 49e9, "tokens": 500e9,
        "train_flops": 1.47e23, "flops_per_chip_s": 0.9e15, "chip_hours": 45370.37,
        "state_bytes": 25.6e12, "activation_bytes": 3.498e12,
    }  # fmt: skip
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-4), key
    row = found["rows"][0]
    assert row["deadline_s"] == 2_592_000
    assert row["compute_min_chips"] == pytest.approx(63.0144, abs=1e-4)
    assert (row["memory_min_chips"], row["chips"]) == (152, 152)
    assert isinstance(row["memory_min_chips"], int) and isinstance(row["chips"], int)
    assert row["finishes_s"] / 86400 == pytest.approx(12.437, abs=1e-3)
    neocloud, big_cloud = row["costs"]
    assert neocloud["price_usd_per_chip_hour"] == 4.4
    assert neocloud["cost_usd"] == pytest.approx(199_630, abs=1)
    assert big_cloud["cost_usd_per_day"] == pytest.approx(152 * 24 * 12)


def test_every_option_reaches_the_plan() -> None:
    words = (
        "--params 8B --active 2B --layers 10 --hidden 1000 --tokens 1T --seq 4k --batch-tokens 2M "
        "--state-recipe jax10 --chip h100 --hbm 40GB --chips 500 --mfu 50 --deadline 9w --price $3"
    )
    found = report(words)
    assert (found["layers"], found["hidden"], found["sequence_tokens"]) == (10, 1000, 4096)
    assert found["activation_bytes"] == 10 * 1000 * 2e6 * 2
    assert (found["state_bytes"], found["hbm_bytes"], found["mfu"]) == (80e9, 40e9, 0.5)
    assert found["train_flops"] == pytest.approx(6 * 2e9 * 1e12)
    assert found["rows"][0]["chips"] == 500
    assert found["rows"][0]["deadline_s"] == 9 * 7 * 86400
    assert [cost["price_usd_per_chip_hour"] for cost in found["rows"][0]["costs"]] == [3.0]
    assert found["assumed"] == []


def test_stops_reach_the_plan() -> None:
    words = "--failure-rate 0.2% --preempt 6h --restart 5m --bucket-gbps 16 --spot-share 40%"
    stops = report(f"{ARTICLE} {words}")["stops"]
    assert (stops["failures_per_chip_day"], stops["preemption_s"]) == (0.002, 21600)
    assert (stops["restart_s"], stops["bucket_bytes_per_s"], stops["spot_share"]) == (
        300,
        16e9,
        0.4,
    )
    assert stops["upload_s"] == pytest.approx(1200)
    assert stops["wall_over_work"] > 1.05
    assert "stops" not in report(ARTICLE)


def test_budget_of_the_example() -> None:
    found = process("--budget examples/pyramid.toml", cwd=ROOT)
    assert "322,500" in found.stdout and "54.3%" in found.stdout
    assert found.stderr == ""


def test_rows_to_parquet_and_json_lines(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    out = tmp_path / "plan.parquet"
    assert call(f"{ARTICLE} -o {out}").code == 0
    rows = parquet.read_table(out).to_pylist()
    assert [row["chips"] for row in rows] == [152, 152, 271]
    made_by = json.loads(parquet.read_schema(out).metadata[b"sabia"])
    assert made_by["command"] == "plan-cluster" and made_by["options"]["active"] == 49e9
    lines = call(f"{ARTICLE} --to jsonl").stdout.splitlines()
    assert [json.loads(line) for line in lines] == rows
    streamed = process(f"{ARTICLE} -o -", text=False)
    assert streamed.stdout[:4] == b"PAR1"


def test_a_report_is_printed_beside_the_rows_that_are_written(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    out = tmp_path / "plan.parquet"
    assert report(f"{ARTICLE} -o {out}") == report(ARTICLE)
    assert parquet.read_table(out).num_rows == 3


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--chip h2", ["h20", "h200"]),
        ("--compare b200,h2", ["b200,h20", "b200,h200"]),
        ("--stack mega", ["megatron", "megatron-graphs", "megatron-2021"]),
        ("--provider AW", ["AWS"]),
        ("--state-recipe adam", ["adamw16", "adam8bit"]),
        ("--weights nv", ["nvfp4"]),
    ],
)
def test_values_are_completed_from_the_planner_s_data(words: str, names: list[str]) -> None:
    asked = {"COMP_WORDS": f"sabia plan-cluster {words}", "COMP_CWORD": "3",
             "_SABIA_COMPLETE": "complete_bash"}  # fmt: skip
    done = subprocess.run([Path(sys.executable).parent / "sabia"], env=os.environ | asked,
                          capture_output=True, text=True)  # fmt: skip
    assert done.stdout.split() == names


def test_quiet_drops_notes_and_keeps_the_table() -> None:
    loud, quiet = (call(f"{ARTICLE} --price 4.4,12 {flag}") for flag in ("", "-q"))
    assert loud.stdout == quiet.stdout
    assert loud.stderr and not quiet.stderr


def test_file_and_environment_set_options(tmp_path: Path) -> None:
    config = tmp_path / "plan.toml"
    config.write_text('params = "1.6T"\nactive = "49B"\nchips = 150\nmfu = 0.5\n')
    assert report(f"--config {config}")["rows"][0]["chips"] == 150
    environment = os.environ | {"SABIA_PLAN_CLUSTER_CHIPS": "160"}
    done = process(f"--config {config} --json", env=environment)
    assert json.loads(done.stdout)["rows"][0]["chips"] == 160
    assert json.loads(done.stdout)["mfu"] == 0.5
