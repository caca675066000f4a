"""The definitions that come with sabia: `--task NAME --data NAME=PATH`, each end to end."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import stage

from sabia.core.bench.task_files import definitions, items_of, load_tasks
from sabia.core.errors import UsageError

DATA = os.environ.get("SABIA_TEST_DATA")
# rows in their authors' form, a right answer to each, and a wrong one
OPTIONS = [f"{number} km" for number in range(10)]
GENERATED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "gsm8k": (
        "test.jsonl", {"question": "2 + 1,000?", "answer": "2 + 1000 = 1002\n#### 1,002"},
        "It is 1002.", "It is 1003.",
    ),
    "ifeval": (
        "input_data.jsonl",
        {"prompt": "Write without commas, at most five words.",
         "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
         "kwargs": [{}, {"relation": "less than", "num_words": 6}]},
        "No comma in here", "One, two",
    ),
    "mmlu_pro": (
        "test.parquet",
        {"question": "How far?", "options": OPTIONS, "answer": "J", "answer_index": 9,
         "category": "physics"},
        "It is far. The answer is (J).", "Not J. The answer is (I)",
    ),
}  # fmt: skip
IDS = {"gsm8k": "id", "ifeval": "key", "mmlu_pro": "question_id"}


def written(folder: Path, name: str) -> Path:
    file, row, _, _ = GENERATED[name]
    rows = [row | {IDS[name]: number} for number in range(8)]
    if file.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), folder / file)
    else:
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / file


@pytest.mark.parametrize("name", GENERATED)
def test_answers_to_a_definition_are_scored(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = written(tmp_path, name)
    _, _, right, wrong = GENERATED[name]
    rows = [{"id": str(n), "response": right if n < 3 else wrong} for n in range(8)]
    answers = tmp_path / "given.jsonl"
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for data in (path, path.parent):
        stage("eval", task=(name,), data=(f"{name}={data}",), answers=(str(answers),), json=True)
        made = json.loads(capsys.readouterr().out)
        assert made["headline_metrics"] == {name: "exact_match"}
        (result,) = (r for r in made["results"] if r["metric"] == "exact_match")
        assert (result["items"], result["value_share"]) == (8, 3 / 8)


def test_mmlu_pro_shows_every_option(tmp_path: Path) -> None:
    (task,) = load_tasks(["mmlu_pro"], [f"mmlu_pro={written(tmp_path, 'mmlu_pro')}"])
    shown = items_of(task, 1)[0].question
    assert "A. 0 km\nB. 1 km\n" in shown and "J. 9 km\n" in shown


@pytest.mark.skipif(not DATA, reason="SABIA_TEST_DATA is not set (shared test data)")
def test_the_files_of_enem_and_gsm8k_are_read(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(DATA or ".") / "eval"
    tasks = load_tasks(
        ["enem", "gsm8k"], [f"enem={folder / 'enem'}", f"gsm8k={folder / 'gsm8k/test.jsonl'}"]
    )
    enem, gsm8k = (items_of(task) for task in tasks)
    assert len(enem) == 123 and {len(item.choices) for item in enem} == {5}
    assert len(gsm8k) == 1319 and gsm8k[0].text.count("Question:") == 6
    out = tmp_path / "s.parquet"
    stage("eval", task=("enem",), data=(f"enem={folder / 'enem'}",), model=(str(tiny_model),),
          limit=3, out=out, judge_cache=str(tmp_path / "cache"))  # fmt: skip
    assert set(pq.read_table(out).column("task").to_pylist()) == {"enem"}


def test_what_is_missing_or_unknown_is_named() -> None:
    for name in definitions():
        with pytest.raises(UsageError, match=f"--data {name}=PATH"):
            load_tasks([name])
    with pytest.raises(UsageError, match="none of the definitions enem, gsm8k, ifeval, mmlu_pro"):
        load_tasks(["gsm"])
    with pytest.raises(UsageError, match="gsm8k is neither"):
        load_tasks(["enem"], ["enem=a.json", "gsm8k=b.jsonl"])
