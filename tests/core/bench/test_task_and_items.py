"""Task files are read strictly; rows become items; examples never hold the item itself."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from sabia.core.bench.items import choice_index
from sabia.core.bench.task import Task, load_tasks_of, task_from
from sabia.core.bench.task_data.few_shot import load_items
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
    items = load_items(*load_tasks_of(str(folder / "task.toml")))
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
        ({"kind": "exact_match", "choices": "", "extract": "("}, "not a valid pattern"),
        ({"metric": "f1"}, "metric 'f1' .expected one of acc, acc_norm, acc_bytes"),
        ({"kind": "exact_match", "metric": "acc"}, "metric 'acc' .expected one of exact_match, f1"),
        ({"kind": "exact_match", "choices": "", "metric": "f1_macro"}, "f1_macro needs labels"),
        (
            {"kind": "exact_match", "choices": "", "metric": "pearson", "labels": ["1", "x"]},
            "'x' .expected numbers",
        ),
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
    with pytest.raises(BadData, match=r"item q0: template .*can only concatenate"):
        load_items(task(folder, prompt="{{ [] + 1 }}"))


def test_equal_options_are_noted(folder: Path, capsys: pytest.CaptureFixture) -> None:
    load_items(task(folder))
    assert not capsys.readouterr().err
    load_items(task(folder, choices=["a", "b", "a"], answer="{{0}}"))
    assert "items have equal options, of which only the first" in capsys.readouterr().err


def test_prompt_records_need_no_template(tmp_path: Path) -> None:
    row = {"id": "a", "messages": [{"role": "user", "content": "1+1?"}], "answer": "2"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    made = task_from({"name": "p", "kind": "exact_match", "data": "p.jsonl"}, str(tmp_path / "t"))
    item = load_items(made)[0]
    assert item.as_messages == [{"role": "user", "content": "1+1?"}] and item.answer == "2"


# a value of every key, and the tasks in which it acts: kind and the keys that it needs
PLAIN = {"prompt": "{{q}}"}
TALK = PLAIN | {"chat": True}
LOOKUP = {"tools": ["lookup"], "lookup": "f"}
EVERY_KEY = {
    "source": ("s", "multiple_choice exact_match rubric perplexity", {}),
    "rows": ("q", "multiple_choice exact_match rubric perplexity", {}),
    "shots_where": ("q", "multiple_choice exact_match rubric", {"shots": 1}),
    "heading": ("h", "multiple_choice exact_match rubric", PLAIN | {"shots": 1}),
    "labels": (["1", "2"], "exact_match", {"metric": "pearson"}),
    "id": ("id", "multiple_choice exact_match rubric perplexity", {}),
    "description": ("d", "multiple_choice exact_match rubric perplexity", {}),
    "capability": ("c", "multiple_choice exact_match rubric perplexity", {}),
    "cluster": ("q", "multiple_choice exact_match rubric perplexity", {}),
    "split": ("held-out", "multiple_choice exact_match rubric perplexity", {}),
    "joined": ("f", "multiple_choice exact_match rubric perplexity", {}),
    "joined_on": ("q", "multiple_choice exact_match rubric perplexity", {"joined": "f"}),
    "each": ("q", "multiple_choice exact_match rubric perplexity", {}),
    "turns": ("q", "exact_match rubric", TALK),
    "graded": ("conversation", "exact_match rubric", TALK | {"turns": "q"}),
    "tools": (["python"], "exact_match rubric", {}),
    "max_steps": (2, "exact_match rubric", {"tools": ["python"]}),
    "lookup": ("f", "exact_match rubric", {"tools": ["lookup"]}),
    "lookup_key": ("k", "exact_match rubric", LOOKUP),
    "lookup_text": ("t", "exact_match rubric", LOOKUP),
    "lookup_about": ("a", "exact_match rubric", LOOKUP),
    "paraphrase": ("q", "multiple_choice exact_match rubric perplexity", {}),
    "canary": ("c 12ab", "multiple_choice exact_match rubric perplexity", {}),
    "where": ("q", "multiple_choice exact_match rubric perplexity", {}),
    "limit": (1, "multiple_choice exact_match rubric perplexity", {}),
    "prompt": ("{{q}}", "multiple_choice exact_match rubric", {}),
    "system": ("s", "multiple_choice exact_match rubric", {}),
    "chat": (True, "multiple_choice exact_match rubric", {}),
    "delimiter": ("", "multiple_choice exact_match rubric", PLAIN | {"shots": 1}),
    "choices": (["a", "b"], "multiple_choice", {}),
    "answer": ("gold", "multiple_choice exact_match", {}),
    "target": ("t", "multiple_choice exact_match rubric", {"shots": 1}),
    "references": ("r", "exact_match", {}),
    "group": ("g", "multiple_choice exact_match", {}),
    "guessing": (0.5, "multiple_choice exact_match", {"group": "g"}),
    "shots": (1, "multiple_choice exact_match rubric", {}),
    "shots_data": ("f", "multiple_choice exact_match rubric", {"shots": 1}),
    "shots_sampler": ("first", "multiple_choice exact_match rubric", {"shots": 1}),
    "separator": ("", "multiple_choice exact_match rubric", PLAIN | {"shots": 1}),
    "extract": ("x", "exact_match", {}),
    "extract_pick": ("first", "exact_match", {"extract": "x"}),
    "normalize": (["case"], "exact_match", {}),
    "verifier": ("exact", "exact_match", {}),
    "checks": ("c", "exact_match", {}),
    "check_arguments": ("a", "exact_match", {"checks": "c"}),
    "max_new_tokens": (1, "exact_match rubric", {}),
    "temperature": (0.5, "exact_match rubric", {}),
    "top_p": (0.5, "exact_match rubric", {}),
    "samples": (1, "exact_match rubric", {}),
    "stop": (["x"], "exact_match rubric", {}),
    "rubric": ("r", "rubric", {}),
    "scoring": ("points", "rubric", {}),
    "maximum": ("m", "rubric", {"scoring": "points"}),
    "text": ("text", "perplexity", {}),
}


def test_every_key_acts_or_is_refused() -> None:
    required = {"name", "kind", "data", "metric", "path", "yaml"}
    assert EVERY_KEY.keys() == {f.name for f in fields(Task)} - required
    for key, (value, kinds, needed) in EVERY_KEY.items():
        for kind in ("multiple_choice", "exact_match", "rubric", "perplexity"):
            given = {"name": "t", "kind": kind, "data": "d", key: value} | needed
            if kind == "multiple_choice":
                given.setdefault("choices", ["a", "b"])
            if kind in kinds.split():
                assert getattr(task_from(given), key) == tuple_of(value)
                if not needed:
                    continue
                given = {k: v for k, v in given.items() if k not in needed}
                if kind == "multiple_choice" and key == "delimiter":
                    given["chat"] = True
            with pytest.raises(
                UsageError, match=f": {key} has no effect|no choices|metric 'pearson'"
            ):
                task_from(given)


def tuple_of(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def test_a_system_prompt_comes_once_before_examples_and_question(folder: Path) -> None:
    for shots in (0, 2):
        for item in load_items(task(folder, system="SYS. ", shots=shots)):
            assert item.text.startswith("SYS. Q: ") and item.text.count("SYS.") == 1


def test_choices_from_an_expression_or_in_words_what_is_wrong(folder: Path) -> None:
    rows = [{"id": "a", "q": "?", "choices": {"text": ["no", "yes"], "label": ["A", "B"]},
             "json": '["no", "yes"]', "gold": "B"}]  # fmt: skip
    (folder / "rows.jsonl").write_text(json.dumps(rows[0]))
    for choices in ("{{choices.text}}", " {{ choices['text'] }} ", "json", "{{ json }}",
                    "{{choices.text | tojson}}"):  # fmt: skip
        (item,) = load_items(task(folder, choices=choices))
        assert item.choices == ("no", "yes") and item.answer == 1
    for choices in ("{{ q }}", "{{ choices.label[0] }}", "{{ choices.label[:1] }}", "x{{ q }}"):
        with pytest.raises(BadData, match=r"choices = .*gives .*expected a list of two or more"):
            load_items(task(folder, choices=choices))
    for choices in ("{{ gone.text }}", "{{ choices.gone }}"):
        with pytest.raises(BadData, match="gone"):
            load_items(task(folder, choices=choices))


def test_clusters_are_columns_or_templates(folder: Path) -> None:
    assert [i.cluster for i in load_items(task(folder, cluster="gold"))] == ["B"] * 8
    assert load_items(task(folder, cluster="{{ q[0] }}"))[3].cluster == "3"
    assert load_items(task(folder))[0].cluster == ""
    with pytest.raises(BadData, match="no column 'gone'"):
        load_items(task(folder, cluster="gone"))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (b'{"id": 1, "q": null, "a": "x"}\n', "null"),
        (b"\xff\xfe\x00bad", "not UTF-8"),
    ],
)
def test_nulls_and_other_encodings_are_bad_data(rows: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(rows)
    (tmp_path / "t.toml").write_text(
        'name = "t"\nkind = "exact_match"\ndata = "rows.jsonl"\nprompt = "{{q}}"\nanswer = "a"\n'
    )
    with pytest.raises(BadData, match=message):
        load_items(*load_tasks_of(str(tmp_path / "t.toml")))


def test_a_file_of_several_tasks_has_a_table_of_each(folder: Path) -> None:
    text = "\n".join(f"{key} = {json.dumps(BASE[key])}" for key in BASE if key != "name")
    tables = '[tasks.one]\nlimit = 1\n[tasks.two]\nprompt = "{{ q }}"\n'
    (folder / "several.toml").write_text(f"{text}\nlimit = 5\n{tables}")
    one, two = load_tasks_of(str(folder / "several.toml"))
    assert (one.name, one.limit, two.name, two.limit) == ("one", 1, "two", 5)
    assert [load_items(one)[0].text, load_items(two)[0].text] == ["Q: 0+1?\nA:", "0+1?"]
    for wrong, message in (
        ("tasks = 3", "tasks = 3 .expected"),
        ("[tasks.a]\nx = 1", "no key 'x'"),
    ):
        (folder / "wrong.toml").write_text(f"{text}\n{wrong}\n")
        with pytest.raises(UsageError, match=message):
            load_tasks_of(str(folder / "wrong.toml"))


def test_rows_lie_in_an_object_and_what_is_joined_in_a_folder_above(folder: Path) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "rows.json").write_text(json.dumps({"examples": ROWS}))
    (folder / "about.json").write_text('{"text": "Add."}')
    changes = {"data": "a/b/rows.json", "rows": "examples", "joined": "about.json",
               "system": "{{ joined.text }} "}  # fmt: skip
    items = load_items(task(folder, **changes))
    assert len(items) == 8 and items[0].text == "Add. Q: 0+1?\nA:"
    for rows, message in (("nope", "no column 'nope'"), ("{{ [1] }}", "expected objects")):
        with pytest.raises(BadData, match=message):
            load_items(task(folder, **changes | {"rows": rows}))


def test_examples_satisfy_their_own_condition_under_headings(folder: Path) -> None:
    made = task(folder, shots=2, shots_data="rows.jsonl", shots_where="q != item.q and not img",
                heading="{{ number }}. ", where="img", choices=["3", "4"],
                answer="{{ 1 }}")  # fmt: skip
    (item,) = load_items(made)
    assert item.text == "1. Q: 0+1?\nA: 4\n\n2. Q: 1+1?\nA: 4\n\n3. Q: 3+1?\nA:"
    with pytest.raises(BadData, match="0 rows for 2"):
        load_items(task(folder, shots=2, shots_data="rows.jsonl", shots_where="q == 'x'"))
    with pytest.raises(UsageError, match="shots_where 'qq': 'qq' is undefined"):
        load_items(task(folder, shots=2, shots_where="qq"))
