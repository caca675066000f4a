"""Several judges: votes, agreement and κ computed by hand; what their file may hold."""

import contextlib
import importlib.util
import json
from pathlib import Path

import pytest

from sabia.core.errors import UsageError
from sabia.core.generate.budget import Budget, Price
from sabia.core.judge.judge_file import JudgeServer, load_judges
from sabia.core.judge.opened_judges import open_panel
from sabia.core.judge.panel import weighted_majority, weighted_mean, weighted_median
from sabia.core.judge.rewards import Case, Grader
from sabia.core.judge.rubric import parse_rubric
from sabia.core.judge.verdict import Opinion, Verdict
from sabia.core.options.grpo import GrpoOptions

STUB = Path(__file__).parents[2] / "openai_stub.py"
_spec = importlib.util.spec_from_file_location("openai_stub", STUB)
assert _spec is not None and _spec.loader is not None
openai_stub = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(openai_stub)

MET, UNMET, UNKNOWN = Verdict.MET, Verdict.UNMET, Verdict.UNKNOWN
PLAN = {"ann": "1100", "bob": "1000", "cal": "1101"}  # verdicts on the four samples
ITEMS = parse_rubric([{"id": "x", "text": "is good"}, {"id": "n", "kind": "number",
                                                       "reference": "7", "weight": 1}])  # fmt: skip


def scripted(verdicts: str):
    """A judge whose verdict on `sample N` is the N-th digit; '?': no verdict."""

    def answer(text: str) -> str:
        digit = verdicts[int(text.partition("\nsample ")[2][0])]
        if digit == "?":
            return "I cannot say"
        return json.dumps({"verdicts": [{"item": "x", "evidence": "", "met": digit == "1"}]})

    return answer


def grades(tmp_path: Path, plan: dict[str, str], combine: str = "majority", weights: str = "111"):
    """The grades of four samples by judges with these verdicts, and the panel."""
    with contextlib.ExitStack() as stack:
        text = ""
        for (name, verdicts), weight in zip(plan.items(), weights, strict=True):
            stub = stack.enter_context(openai_stub.Stub(scripted(verdicts)))
            text += f'[{name}]\nurl = "{stub.url}"\nmodel = "{name}-m"\nweight = {weight}\n'
            text += "prompt = 1\ncompletion = 2\n"
        (tmp_path / "judges.toml").write_text(text)
        options = GrpoOptions(
            model="m", reward="rubric", judge=str(tmp_path / "judges.toml"), judge_combine=combine,
            judge_cache=str(tmp_path / f"calls-{combine}-{weights}"),
        )  # fmt: skip
        budget = Budget()
        panel = stack.enter_context(open_panel(options, budget))
        cases = [Case([], f"sample {n} of 7", rubric=ITEMS) for n in range(4)]
        made = Grader({"rubric": 1.0}, panel).grade(cases)
        assert panel.stats.calls >= 12 and panel.stats.usd == pytest.approx(budget.spent.usd)
        assert set(budget.prices.values()) == {Price(1.0, 2.0)}
        return made, panel


def test_votes_agreement_and_kappa_are_those_of_the_plan(tmp_path, capsys):
    made, panel = grades(tmp_path, PLAN)
    assert [grade.score for grade in made] == [1.0, 1.0, 0.5, 0.5]
    assert [dict(grade.opinions[2].verdicts) for grade in made] == [
        {"x": MET}, {"x": MET}, {"x": UNMET}, {"x": MET}
    ]  # fmt: skip
    assert {grade.opinions[2].judge for grade in made} == {"cal"}
    rows = list(panel.agreement.rows())
    assert [row["judges"] for row in rows] == [["ann", "bob"], ["ann", "cal"], ["bob", "cal"]]
    assert [row["agreement"] for row in rows] == [0.75, 0.75, 0.5]
    # p_e: .5·.25 + .5·.75, .5·.75 + .5·.25, .25·.75 + .75·.25
    assert [row["kappa"] for row in rows] == pytest.approx([0.5, 0.5, 0.2])
    said = capsys.readouterr().err
    assert "item x: bob and cal agree on 50.0% of 4 verdicts (κ 0.20)" in said


def test_weights_the_mean_and_judges_without_a_verdict(tmp_path):
    made, _ = grades(tmp_path, PLAN, weights="131")
    assert [grade.score for grade in made] == [1.0, 0.5, 0.5, 0.5]  # bob has more than half
    made, _ = grades(tmp_path, PLAN, "mean", "112")
    assert [grade.score for grade in made] == [1.0, 0.5 + 0.5 * 3 / 4, 0.5, 0.5 + 0.5 * 2 / 4]
    silent = PLAN | {"bob": "1?00"}
    (tmp_path / "a").mkdir()
    made, panel = grades(tmp_path / "a", silent)
    assert [grade.score for grade in made] == [1.0, 1.0, 0.5, 0.5]
    assert [row["verdicts"] for row in panel.agreement.rows()] == [3, 4, 3]
    made, _ = grades(tmp_path / "a", silent, "mean")
    assert made[1].score is None and made[0].score == 1.0
    tie = [Opinion("a", 0.1, {"x": MET}), Opinion("b", 0.2, {"x": MET}),
           Opinion("c", 0.3, {"x": UNMET})]  # fmt: skip
    assert weighted_majority(tie) == {"x": UNKNOWN}


@pytest.mark.parametrize(
    ("values", "weights", "median", "mean"),
    [
        ((3.0, 1.0, 2.0), (1, 1, 1), 2.0, 2.0),
        ((1.0, 2.0), (1, 1), 1.5, 1.5),
        ((1.0, 2.0, 9.0), (3, 1, 1), 1.0, 14 / 5),
        ((1.0, 2.0, 9.0), (2, 1, 1), 1.5, 13 / 4),
        ((5.0, None, 1.0), (1, 7, 1), 3.0, None),
        ((None, None), (1, 1), None, None),
        ((4.0,), (0.5,), 4.0, 4.0),
        ((), (), None, None),
    ],
)
def test_the_median_and_the_mean_of_points(values, weights, median, mean):
    assert weighted_median(values, weights) == median
    assert weighted_mean(values, weights) == (mean if mean is None else pytest.approx(mean))


def test_equal_verdicts_have_no_kappa(tmp_path):
    _, panel = grades(tmp_path, dict.fromkeys(PLAN, "1111"))
    assert [(r["agreement"], r["kappa"]) for r in panel.agreement.rows()] == [(1.0, None)] * 3


def test_files_of_judges(tmp_path):
    path = tmp_path / "j.toml"
    path.write_text('[a]\nurl = ["http://x/v1", "http://y/v1"]\nmodel = "m"\napi-key-env = "K"\n')
    assert load_judges(path) == [
        JudgeServer("a", ("http://x/v1", "http://y/v1"), "m", api_key_env="K")
    ]
    good = '[a]\nurl = "http://x/v1"\nmodel = "m"\n'
    for text, reason in (
        ("", "expected one or more"),
        ("[a", "expected TOML"),
        ("a = 1", "expected \\[NAME\\] tables"),
        ('[a]\nmodel = "m"', "a: url is missing"),
        (good + "weight = 0", "weight 0 is not above 0"),
        (good + "prompt = 1", "completion"),
        (good + "colour = 1", "no key 'colour'"),
        (good + good.replace("[a]", "[b]"), "all different"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=reason) as caught:
            load_judges(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"--judge: .*none"):
        load_judges(tmp_path / "none")
