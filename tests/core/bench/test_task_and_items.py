"""Task files are read strictly; rows become items; examples never hold the item itself."""

import json
from pathlib import Path

import pytest

from sabia.core.bench.items import choice_index, load_items
from sabia.core.bench.task import Task, load_task, task_from
from sabia.core.errors import BadData, UsageError

ROWS = [
    {
        "id": f"q{i}",
        "q": f"{i}+1?",
        "options": [str(i), str(i + 1), "x"],
        "gold": "B",
        "img": i == 3,
    }
    for i in range(8)
]
BASE = {"name": "sums", "kind": "multiple_choice", "data": "rows.jsonl", "prompt": "Q: {{q}}\nA:",
        "choices": "options", "answer": "gold"}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    (tmp_path / "rows.jsonl").write_text(lines)
    return tmp_path


def task(folder: Path, **changes: object) -> Task:
    return task_from(BASE | changes, str(folder / "task.toml"))


def test_toml_file_is_read_relative_to_itself(folder: Path) -> None:
    text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in BASE.items())
    (folder / "task.toml").write_text(text)
    items = load_items(load_task(str(folder / "task.toml")))
    assert [i.id for i in items] == [r["id"] for r in ROWS]
    assert items[2].text == "Q: 2+1?\nA:" and items[2].choices == ("2", "3", "x")
    assert {i.answer for i in items} == {1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"promt": "x"}, "did you mean prompt"),
        ({"kind": "choice"}, "kind 'choice'"),
        ({"shots": "3"}, "shots = '3' .expected a int"),
        ({"limit": True}, "limit = True"),
        ({"verifier": "roughly"}, "verifier 'roughly'"),
        ({"normalize": ["lower"]}, "normalize 'lower'"),
        ({"choices": ""}, "no choices"),
        ({"extract": "("}, "not a valid pattern"),
    ],
)
def test_wrong_keys_are_named(folder: Path, change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        task(folder, **change)


def test_first_rows_are_examples_and_are_not_evaluated(folder: Path) -> None:
    items = load_items(task(folder, shots=2))
    assert [i.id for i in items] == [r["id"] for r in ROWS[2:]]
    assert items[0].text == "Q: 0+1?\nA: 1\n\nQ: 1+1?\nA: 2\n\nQ: 2+1?\nA:"


def test_examples_from_another_file_leave_all_items(folder: Path) -> None:
    (folder / "dev.json").write_text(json.dumps([ROWS[5] | {"q": "dev?"}]))
    items = load_items(task(folder, shots=1, shots_data="dev.json"))
    assert len(items) == 8 and items[0].text.startswith("Q: dev?\nA: 6\n\nQ: 0+1?")


def test_drawn_examples_never_hold_the_item_and_are_reproducible(folder: Path) -> None:
    drawn = task(folder, shots=7, shots_sampler="random")
    items = load_items(drawn, seed=3)
    for item, row in zip(items, ROWS, strict=True):
        assert item.text.count(f"Q: {row['q']}") == 1 and item.text.count("Q:") == 8
    assert items == load_items(drawn, seed=3)
    assert items != load_items(drawn, seed=4)
    with pytest.raises(BadData, match="7 rows for 8"):
        load_items(task(folder, shots=8, shots_sampler="random"))


def test_chat_prompts_get_examples_as_turns(folder: Path) -> None:
    item = load_items(task(folder, chat=True, system="Be brief.", shots=1))[0]
    assert [m["role"] for m in item.messages] == ["system", "user", "assistant", "user"]
    assert item.messages[2]["content"] == "1" and item.text == ""


def test_where_limit_and_templates_in_columns(folder: Path) -> None:
    items = load_items(task(folder, where="not img", id="{{id}}/{{q}}", limit=4))
    assert [i.id for i in items] == ["q0/0+1?", "q1/1+1?", "q2/2+1?", "q4/4+1?"]
    assert len(load_items(task(folder), limit=3)) == 3
    for where, message in (("imgs", "'imgs' is undefined"), ("not (", "where 'not .'")):
        with pytest.raises(UsageError, match=message):
            load_items(task(folder, where=where))


@pytest.mark.parametrize(("given", "index"), [(2, 2), ("4", 1), ("B", 1), ("c", 2), ("0", 0)])
def test_right_choices_by_index_text_or_letter(given: object, index: int) -> None:
    assert choice_index(given, ("3", "4", "xyz")) == index


def test_bad_rows_name_task_and_item(folder: Path) -> None:
    with pytest.raises(BadData, match="sums, item q0: answer 'Z' is none of 3"):
        load_items(task(folder, answer="{{'Z'}}"))
    with pytest.raises(BadData, match=r"item q0: template .*'qq' is undefined"):
        load_items(task(folder, prompt="{{qq}}"))
    with pytest.raises(BadData, match="no column 'nope'"):
        load_items(task(folder, choices="nope"))
    with pytest.raises(BadData, match="two items have the id 'same'"):
        load_items(task(folder, id="{{'same'}}"))


def test_prompt_records_need_no_template(tmp_path: Path) -> None:
    row = {"id": "a", "messages": [{"role": "user", "content": "1+1?"}], "answer": "2"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    made = task_from({"name": "p", "kind": "exact_match", "data": "p.jsonl"}, str(tmp_path / "t"))
    item = load_items(made)[0]
    assert item.as_messages == [{"role": "user", "content": "1+1?"}] and item.answer == "2"
