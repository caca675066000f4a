"""Groups of YAML tasks: members, tags, inner groups, changed keys, weights; and the results of a
run in the schema of lm-evaluation-harness, beside what it computes itself."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sabia.core.bench.harness.groups import group_results, normalised_results
from sabia.core.bench.result_summary import summarise
from sabia.core.bench.score_rows import Score
from sabia.core.bench.task import Task
from sabia.core.bench.task_files import load_groups
from sabia.core.errors import UsageError

HEAD = "dataset_path: json\ndataset_kwargs: {data_files: {test: SPLIT}}\ntest_split: test\n"
CHOICE = (
    "output_type: multiple_choice\ndoc_to_text: q\ndoc_to_choice: options\ndoc_to_target: gold\n"
    "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
)
SAID = (
    "doc_to_text: q\ndoc_to_target: text\ngeneration_kwargs: {max_gen_toks: 3, until: []}\n"
    "filter_list:\n  - {name: whole, filter: [{function: take_first}]}\n"
    "  - {name: low, filter: [{function: lowercase}, {function: take_first}]}\n"
)
FILES = {
    "a": f"tag: [easy]\ntask_alias: The A\nmetadata: {{version: 2.5}}\n{HEAD}{CHOICE}",
    "b": f"tag: easy\n{HEAD}{CHOICE}",
    "c": f"{HEAD}{CHOICE}",
    "s": f"{HEAD}{SAID}",
}
GROUPS = {
    "inner": "group: inner\ngroup_alias: Inner\ntask: [easy]\naggregate_metric_list:\n"
    "  - {metric: acc, weight_by_size: false}\nmetadata: {version: 3}\n",
    "outer": "group: outer\ntask:\n  - inner\n  - {task: c, num_fewshot: 0}\n"
    "  - {group: said, task: [s], aggregate_metric_list: [{metric: exact_match}]}\n"
    "aggregate_metric_list:\n  - {metric: acc}\n  - {metric: acc_norm, filter_list: none}\n",
}
ITEMS = {"a": 5, "b": 3, "c": 4, "s": 6}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        rows = [
            {"q": f"dois mais {n}{name}?", "options": ["um", "dois três", f"não {n}"],
             "gold": n % 3, "text": "maçã"}
            for n in range(ITEMS[name])
        ]  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        file = str(tmp_path / f"{name}.jsonl")
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{text.replace('SPLIT', file)}")
    for name, text in GROUPS.items():
        (tmp_path / f"_{name}.yaml").write_text(text)
    return tmp_path


def test_a_group_names_tasks_groups_and_tags(folder: Path) -> None:
    tasks, groups = load_groups([str(folder / "_outer.yaml")])
    assert [task.name for task in tasks] == ["a", "b", "c", "s"]
    assert [(g.name, g.tasks) for g in groups] == [
        ("outer", ("a", "b", "c", "s")), ("inner", ("a", "b")), ("outer::said", ("s",)),
    ]  # fmt: skip
    # of a folder: the groups of its tasks, if they do not change them
    tasks, groups = load_groups([str(folder)])
    assert [task.name for task in tasks] == ["a", "b", "c", "s"]
    assert [group.name for group in groups] == ["inner"]


def test_keys_of_a_group_replace_those_of_its_tasks(folder: Path) -> None:
    text = "group: two\nnum_fewshot: 2\nfewshot_split: test\ntask: [a, {task: b, num_fewshot: 1}]\n"
    (folder / "_two.yaml").write_text(text)
    tasks, _ = load_groups([str(folder / "_two.yaml")])
    assert [(task.name, task.shots) for task in tasks] == [("a", 2), ("b", 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("group: x\ntask: [nobody]\n", "'nobody', which is no task, group or tag"),
        ("group: x\ntask: [x]\n", "contains itself"),
        ("group: x\ntask: [3]\n", "expected a name"),
        ("group: x\ntask: [a]\naggregate_metric_list: [{metric: acc, aggregation: max}]\n", "mean"),
        ("group: x\ntask: [a]\naggregate_metric_list: [{metric: acc, wight: 1}]\n", "wight"),
    ],
)
def test_groups_that_cannot_be_honoured(folder: Path, text: str, message: str) -> None:
    (folder / "_x.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_groups([str(folder / "_x.yaml")])


def test_means_are_weighted_by_items_or_not(folder: Path) -> None:
    _, groups = load_groups([str(folder / "_outer.yaml")])
    right = {"a": 4, "b": 0, "c": 2}
    scores = [
        Score("m", task, str(n), 0, "acc", float(n < right[task]))
        for task in right
        for n in range(ITEMS[task])
    ]
    scores += [Score("m", "s", str(n), 0, "exact_match,low", float(n < 3)) for n in range(6)]
    found = {(r.group, r.metric): r for r in group_results(groups, summarise(scores))}
    assert found["outer", "acc"].interval.value == pytest.approx(6 / 12)
    assert found["inner", "acc"].interval.value == pytest.approx((4 / 5 + 0) / 2)
    assert found["outer::said", "exact_match,low"].interval.value == 0.5
    assert ("outer", "acc_norm") not in found and found["outer", "acc"].items == 12
    a, b = (r.interval.half_width for r in found["inner", "acc"].results)
    assert found["inner", "acc"].interval.high == pytest.approx(0.4 + math.hypot(a, b) / 2)


def test_groups_of_toml_tasks_have_a_value_for_each_model() -> None:
    tasks = [Task(name, "multiple_choice", "x", group="g", guessing=0.25) for name in "ab"]
    scores = [
        Score(model, task.name, str(n), 0, "acc", float(n < right))
        for model, right in (("m", 3), ("n", 4))
        for task in tasks
        for n in range(4)
    ]
    made = list(normalised_results(tasks, summarise(scores)))
    assert [(one.group, one.model, len(one.results)) for one in made] == [
        ("g", "m", 2),
        ("g", "n", 2),
    ]
    assert [one.interval.value for one in made] == pytest.approx([(0.75 - 0.25) / 0.75, 1.0])


def evaluated(folder: Path, model: Path, capsys: Any) -> dict[str, Any]:
    from in_process import stage

    stage(
        "eval", task=(str(folder / "_outer.yaml"),), model=(f"m={model}",), json=True, limit=4,
        out=folder / "s.parquet", judge_cache=str(folder / "cache"),
    )  # fmt: skip
    return json.loads(capsys.readouterr().out)


def test_the_schema_of_the_harness(folder: Path, tiny_model: Path, capsys: Any) -> None:
    pytest.importorskip("torch")
    report = evaluated(folder, tiny_model, capsys)
    made = report["lm_eval"]["m"]
    assert made["group_subtasks"]["outer"] == ["inner", "c", "outer::said"]
    assert made["n-samples"]["a"] == {"original": 5, "effective": 4}
    values = [made["results"][task]["acc,none"] for task in "abc"]
    assert made["groups"]["outer"]["acc,none"] == pytest.approx(
        (4 * values[0] + 3 * values[1] + 4 * values[2]) / 11
    )
    assert {g["group"] for g in report["groups"]} == {"outer", "inner", "outer::said"}
    lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is the judge")
    pytest.importorskip("accelerate", reason="its models need it")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lm = HFLM(str(tiny_model), device="cpu", dtype="float32", batch_size=4)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    theirs = lm_eval.simple_evaluate(
        lm, tasks=["outer"], limit=4, bootstrap_iters=1, task_manager=manager,
        random_seed=0, numpy_random_seed=0, torch_random_seed=0,
    )  # fmt: skip
    for key in ("group_subtasks", "versions", "n-shot", "higher_is_better", "n-samples"):
        assert made[key] == theirs[key], key
    for part in ("results", "groups"):
        assert made[part].keys() == theirs[part].keys()
        for name, cells in theirs[part].items():
            assert made[part][name].keys() == cells.keys(), name
            for key, value in cells.items():
                ours = made[part][name][key]
                near = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
                assert ours == near, (name, key)
    for name, keys in made["configs"].items():
        for key, value in keys.items():
            if key not in ("metric_list", "filter_list", "metadata", "dataset_kwargs"):
                assert theirs["configs"][name][key] == value, (name, key)


def test_names_of_tasks_groups_and_tags_in_a_folder(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    def names(*given: str) -> tuple[list[str], list[str]]:
        tasks, groups = load_groups([str(folder / name) for name in given])
        return [task.name for task in tasks], [group.name for group in groups]

    assert names("easy") == (["a", "b"], [])
    assert names("c") == (["c"], [])
    assert names("inner") == (["a", "b"], ["inner"])
    assert names("outer") == names("_outer.yaml")
    assert names("c", "easy", "s.yaml") == (["c", "a", "b", "s"], [])
    deeper = folder / "below"
    deeper.mkdir()
    (folder / "b.yaml").rename(deeper / "b.yaml")
    assert names("easy") == (["a", "b"], [])
    (folder / "a_list.yaml").write_text("- one\n- two\n")
    (folder / "broken.yaml").write_text("task: [\n")
    assert names("easy", "outer")[0] == ["a", "b", "a", "b", "c", "s"]
    passed = " ".join(capsys.readouterr().err.split())
    assert "a file is passed over" in passed and "a_list.yaml" in passed and "not YAML" in passed
    with pytest.raises(UsageError, match=r"no task, group or tag .* such as easy"):
        names("eazy")
    with pytest.raises(UsageError, match="is no file, no folder"):
        load_groups(["easy"])
