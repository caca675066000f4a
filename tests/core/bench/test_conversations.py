"""Conversations: the user's later turns follow the model's own answers; tools; step limits."""

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import stage

from sabia.core.bench.answers import Answer
from sabia.core.bench.conversation.conversations import hold
from sabia.core.bench.conversation.model_tools import ModelTools, run_program
from sabia.core.bench.items import Item
from sabia.core.bench.task import Task, task_from
from sabia.core.bench.task_data.few_shot import load_items
from sabia.core.errors import UsageError

STUB = Path(__file__).parents[2] / "openai_stub.py"
_spec = importlib.util.spec_from_file_location("openai_stub", STUB)
assert _spec is not None and _spec.loader is not None
openai_stub = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(openai_stub)

KEYS = {"name": "talk", "kind": "exact_match", "data": "rows.jsonl", "id": "key", "turns": "turns",
        "chat": True, "prompt": "{{ turn.ask }}", "checks": "{{ turn.checks }}",
        "check_arguments": "{{ turn.given }}"}  # fmt: skip
SAYS = [("Say rio", "rio"), ("Say mar", "mar"), ("Say sol", "sol")]
ROW = {"key": 7, "turns": [{"ask": ask, "checks": ["contains"], "given": [{"reference": word}]}
                           for ask, word in SAYS]}  # fmt: skip


def task_in(folder: Path, rows: Sequence[dict], **keys: Any) -> Task:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [
        f"{name} = {json.dumps(value)}" for name, value in (KEYS | keys).items() if value != ""
    ]
    (folder / "talk.toml").write_text("\n".join(lines))
    return task_from({k: v for k, v in (KEYS | keys).items() if v != ""}, str(folder / "talk.toml"))


def asking(reply: Callable[[list[str], int], Answer]) -> tuple[Callable, list[list[str]]]:
    """A model as a function of the contents of its messages, and what it was asked."""
    seen: list[list[str]] = []

    def ask(prompts: Sequence[Item], sample: int) -> list[Answer]:
        asked = [[str(m["content"]) for m in prompt.messages] for prompt in prompts]
        seen.extend(asked)
        ids = [prompt.id for prompt in prompts]
        assert len(set(ids)) == len(ids)
        return [replace(reply(texts, sample), item_id=name)
                for texts, name in zip(asked, ids, strict=True)]  # fmt: skip

    return ask, seen


def test_own_answers_stand_between_the_turns(tmp_path: Path) -> None:
    task = task_in(tmp_path, [ROW, ROW | {"key": 8, "turns": ROW["turns"][:1]}])
    items = load_items(task)
    assert [item.id for item in items] == ["7/1", "7/2", "7/3", "8/1"]
    assert {item.cluster for item in items} == {"7", "8"}
    ask, seen = asking(lambda texts, sample: Answer("", 0, f"{len(texts)} {sample}", tokens=2))
    answers = hold(task, items, 2, ask)
    assert [(a.item_id, a.sample, a.text) for a in answers[:4]] == [
        ("7/1", 0, "1 0"), ("7/1", 1, "1 1"), ("7/2", 0, "3 0"), ("7/2", 1, "3 1"),
    ]  # fmt: skip
    first = ["Say rio", "1 0", "Say mar", "3 0", "Say sol"]
    assert seen[:4] == [first[:1], ["Say rio"], first[:3], first]
    assert [m["content"] for m in answers[4].messages] == first
    assert len(seen) == 8


def test_a_turn_without_an_answer_ends_its_conversation(tmp_path: Path) -> None:
    def reply(texts: list[str], _: int) -> Answer:
        return Answer("", 0, "x", missing="cut" if len(texts) == 3 else "")

    ask, seen = asking(reply)
    task = task_in(tmp_path, [ROW])
    answers = hold(task, load_items(task), 1, ask)
    assert [a.missing for a in answers] == ["", "cut", "turn 2 has no answer"] and len(seen) == 2
    whole = task_in(tmp_path, [ROW], graded="conversation", checks="", answer="{{ 'rio' }}",
                    check_arguments="")  # fmt: skip
    (item,) = load_items(whole)
    assert item.further == ("Say mar", "Say sol")
    (one,) = hold(whole, [item], 1, ask)
    assert one.missing == "turn 2: cut"
    ask, _ = asking(lambda texts, _: Answer("", 0, f"at {len(texts)}", tokens=3))
    (one,) = hold(whole, [item], 1, ask)
    assert one.text == "[1]\nat 1\n\n[2]\nat 3\n\n[3]\nat 5" and one.tokens == 9


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)}}  # fmt: skip


def test_calls_are_answered_until_the_limit(tmp_path: Path) -> None:
    rows = {"id": ["art. 5", "art. 6"], "text": ["All are equal.", "Health is a right."]}
    pq.write_table(pa.table(rows), tmp_path / "law.parquet")
    task = task_in(tmp_path, [ROW], tools=["lookup", "python"], lookup="law.parquet", max_steps=2)
    asked = [call("lookup", query="ART. 5"), call("python", code="print(6 * 7)"), call("shell")]

    def reply(texts: list[str], _: int) -> Answer:
        calls = {"Say rio": asked, "Say mar": [call("python", code=3)], "Say sol": asked[:1]}
        last = next(text for text in reversed(texts) if text in calls)
        since = texts[texts.index(last) :]
        if last == "Say sol" or len(since) == 1:
            return Answer("", 0, "", message={"tool_calls": calls[last]}, tokens=5)
        return Answer("", 0, f"done {since[-1]}", tokens=5)

    ask, seen = asking(reply)
    answers = hold(task, load_items(task), 1, ask, ModelTools(task))
    first, second, third = answers
    assert [made["result"] for made in first.more["calls"]] == [
        '[{"key": "art. 5", "text": "All are equal."}]', "42\n",
        "error: no tool 'shell' (expected one of lookup, python)",
    ]  # fmt: skip
    assert first.more["calls"][0] | {"result": ""} == {
        "step": 1, "tool": "lookup", "arguments": {"query": "ART. 5"}, "result": "",
    }  # fmt: skip
    assert first.tokens == 10 and not first.missing
    assert second.text.startswith("done error: expected python with arguments")
    assert third.missing == "no answer after 2 steps of calls" and third.tokens == 15
    assert len(third.more["calls"]) == 2 and len(seen) == 2 + 2 + 3


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("print('é' * 9000)", "é" * 8000),
        ("print(1)\n1 / 0", '1\nTraceback (most recent call last):\n  File "program", line 2'),
        ("import socket\nsocket.socket()", "PermissionError"),
        ("while True: pass", "error: the program was killed"),
    ],
)
def test_programs_print_and_cannot_do_more(source: str, said: str) -> None:
    printed = run_program(source)
    assert said in printed and len(printed) <= 8000


def test_a_server_holds_conversations_with_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    task_in(tmp_path, [ROW, ROW | {"key": 8}], tools=["python"])

    def answer(text: str) -> Any:
        last = text.rpartition("\n")[2] or text.strip().rpartition("\n")[2]
        if last == "Say mar":
            code = call("python", code="print('mar')")
            return {"role": "assistant", "content": None, "tool_calls": [code | {"id": "c1"}]}
        return {"Say rio": "o rio", "mar": "o mar", "Say sol": "a lua"}[last]

    out = tmp_path / "s.parquet"
    with openai_stub.Stub(answer) as stub:
        for _ in range(2):  # the second run takes all from the cache
            stage(
                "eval", task=(str(tmp_path / "talk.toml"),), model=(f"{stub.url}#m",), json=True,
                judge_cache=str(tmp_path / "cache"), out=out, force=True,
            )  # fmt: skip
            made = json.loads(capsys.readouterr().out)
            # 2 conversations of equal messages, of which the calls are cached
            assert stub.requests == 4
    values = {r["metric"]: r["value_share"] for r in made["results"]}
    assert values["exact_match"] == 4 / 6 and values["conversation"] == 0
    assert stub.bodies[0]["tools"][0]["function"]["name"] == "python"
    asked = [(m["role"], m.get("content")) for m in stub.bodies[-1]["messages"]]
    assert asked[:3] == [("user", "Say rio"), ("assistant", "o rio"), ("user", "Say mar")]
    assert asked[4:] == [("tool", "mar\n"), ("assistant", "o mar"), ("user", "Say sol")]
    details = [json.loads(r["detail"]) for r in pq.read_table(out).to_pylist() if r["detail"]]
    assert [d["calls"][0]["result"] for d in details if "calls" in d] == ["mar\n"] * 2


def test_a_local_model_holds_conversations(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    task_in(tmp_path, [ROW], max_new_tokens=4)
    for _ in range(2):
        stage("eval", task=(str(tmp_path / "talk.toml"),), model=(str(tiny_model),), json=True,
              judge_cache=str(tmp_path / "cache"), out=tmp_path / "s.parquet")  # fmt: skip
        made = json.loads(capsys.readouterr().out)
        assert {r["metric"]: r["items"] for r in made["results"]}["exact_match"] == 3


def test_answers_of_all_turns_may_stand_in_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    task_in(tmp_path, [ROW])
    given = tmp_path / "answers.jsonl"
    good, bad = ["rio", "mar", "sol"], ["rio", "mar", "lua"]
    rows = [{"key": 7, "model": "good", "choices": [{"index": 0, "turns": good}]},
            {"key": 7, "model": "bad", "turns": [{"response": text} for text in bad]},
            {"key": 7, "model": "short", "turns": bad[:2]}]  # fmt: skip
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage("eval", task=(str(tmp_path / "talk.toml"),), answers=(str(given),), json=True,
          max_missing=1.0)  # fmt: skip
    made = json.loads(capsys.readouterr().out)
    got = {(r["model"], r["metric"]): r["value_share"] for r in made["results"]}
    assert got["good", "exact_match"] == 1 and got["bad", "exact_match"] == 2 / 3
    assert (got["good", "conversation"], got["bad", "conversation"]) == (1, 0)
    assert ("short", "conversation") not in got


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"chat": False}, "turns has no effect"),
        ({"tools": ["lookup"]}, "no lookup"),
        ({"lookup": "f"}, "lookup has no effect"),
        ({"tools": ["shell"]}, "expected one of lookup, python"),
        ({"max_steps": 3}, "max_steps has no effect"),
        ({"graded": "all"}, "expected one of turns, conversation"),
        ({"turns": "", "prompt": "{{ key }}", "graded": "turns", "checks": "", "answer": "key",
          "check_arguments": ""}, "graded has no effect"),
        ({"metric": "conversation", "graded": "conversation"}, 'graded = "turns"'),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_are_refused(keys: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        task_in(tmp_path, [ROW], **keys)
