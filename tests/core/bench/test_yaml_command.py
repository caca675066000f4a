"""`sabia eval --task FILE.yaml`: all output types, what is kept, what is shown."""

import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from in_process import stage

from sabia.core.errors import UsageError

pytest.importorskip("torch")
HEAD = "dataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
TASKS = {
    "choose": "output_type: multiple_choice\ndoc_to_text: q\ndoc_to_choice: options\n"
    "doc_to_target: gold\nmetric_list: [{metric: acc}, {metric: acc_mutual_info},"
    " {metric: brier_score}, {metric: exact_match}]\n",
    "continue": "output_type: loglikelihood\ndoc_to_text: q\ndoc_to_target: text\n",
    "roll": "output_type: loglikelihood_rolling\ndoc_to_target: text\n",
    "tell": "doc_to_text: q\ndoc_to_target: text\n"
    "generation_kwargs: {max_gen_toks: 4, until: []}\nfilter_list:\n"
    "  - {name: digits, filter: [{function: regex, regex_pattern: '[0-9]'}, "
    "{function: take_first}]}\n  - {name: whole, filter: [{function: take_first}]}\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = random.Random(0)
    rows = []
    for n in range(11):
        text = " ".join(rng.choice(["maçã", "42", "dog", "não"]) for _ in range(rng.randint(1, 9)))
        row = {"q": f"{text} {n}?", "options": ["um", "dois três", text], "gold": n % 3}
        rows.append(row | {"text": text})
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        (tmp_path / f"tasks/{name}.yaml").write_text(f"task: {name}\n{HEAD}{text}")
    return tmp_path


def test_a_folder_of_yaml_tasks_is_evaluated_and_kept(
    folder: Path, tiny_model: Path, capsys: pytest.CaptureFixture
) -> None:
    out = folder / "s.parquet"
    given = {
        "task": (str(folder / "tasks"),), "model": (str(tiny_model),), "out": out, "json": True,
        "judge_cache": str(folder / "cache"),
    }  # fmt: skip
    stage("eval", **given)
    made = json.loads(capsys.readouterr().out)
    shown = {(r["task"], r["metric"]) for r in made["results"]}
    assert shown >= {
        ("choose", "acc"), ("choose", "acc_mutual_info"), ("choose", "brier_score"),
        ("choose", "exact_match"), ("continue", "perplexity"), ("continue", "acc"),
        ("roll", "word_perplexity"), ("tell", "exact_match,digits"), ("tell", "exact_match,whole"),
    }  # fmt: skip
    assert made["headline_metrics"] == {
        "choose": "acc", "continue": "perplexity", "roll": "word_perplexity",
        "tell": "exact_match,digits",
    }  # fmt: skip
    first = pq.read_table(out)
    stage("eval", **given)
    assert "holds these scores already" in capsys.readouterr().err
    changed = folder / "tasks/choose.yaml"
    changed.write_text(changed.read_text() + 'target_delimiter: ""\n')
    stage("eval", **given)
    assert pq.read_table(out).column("detail").to_pylist() != first.column("detail").to_pylist()


def test_a_key_that_cannot_be_honoured_ends_the_command(folder: Path, tiny_model: Path) -> None:
    path = folder / "tasks/roll.yaml"
    path.write_text(path.read_text() + "doc_to_audio: a\n")
    with pytest.raises(UsageError, match="doc_to_audio is not supported"):
        stage("eval", task=(str(path),), model=(str(tiny_model),), out=folder / "s.parquet")


def test_equal_greedy_requests_are_run_once(
    folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal prompts of one task and of two, and also where they are drawn: these are not equal."""
    from sabia.core.generate.engine import Engine

    rows = [{"id": f"r{n}", "q": f"dois mais {n % 2}?", "answer": "7"} for n in range(6)]
    (folder / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = 'kind = "exact_match"\ndata = "r.jsonl"\nprompt = "{{q}}"\nmax_new_tokens = 3\n'
    for name, more in (("one", ""), ("two", ""), ("drawn", "temperature = 1.0\n")):
        (folder / f"{name}.toml").write_text(f'name = "{name}"\n{common}{more}')
    asked: list[str] = []
    stream = Engine.stream

    def counted(self: Engine, requests: list) -> object:
        asked.extend(request.name for request in requests)
        return stream(self, requests)

    monkeypatch.setattr(Engine, "stream", counted)
    out = folder / "s.parquet"
    names = ("one", "two", "drawn")
    tasks = tuple(str(folder / f"{name}.toml") for name in names)
    stage("eval", task=tasks, model=(str(tiny_model),), out=out, judge_cache=str(folder / "c"))
    assert asked == ["one/r0", "one/r1", *(f"drawn/r{n}" for n in range(6))]
    rows = pq.read_table(out).to_pylist()
    texts = {(r["task"], r["item_id"]): json.loads(r["detail"])["response"] for r in rows}
    assert len(texts) == 18
    for n in range(6):
        assert texts["one", f"r{n}"] == texts["two", f"r{n}"] == texts["one", f"r{n % 2}"]
    assert texts["one", "r0"] != texts["one", "r1"]
