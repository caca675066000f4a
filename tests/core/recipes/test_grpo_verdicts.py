"""The verdicts of a GRPO run as rows: audits, resumes, tables over steps that eval reads."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from sabia.core.errors import Unavailable
from sabia.core.options.eval import EvalOptions
from sabia.core.recipes import evaluate
from sabia.core.recipes.grpo.sample_journal import Journal
from sabia.core.shards.job import Job

sys.path.insert(0, str(Path(__file__).parent))
_spec = importlib.util.spec_from_file_location(
    "grpo_judge_cases", Path(__file__).with_name("test_grpo_judge.py")
)
assert _spec is not None and _spec.loader is not None
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)
model, prompts, caches = cases.model, cases.prompts, cases.caches
impatient, one_thread = cases.impatient, cases.one_thread
COLUMNS = ("audit_verdicts", "audit_agreement", "audit_kappa", "reward_length", "reward_format",
           "format", "break_outs", "judge_family")  # fmt: skip


def contrary(text: str) -> str:
    """The verdict, but of the item `vowel` always met."""
    said = json.loads(cases.verdict(text))
    said["verdicts"][0]["met"] |= 'item "vowel"' in text
    return json.dumps(said)


def judged(model: Path, folder: Path, main: Any, second: Any, share: float) -> Any:
    folder.mkdir(exist_ok=True)
    table = '[{0}]\nurl = "{1}"\nmodel = "{0}"\n'
    text = table.format("main", main.url) + table.format("second", second.url) + "audit = true\n"
    (folder / "judges.toml").write_text(text)
    given = cases.options(model, main.url)
    file = str(folder / "judges.toml")
    return given.replace(judge_url=(), judge_model="", judge=file, audit_judge=share)


def rows(run: Path) -> list[dict[str, Any]]:
    made = [row for path in sorted((run / "verdicts").glob("*.parquet"))
            for row in pq.read_table(path).to_pylist()]  # fmt: skip
    return [row | {"model": None} for row in made]


def of_checks(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row.get(name) for name in COLUMNS} for row in metrics]


@pytest.mark.usefixtures("impatient")
def test_an_auditor_changes_nothing_and_its_rows_survive_an_outage(
    model: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cases.openai_stub.Stub(cases.verdict) as main, cases.openai_stub.Stub(contrary) as second:
        given = judged(model, tmp_path / "j", main, second, 0.3)
        alone = cases.train(prompts, tmp_path / "alone", cases.options(model, main.url))
        whole = cases.train(prompts, tmp_path / "whole", given)
        assert cases.weights(tmp_path / "whole") == cases.weights(tmp_path / "alone")
        assert cases.rewards(whole) == cases.rewards(alone)
        assert not any("audit_verdicts" in row for row in alone)

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
        served = sum(main.delivered.values())
        main.fault = lambda text, attempt: (
            "503" if sum(main.delivered.values()) > served + 80 else ""
        )
        with pytest.raises(Unavailable):
            cases.train(prompts, tmp_path / "outage", given)
        main.fault = lambda text, attempt: ""
        after = cases.train(prompts, tmp_path / "outage", given)

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third"))
        main.fault = second.fault = cases.faults(0.1)
        main.retry_after_s = second.retry_after_s = 0.01
        faulty = cases.train(prompts, tmp_path / "faulty", given)
    assert cases.weights(tmp_path / "faulty") == cases.weights(tmp_path / "whole")
    assert rows(tmp_path / "faulty") == rows(tmp_path / "whole")
    assert of_checks(faulty) == of_checks(whole)
    assert cases.weights(tmp_path / "outage") == cases.weights(tmp_path / "whole")
    made = rows(tmp_path / "whole")
    assert made == rows(tmp_path / "outage") and len(made) > 2 * 128
    assert of_checks(whole) == of_checks(after)

    by_sample: dict[tuple, dict[str, dict[str, str]]] = {}
    for row in made:
        key = (row["step"], row["item_id"], row["sample"], row["weight"])
        by_sample.setdefault(key, {}).setdefault(row["judge"], {})[row["item"]] = row["verdict"]
        assert row["value"] == {"met": 1, "unmet": 0}[row["verdict"]]
        assert row["audit"] is (row["judge"] == "second")
    for step, row in enumerate(whole, 1):
        pairs = [
            (said[""][item], verdict)
            for key, said in by_sample.items() if key[0] == step
            for item, verdict in said.get("second", {}).items()
        ]  # fmt: skip
        assert row["audit_verdicts"] == len(pairs) > 0 and len(pairs) % 2 == 0
        agreed = sum(a == b for a, b in pairs) / len(pairs)
        assert row["audit_agreement"] == pytest.approx(agreed)
        first, other = (sum(p[n] == "met" for p in pairs) / len(pairs) for n in (0, 1))
        expected = first * other + (1 - first) * (1 - other)
        assert row["audit_kappa"] == pytest.approx((agreed - expected) / (1 - expected))


def test_a_restart_from_the_journal_gives_the_same_checks(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    """The run ends after the samples of a step are stored and before it has trained on them."""
    with cases.openai_stub.Stub(cases.verdict) as main, cases.openai_stub.Stub(contrary) as second:
        given = judged(model, tmp_path / "j", main, second, 1.0)
        whole = cases.train(prompts, tmp_path / "whole", given)
        finish = Journal.finish

        def killed(self: Journal, step: int, *more: Any) -> Any:
            batch = finish(self, step, *more)
            if step == 2:
                raise KeyboardInterrupt
            return batch

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "finish", killed)
            with pytest.raises(KeyboardInterrupt):
                cases.train(prompts, tmp_path / "killed", given)
        after = cases.train(prompts, tmp_path / "killed", given)
    assert of_checks(after) == of_checks(whole)
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")
    assert cases.weights(tmp_path / "killed") == cases.weights(tmp_path / "whole")


def test_eval_shows_items_over_steps(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with cases.openai_stub.Stub(cases.verdict) as main, cases.openai_stub.Stub(contrary) as second:
        cases.train(prompts, tmp_path / "run", judged(model, tmp_path / "j", main, second, 1.0))
    capsys.readouterr()
    report = tmp_path / "r.html"
    job = Job("eval", (str(tmp_path / "run" / "verdicts"),), None, json=True)
    evaluate.run(job, EvalOptions(inputs=job.inputs, report=str(report)))
    shown = capsys.readouterr()
    made = json.loads(shown.out)
    stored = rows(tmp_path / "run")
    assert {row["item"] for row in made["rubric_items"]} == {"mark", "vowel"}
    for item in made["rubric_items"]:
        assert (item["task"], item["model"]) == ("rubric", "run")
        assert [column["name"] for column in item["over"]] == ["1", "2", "3", "4"]
        for step, column in enumerate(item["over"], 1):
            own = [row["value"] for row in stored if row["judge"] == ""
                   and (row["step"], row["item"]) == (step, item["item"])]  # fmt: skip
            assert column["verdicts"] == len(own) == 32
            assert column["met_share"] == pytest.approx(sum(own) / 32)
        change = item["over"][3]["met_share"] - item["over"][0]["met_share"]
        assert item["change_share"] == pytest.approx(change)
        assert item["ci_low_share"] < change < item["ci_high_share"]
    audits = {row["item"]: row for row in made["judges"]}
    assert audits["mark"]["agreement"] == 1 and audits[None]["verdicts"] == 256
    assert "rubric items over the steps of run" in report.read_text()
    assert "rubric: rubric items over the steps of run" in shown.err
