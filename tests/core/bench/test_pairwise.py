"""Answers compared in pairs, in both orders; what a dry run says of calls and dollars."""

import importlib.util
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from in_process import stage

from sabia.core.bench.rubrics.pairwise import read_better

STUB = Path(__file__).parents[2] / "openai_stub.py"
_spec = importlib.util.spec_from_file_location("openai_stub", STUB)
assert _spec is not None and _spec.loader is not None
openai_stub = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(openai_stub)

# answers of three models to four items: the number is their quality
ANSWERS = {"ann": [3, 1, 2, 0], "bob": [2, 1, 3, 1], "cal": [1, 1, 1, 2]}


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ('{"reason": "x", "better": "A"}', 1.0),
        ('I think {"better": "b"}', 0.0),
        ('{"better": "TIE"}', 0.5),
        ('{"better": "A"} or {"better": "B"}', None),
        ('{"better": "C"}', None),
        ("A", None),
    ],
)
def test_verdicts_are_read_or_there_are_none(reply: str, value: float | None) -> None:
    assert read_better(reply) == value


def written(folder: Path) -> dict:
    rows = [{"id": str(n), "q": f"Request {n}?", "rubric": "Numbers count."} for n in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "t.toml").write_text(
        'name = "t"\nkind = "rubric"\nscoring = "pairs"\ndata = "rows.jsonl"\nprompt = "{{q}}"\n'
        'metric = "win_rate"\nmax_new_tokens = 100\n'
    )
    for name, given in ANSWERS.items():
        (folder / f"{name}.jsonl").write_text("".join(
            json.dumps({"id": str(n), "response": f"quality {value}"}) + "\n"
            for n, value in enumerate(given)))  # fmt: skip
    return {"task": (str(folder / "t.toml"),), "judge_model": "j",
            "answers": tuple(str(folder / f"{name}.jsonl") for name in ANSWERS)}  # fmt: skip


def shown(text: str) -> list[int]:
    return [int(part.partition("quality ")[2][0]) for part in text.split("<answer-")[1:]]


def test_both_orders_give_win_rates_and_the_position_bias(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def judge(text: str) -> str:
        a, b = shown(text)
        assert "Numbers count." in text
        # an answer that is one better is not seen as such if it is the second
        better = "A" if a > b or b == a + 1 else "B" if b > a else "tie"
        return json.dumps({"reason": "", "better": better})

    with openai_stub.Stub(judge) as stub:
        stage("eval", **written(tmp_path), judge_url=(stub.url,), json=True,
              judge_cache=str(tmp_path / "cache"), report=tmp_path / "r.html",
              out=tmp_path / "s.parquet")  # fmt: skip
        # 3 pairs of models, 4 items, both orders; both orders of equal answers are one text
        assert stub.requests <= 24
    made = json.loads(capsys.readouterr().out)
    rates = {r["model"]: r["value_share"] for r in made["results"]}
    # ann-bob ½ ½ ½ ½; ann-cal 1 ½ ½ 0; bob-cal ½ ½ 1 ½
    assert rates == {"ann": 4 / 8, "bob": 4.5 / 8, "cal": 3.5 / 8}
    (position,) = made["positions"]
    # of 12 comparisons 5 differ with the order, and the first answer is preferred in these
    assert position["comparisons"] == 12 and position["same_value_share"] == pytest.approx(6 / 12)
    assert position["first_preferred_value_share"] == pytest.approx((6 * 1 + 6 * 0.5) / 12)
    assert "Order of the answers" in (tmp_path / "r.html").read_text()
    rows = pq.read_table(tmp_path / "s.parquet").to_pylist()
    assert len(rows) == 12 and {row["metric"] for row in rows} == {"win_rate"}


def test_a_comparison_without_a_verdict_has_no_value(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def judge(text: str) -> str:
        a, b = shown(text)
        return "no idea" if (a, b) == (2, 3) else '{"better": "A"}'

    with openai_stub.Stub(judge) as stub:
        stage("eval", **written(tmp_path), judge_url=(stub.url,), json=True, max_missing=1.0,
              judge_cache=str(tmp_path / "cache"))  # fmt: skip
    made = json.loads(capsys.readouterr().out)
    rates = {r["model"]: (r["value_share"], r["items_without_verdict"]) for r in made["results"]}
    assert {value for value, _ in rates.values()} == {0.5}  # the judge prefers the first one


def test_a_dry_run_says_calls_and_dollars(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    given = written(tmp_path)
    (tmp_path / "prices.toml").write_text("[j]\nprompt = 1.0\ncompletion = 10.0\n")
    stage("eval", **given, judge_url=("http://127.0.0.1:9/v1",), dry_run=True,
          prices=str(tmp_path / "prices.toml"), judge_tokens=50)  # fmt: skip
    text = " ".join("".join(capsys.readouterr()).split())
    assert "t judged by" in text and "24 calls at most" in text
    prompts = int(text.partition("24 calls at most, ")[2].partition(" ")[0].replace(",", ""))
    assert 24 * 200 < prompts < 24 * 600  # two answers of 100 tokens in each
    usd = float(text.partition("of prompts and replies, $")[2].partition(" ")[0])
    assert usd == pytest.approx((prompts + 24 * 50 * 10) / 1e6, abs=0.005)
    stage("eval", **given, judge_url=("http://127.0.0.1:9/v1",), dry_run=True)
    assert "dollars unknown (no price of j in --prices or --judge)" in " ".join(
        "".join(capsys.readouterr()).split()
    )
