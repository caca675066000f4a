"""Parts of the report: items to be opened, results over checkpoints, held-out tasks, cost."""

import json
from pathlib import Path

import pytest
from in_process import stage

from sabia.core.bench.items import Item
from sabia.core.bench.pages import checkpoints, held_out, item_browser
from sabia.core.bench.result_summary import summarise
from sabia.core.bench.score_rows import Score
from sabia.core.bench.task import task_from


def rows_of(model: str, values: list[int], task: str = "t") -> list[Score]:
    return [
        Score(model, task, str(n), 0, "exact_match", float(v),
              {"question": f"<Q{n}>", "answer": "gold", "response": f"{model} says {v}"})
        for n, v in enumerate(values)
    ]  # fmt: skip


def test_items_are_opened_one_by_one_without_a_script() -> None:
    scores = rows_of("a", [1, 0]) + rows_of("b", [0, 0])
    (text,) = item_browser.section(scores, {"t": "exact_match"})
    assert text.count("<details>") == 3 and "t: 2 items</summary>" in text
    for part in ("&lt;Q1&gt;", "a says 1", "b says 0", "right answer: gold", "0: a 1, b 0"):
        assert part in text
    assert "<script" not in text and "<Q1>" not in text
    assert not item_browser.section([Score("a", "t", "1", 0, "acc", 1.0)], {"t": "acc"})


def test_a_large_report_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_browser, "CHARACTERS", 1000)
    (text,) = item_browser.section(rows_of("a", [1] * 50), {"t": "exact_match"})
    shown = text.count("<details>") - 1
    assert 0 < shown < 50 and f"{shown} items, {50 - shown} more are not shown" in text
    long = [Score("a", "t", "1", 0, "exact_match", 1.0, {"response": "x" * 5000 + "end"})]
    monkeypatch.setattr(item_browser, "CHARACTERS", 10_000)
    (text,) = item_browser.section(long, {"t": "exact_match"})
    assert len(text) < 1500 and "end" in text


def test_checkpoints_are_models_that_differ_in_the_number() -> None:
    models = ["run-100", "run-20", "run-300", "other", "x1", "x2"]
    assert checkpoints.runs(models) == {"run-": [(20, "run-20"), (100, "run-100"),
                                                 (300, "run-300")]}  # fmt: skip
    scores = [s for n, m in enumerate(models[:3]) for s in rows_of(m, [1] * (n + 1) + [0] * 3)]
    (text,) = checkpoints.section(summarise(scores, {}, {"t": "sums"}))
    assert text.count("<svg") == 2 and "capability sums" in text
    assert not checkpoints.section(summarise(scores[:9]))


def test_held_out_tasks_are_counted_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name, more in (("dev", ""), ("new", 'split = "held-out"\n')):
        rows = [{"id": str(n), "q": f"{name} {n}", "a": "1"} for n in range(10)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        (tmp_path / f"{name}.toml").write_text(
            f'name = "{name}"\nkind = "exact_match"\ndata = "{name}.jsonl"\nprompt = "{{{{q}}}}"\n'
            f'answer = "a"\ncapability = "sums"\n{more}'
        )
    given = [{"id": str(n), "response": "1" if n < 8 else "2"} for n in range(10)]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    counted = []
    for force in (False, False, True):  # the second run reads its scores
        stage(
            "eval", task=(str(tmp_path / "dev.toml"), str(tmp_path / "new.toml")), json=True,
            answers=(str(tmp_path / "m.jsonl"),), out=tmp_path / "s.parquet", force=force,
            report=tmp_path / "r.html",
        )  # fmt: skip
        (record,) = json.loads(capsys.readouterr().out)["held_out"]
        counted.append(record["scored"])
    assert counted == [1, 1, 2]
    assert (record["held_out_value"], record["gap_value"]) == (0.8, 0.0)
    assert "Held-out tasks" in (tmp_path / "r.html").read_text()


def test_counts_are_of_the_items_and_survive_a_cut_line(tmp_path: Path) -> None:
    tasks = [task_from({"name": name, "kind": "exact_match", "data": "d", "prompt": "{{q}}",
                        "capability": "sums"} | more)
             for name, more in (("dev", {}), ("new", {"split": "held-out"}))]  # fmt: skip
    items = {name: [Item("1", text=name)] for name in ("dev", "new")}
    assert held_out.count(tmp_path, tasks, items, ["m"], False) == {"new": 0}
    assert held_out.count(tmp_path, tasks, items, ["m"], True) == {"new": 1}
    with (tmp_path / held_out.NAME).open("a") as file:
        file.write('{"task": "new", "ite\n')
    assert held_out.count(tmp_path, tasks, items, ["m"], True) == {"new": 2}
    other = items | {"new": [Item("1", text="another")]}
    assert held_out.count(tmp_path, tasks, other, ["m"], True) == {"new": 1}
    assert held_out.count(tmp_path, tasks[:1], items, ["m"], True) == {}

    scores = rows_of("m", [1, 1, 1, 0], "dev") + rows_of("m", [1, 0, 0, 0], "new")
    (gap,) = held_out.gaps(summarise(scores), tasks, {"new": 3})
    assert gap.gap and gap.gap.value == 0.5 and gap.scored == 3
    dev, new = (gap.development, gap.value)
    assert dev
    assert gap.gap.half_width == pytest.approx((dev.half_width**2 + new.half_width**2) ** 0.5)
