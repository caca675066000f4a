"""Judges beside people: figures by hand, the corrected score, effective votes, coverage."""

import importlib.util
import json
import math
from pathlib import Path

import numpy as np
import pytest
from in_process import stage

from sabia.core.bench.rubrics import judge_labels
from sabia.core.bench.rubrics.judge_labels import corrected_mean
from sabia.core.bench.score_rows import Score
from sabia.core.bench.verdict_rows import POINTS, Entry, VerdictRow
from sabia.core.errors import BadData

STUB = Path(__file__).parents[2] / "openai_stub.py"
_spec = importlib.util.spec_from_file_location("openai_stub", STUB)
assert _spec is not None and _spec.loader is not None
openai_stub = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(openai_stub)


def test_the_corrected_mean_is_that_of_a_hand_computation() -> None:
    judged = np.array([1, 1, 0, 1, 0, 1, 1, 1, 0, 1], float)
    labels = np.array([1, 0, 0, 1, 0, 1] + [math.nan] * 4)
    made = corrected_mean(judged, labels)
    assert made is not None
    # cov = 1/6 · …: y = 1,0,0,1,0,1, mean 1/2; f = 1,1,0,1,0,1, mean 2/3
    covariance = (3 * 1 / 2 * 1 / 3 + (-1 / 2) * (1 / 3) + 2 * (-1 / 2) * (-2 / 3)) / 5
    variance = (4 / 9 + 4 / 9 + 4 / 9) / 5
    weight = covariance / variance * 4 / 10
    assert made.weight == pytest.approx(weight) and weight == pytest.approx(0.3)
    # mean of f without a label 3/4; y - 0.3 f: 1/2 - 0.3 · 2/3
    assert made.interval.value == pytest.approx(0.3 * 0.75 + 0.5 - 0.2)
    assert (made.judge_mean, made.labelled, made.answers) == (0.7, 6, 10)
    # variance: residuals .7 -.3 0 .7 0 .7 about .3, and weight² var(f) of the others, and one step
    residuals = np.array([0.7, -0.3, 0, 0.7, 0, 0.7]) - 0.3
    others = 0.3 * (np.array([1, 1, 0, 1]) - 0.75)
    error2 = ((residuals**2).sum() / 36 + (others**2).sum() / 16 + 1 / 36) * 6 / 5
    n = max(made.interval.value * (1 - made.interval.value) / error2, 6)
    t = 2.5706  # of 5 degrees of freedom
    middle = (0.525 * n + t * t / 2) / (n + t * t)
    half = t * math.sqrt(middle * (1 - middle) / (n + t * t))
    assert made.interval.low == pytest.approx(middle - half, abs=1e-3)
    assert made.interval.high == pytest.approx(middle + half, abs=1e-3)


def test_labels_of_all_answers_or_of_few() -> None:
    f, y = np.array([1.0, 0, 1, 1, 0, 1]), np.array([1.0, 0, 0, 1, 0, 1])
    made = corrected_mean(f, y)
    assert made is not None and made.interval.value == 0.5 and made.weight == 0
    assert corrected_mean(f, np.array([1.0, 0, 0, 1, math.nan, math.nan])) is None
    assert corrected_mean(f, y, np.array([0, 0, 1, 1, 2, 2])) is None


def coverage(
    rng: np.random.Generator, answers: int, labelled: int, share: float, sensitivity: float,
    specificity: float, repeats: int,
) -> tuple[float, float]:  # fmt: skip
    """How often the interval of a corrected share covers, and the judge's alone would."""
    inside, naive = 0, 0
    for _ in range(repeats):
        y = (rng.random(answers) < share).astype(float)
        draw = rng.random(answers)
        met = np.where(y == 1, draw < sensitivity, draw > specificity)
        labels = np.where(np.arange(answers) < labelled, y, math.nan)
        made = corrected_mean(met.astype(float), labels)
        assert made is not None
        inside += made.interval.low <= share <= made.interval.high
        naive += abs(made.judge_mean - share) < 1.96 * math.sqrt(share * (1 - share) / answers)
    return inside / repeats, naive / repeats


def test_intervals_cover_where_the_judge_is_biased() -> None:
    rng = np.random.default_rng(0)
    for sizes in ((100, 20), (400, 60)):
        for share in (0.3, 0.8):
            covered, naive = coverage(rng, *sizes, share, 0.9, 0.8, 400)
            assert covered >= 0.925 and naive < covered  # two standard errors below .945


def rows_of(verdicts: dict[str, str], weight: float = 1.0) -> tuple[list[Score], list[VerdictRow]]:
    """Rows of answers 0, 1, … to one item each; judge '' is what was decided."""
    scores, rows = [], []
    for judge, digits in verdicts.items():
        for number, digit in enumerate(digits):
            entry = Entry("a", "met" if digit == "1" else "unmet", float(digit), weight, judge)
            rows.append(VerdictRow("m", "t", str(number), 0, entry))
            if not judge:
                scores.append(Score("m", "t", str(number), 0, "share", float(digit)))
    return scores, rows


def test_judges_that_disagree_by_plan(tmp_path: Path) -> None:
    plan = {"": "11101100", "ann": "11101100", "bob": "11001101", "cal": "10101110"}
    people = "11001010"
    scores, rows = rows_of(plan)
    file = tmp_path / "labels.csv"
    lines = [f"{n},{'met' if digit == '1' else 'unmet'}" for n, digit in enumerate(people)]
    file.write_text("\n".join(["item_id,verdict", *lines]))
    labels = judge_labels.load_labels(str(file), rows)
    made = judge_labels.compared(scores, rows, labels, {"t": "share"})
    found = {one.judge: one for one in made.beside}
    decided = found[judge_labels.DECIDED]
    # people: 4 met, of which 3 are decided met; 4 unmet, of which 2 unmet
    assert decided.sensitivity and decided.sensitivity.value == 3 / 4
    assert decided.specificity and decided.specificity.value == 2 / 4
    assert decided.pairs.agreement == 5 / 8
    cal = found["cal"]
    assert cal.sensitivity and cal.specificity
    assert (cal.sensitivity.value, cal.specificity.value) == (3 / 4, 2 / 4)
    # errors: ann 00100 1-10, bob 00000 1-11, cal 0-1100 100
    errors = np.array([[0, 0, 1, 0, 0, 1, -1, 0], [0, 0, 0, 0, 0, 1, -1, 1],
                       [0, -1, 1, 0, 0, 1, 0, 0]], float)  # fmt: skip
    r = np.corrcoef(errors)[np.triu_indices(3, 1)].mean()
    (votes,) = made.votes
    assert votes.correlation == pytest.approx(r) and votes.of == "errors"
    assert votes.effective == pytest.approx(3 / (1 + 2 * r))
    (corrected,) = made.corrected
    assert corrected.score and corrected.score.interval.value == 0.5
    # without labels: of the verdicts
    (votes,) = judge_labels.compared(scores, rows, {}, {}).votes
    given = np.array([[int(d) for d in plan[name]] for name in ("ann", "bob", "cal")], float)
    r = np.corrcoef(given)[np.triu_indices(3, 1)].mean()
    assert votes.of == "verdicts" and votes.effective == pytest.approx(3 / (1 + 2 * r))


def test_equal_judges_are_one_and_independent_ones_as_many() -> None:
    rng = np.random.default_rng(1)
    one = "".join(map(str, rng.integers(0, 2, 2000)))
    other = "".join(map(str, rng.integers(0, 2, 2000)))
    for pair, votes in (((one, one), 1.0), ((one, other), 2.0)):
        _, rows = rows_of({"": one, "ann": pair[0], "bob": pair[1]})
        (made,) = judge_labels.compared([], rows, {}, {}).votes
        assert made.effective == pytest.approx(votes, abs=0.1)


def test_points_are_corrected_as_a_sum(tmp_path: Path) -> None:
    given, right = [2.0, 1.0, 0.0, 2.0, 1.0, 2.0], {0: 1.5, 1: 1.0, 2: 0.0, 3: 1.5, 4: 0.5, 5: 2.0}
    scores = [Score("m", "t", str(n), 0, "points", value) for n, value in enumerate(given)]
    rows = [VerdictRow("m", "t", str(n), 0, Entry(POINTS, "", value / 2, 2.0))
            for n, value in enumerate(given)]  # fmt: skip
    file = tmp_path / "labels.jsonl"
    file.write_text("".join(json.dumps({"id": str(n), "verdict": v}) + "\n"
                            for n, v in right.items()))  # fmt: skip
    labels = judge_labels.load_labels(str(file), rows)
    made = judge_labels.compared(scores, rows, labels, {"t": "points"})
    (corrected,), (beside,) = made.corrected, made.beside
    assert corrected.score and corrected.score.interval.value == pytest.approx(6.5)
    assert corrected.score.judge_mean == 8.0 and beside.sensitivity is None
    assert beside.pairs.agreement == 3 / 6


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"item_id": "9", "verdict": "met"}, "no verdict on item '9'"),
        ({"item_id": "1", "verdict": "perhaps"}, "expected met or unmet"),
        ({"item_id": "1", "verdict": 0.5}, "expected met or unmet"),
        ({"item_id": "1", "item": "b", "verdict": 1}, "expected one of a"),
        ({"item_id": "0", "verdict": 0}, "a second verdict"),
    ],
)
def test_bad_labels_are_named(row: dict, said: str, tmp_path: Path) -> None:
    _, rows = rows_of({"": "10"})
    file = tmp_path / "labels.jsonl"
    file.write_text(json.dumps({"item_id": "0", "verdict": True}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(BadData, match=said):
        judge_labels.load_labels(str(file), rows)


def test_the_report_of_a_command_has_them(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [{"id": str(n), "q": "?", "rubric": [{"id": "x", "text": "is good"}]} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.toml").write_text('name = "t"\nkind = "rubric"\ndata = "rows.jsonl"\n'
                                     'prompt = "{{q}}"\nmetric = "share"\n')  # fmt: skip
    given = [{"id": str(n), "response": f"sample {n}"} for n in range(8)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    (tmp_path / "l.jsonl").write_text("".join(
        json.dumps({"item_id": str(n), "verdict": "met" if n in (0, 1, 4) else "unmet"}) + "\n"
        for n in range(6)))  # fmt: skip
    plan = {"ann": "11101100", "bob": "11001101", "cal": "10101110"}

    def judge(digits: str):
        def answer(text: str) -> str:
            digit = digits[int(text.partition("\nsample ")[2][0])]
            return json.dumps({"verdicts": [{"item": "x", "evidence": "", "met": digit == "1"}]})

        return answer

    with (openai_stub.Stub(judge(plan["ann"])) as a, openai_stub.Stub(judge(plan["bob"])) as b,
          openai_stub.Stub(judge(plan["cal"])) as c):  # fmt: skip
        (tmp_path / "j.toml").write_text("".join(
            f'[{name}]\nurl = "{stub.url}"\nmodel = "{name}-m"\n'
            for name, stub in (("ann", a), ("bob", b), ("cal", c))))  # fmt: skip
        stage("eval", task=(str(tmp_path / "t.toml"),), answers=(f"m={tmp_path / 'a.jsonl'}",),
              judge=str(tmp_path / "j.toml"), judge_labels=str(tmp_path / "l.jsonl"), json=True,
              judge_cache=str(tmp_path / "cache"), report=tmp_path / "r.html",
              out=tmp_path / "s.parquet")  # fmt: skip
    made = json.loads(capsys.readouterr().out)
    # majority 11101100; people on the first six: met 0 1 4, unmet 2 3 5
    (result,) = (r for r in made["results"] if r["metric"] == "share")
    assert result["value_share"] == 5 / 8
    decided = next(r for r in made["judge_labels"] if r["judge"] == "decided")
    assert decided["sensitivity_value"] == 1 and decided["specificity_value"] == 1 / 3
    assert {r["judge"] for r in made["judge_labels"]} == {"decided", "ann", "bob", "cal"}
    (corrected,) = made["corrected_scores"]
    # f 111011, y 110010: cov 1/5 · 1/2, var 1/6, weight 0.6 · 2/8; the others have f = 0
    assert corrected["corrected_value"] == pytest.approx(0.5 - 0.15 * 5 / 6)
    (votes,) = made["effective_votes"]
    assert votes["of"] == "errors" and votes["judges"] == 3
    text = (tmp_path / "r.html").read_text()
    assert "Judges and people" in text and "Effective votes of several judges" in text
