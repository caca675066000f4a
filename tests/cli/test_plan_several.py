"""plan-cluster on several chips, and on lists of runs."""

import gzip
import json
from pathlib import Path

import pytest
from plan_calls import call, report

RUNS = [
    {"name": "small", "params": "8B", "tokens": "1T", "chip": "h100"},
    {"params": 1.6e12, "active": "49B", "chips": 150},
    {"params": "70B", "chips": 2},
]
LINES = "".join(json.dumps(row) + "\n" for row in RUNS)


@pytest.fixture
def runs(tmp_path: Path) -> str:
    path = tmp_path / "runs.jsonl"
    path.write_text(LINES)
    return str(path)


def test_one_chip_compared_is_the_plan_of_that_chip() -> None:
    plan = report("--params 8B --tokens 1T --chip h200")
    (row,) = report("--params 8B --tokens 1T --compare h200")["rows"]
    best = plan["rows"][0]
    assert (row["chips"], row["finishes_s"]) == (best["chips"], best["finishes_s"])
    assert row["costs_usd"]["neocloud"] == best["costs"][0]["cost_usd"]
    assert row["chip_hours"] == pytest.approx(plan["chip_hours"])


def test_a_chip_without_a_price_has_a_dash_and_the_cheapest_is_named() -> None:
    lines = call("--params 8B --tokens 1T --compare b200,v7,v6e").stdout.splitlines()
    row = next(line.split() for line in lines if line.startswith("tpu-v7"))
    assert row[-4:] == ["-", "-", "-", "compute"]
    rows = report("--params 8B --tokens 1T --compare b200,v7,v6e")["rows"]
    bills = {row["name"]: min(row["costs_usd"].values()) for row in rows if row["costs_usd"]}
    least = min(bills, key=lambda name: bills[name])
    assert f"cheapest on {least.upper()}" in lines[-1]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--compare b200,b20", "--compare: 'b20' (expected a100-40gb,"),
        ("--compare b200,b200", "each chip once"),
        ("--compare b200,,h100", "empty part"),
        ("--compare b200 --chip h100", "--compare: not together with --chip"),
        ("--compare b200,h100 --chips 2", "use --chips"),
    ],
)
def test_comparisons_that_cannot_be(words: str, hint: str) -> None:
    asked = call(f"--params 70B {words}")
    assert asked.code in (2, 3) and hint in asked.stderr and not asked.stdout


def test_each_run_of_a_list_is_the_plan_of_its_row(runs: str) -> None:
    rows = report(runs)["rows"]
    assert [row["name"] for row in rows] == ["small", "runs.jsonl:2", "runs.jsonl:3"]
    alone = report("--params 1.6T --active 49B --chips 150")
    assert rows[1]["finishes_s"] == alone["rows"][0]["finishes_s"]
    assert rows[0]["chip"] == "h100"
    assert rows[2]["chips"] is None if "chips" in rows[2] else rows[2]["error"]
    assert "use --chips" in rows[2]["error"]


def test_flags_stand_in_for_what_a_row_does_not_say(runs: str) -> None:
    small, given, _ = report(f"{runs} --mfu 50 --chips 200")["rows"]
    assert (small["mfu"], small["chips"]) == (0.5, 200)
    assert given["chips"] == 150


@pytest.mark.parametrize("form", ["stdin", "gzip", "parquet"])
def test_a_list_may_come_in_other_forms(form: str, tmp_path: Path) -> None:
    if form == "gzip":
        with gzip.open(tmp_path / "runs.jsonl.gz", "wt") as file:
            file.write(LINES)
    elif form == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
        import pyarrow as pa

        blank = dict.fromkeys(("name", "active", "tokens", "chip", "chips"))
        rows = [blank | row | {"params": str(row["params"])} for row in RUNS]
        parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "runs.parquet")
    name = {"stdin": "-", "gzip": "runs.jsonl.gz", "parquet": "runs.parquet"}[form]
    path = name if form == "stdin" else str(tmp_path / name)
    rows = report(path, LINES if form == "stdin" else None)["rows"]
    assert [row["error"] is None for row in rows] == [True, True, False]


def test_rows_out_are_rows_in(runs: str, tmp_path: Path) -> None:
    done = call(f"{runs} --to jsonl")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in rows] == ["small", "runs.jsonl:2", "runs.jsonl:3"]
    assert rows[0]["cost_usd"] > 0 and rows[0]["cost_at"] == "neocloud"


@pytest.mark.parametrize(
    ("text", "code", "hint"),
    [
        ("", 65, "no runs"),
        ("{", 65, "a.jsonl:1"),
        ("3", 65, "JSON object"),
        ('{"parms": 3}', 65, "did you mean params"),
        ('{"params": "8X"}', 65, "unit 'X'"),
        ('{"params": "8B", "chips": 1.5}', 65, "whole number"),
        ('{"params": "8B", "preempt": 30}', 65, "did you mean 30d"),
    ],
)
def test_faulty_lists_name_the_line(text: str, code: int, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    asked = call(str(path))
    assert asked.code == code and hint in asked.stderr, asked.stderr
    assert asked.stderr.count("\n") == 1


def test_no_such_list_is_a_usage_error() -> None:
    asked = call("none.jsonl")
    assert asked.code == 2 and "expected a list of runs" in asked.stderr


def test_a_config_json_is_an_input_too(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000,
        "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = "--tokens 1B --price 2"
    assert report(f"{tmp_path} {words}") | {"inputs": 0} == report(
        f"--model {tmp_path}/config.json {words}"
    ) | {"inputs": 0}
    rows = report(f"{tmp_path} {words} --compare b200,h100")["rows"]
    assert [row["params"] for row in rows] == [report(f"{tmp_path} {words}")["params"]] * 2


def test_stops_and_limits_apply_to_each_chip() -> None:
    words = "--params 8B --tokens 1T"
    alone = report(f"{words} --chip h200 --preempt 6h")
    (row,) = report(f"{words} --compare h200 --preempt 6h")["rows"]
    assert row["finishes_s"] == pytest.approx(alone["stops"]["wall_s"])
    billed = alone["stops"]["billed_s"] * alone["stops"]["billed_chips"] / 3600
    price = alone["prices"][0]["usd_per_chip_hour"]
    assert row["costs_usd"]["neocloud at 50%"] == pytest.approx(billed * price)
    dear, cheap = report(f"{words} --compare v5p,b200 --max-cost 100000")["rows"]
    assert "--max-cost" in dear["error"] and cheap["limit"]["left_usd"] > 0


@pytest.mark.parametrize("words", ["--explain --search", "--emit slurm --search"])
def test_what_is_of_one_plan_is_refused(words: str) -> None:
    asked = call(f"--params 8B --compare b200,h100 {words}")
    assert asked.code == 2 and "not together with --compare" in asked.stderr
