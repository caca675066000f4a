"""Broken and odd lists of runs: one line, the exit code of bad data, and where it stands."""

import gzip
import json
from pathlib import Path

import pytest
from plan_calls import call

RUN = '{"params": "8B", "chip": "h100", "deadline": "900d"}'
BROKEN = [
    ("", "no runs"),
    ('{"params":', "stdin:1"),
    ("[" * 100_000, "stdin:1: maximum recursion depth"),
    ('{"params": NaN}', "nan is not a number"),
    ('{"params": true}', "expected a value"),
    ('{"params": "8B", "chips": 8.5}', "8.5 is not a whole number"),
    ('{"params": "8B", "chip": ""}', "--chip: is empty"),
    ('{"params": "8B", "plot": "x.svg"}', "--plot: cannot be set in a list of runs"),
    ('{"params": "8B", "json": true}', "--json: cannot be set in a list of runs"),
]


@pytest.mark.parametrize(("text", "hint"), BROKEN)
def test_a_broken_list_is_refused_in_one_line(text: str, hint: str) -> None:
    asked = call("-", text)
    assert asked.code == 65 and hint in asked.stderr, asked
    assert asked.stdout == "" and asked.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.jsonl", b"\xff\xfe\x00"), ("b.jsonl.gz", b"no"), ("d.parquet", b"PAR1"),
     ("c.jsonl.gz", gzip.compress(RUN.encode(), mtime=0)[:-5])],
    ids=["bytes.jsonl", "bytes.gz", "head.parquet", "cut.gz"],
)  # fmt: skip
def test_a_broken_file_is_bad_data(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    asked = call(str(tmp_path / name))
    assert asked.code == 65 and name in asked.stderr, asked
    assert "expected" in asked.stderr or "corrupt or cut short" in asked.stderr, asked
    assert asked.stderr.count("\n") == 1


def test_a_name_stays_on_its_line_and_a_byte_order_mark_is_no_error() -> None:
    named = RUN.replace("{", '{"name": "a\\nb\\u001b[31m\\ud800 ção", ')
    asked = call("- --json", "\ufeff" + named)
    assert asked.code == 0, asked
    assert json.loads(asked.stdout)["rows"][0]["name"] == "a b [31m  ção"


def test_a_config_too_deep_to_be_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "num_hidden_layers": 1000000000}')
    asked = call(f"--model {path}")
    assert asked.code == 2 and "num_hidden_layers is 1000000000" in asked.stderr


def test_a_list_goes_on_after_a_bad_line() -> None:
    asked = call("-", f"{RUN}\n[1]\n{RUN}")
    assert asked.code == 0 and "1 of 3 rows have no plan" in asked.stderr, asked
    assert asked.stdout.count("8B") == 2 and "stdin:2: " in asked.stdout, asked
