"""The tasks and the gate that come with sabia for quantized models."""

import json
import re
from pathlib import Path

import pytest
from capability_items import FILES, FOLDER, text_of

from sabia.core.bench.gate_file import load_gate
from sabia.core.bench.task_files import items_of, load_tasks
from sabia.core.judge.verifiers import verify

WRONG = {"function_calls": '{"name": "get_weather"}', "word_problems": "0.5", "needle": "no"}


@pytest.mark.parametrize("name", FILES)
def test_files_are_those_of_their_generator(name: str) -> None:
    assert (FOLDER / f"{name}.jsonl").read_text("utf-8") == text_of(name)


def test_right_answers_are_right_and_needles_are_in_their_texts() -> None:
    tasks = load_tasks(["capabilities"])
    assert {task.capability for task in tasks} == {"function calling", "maths", "long context"}
    for task in tasks:
        items = items_of(task)
        assert len(items) >= 100 and len({item.id for item in items}) == len(items)
        assert len({item.messages[-1]["content"] for item in items}) > 0.9 * len(items)
        for item in items:
            answer = str(item.answer)
            assert verify(task.verifier, answer, answer)
            assert not verify(task.verifier, WRONG[task.name], answer)
            text = item.messages[-1]["content"]
            if task.name == "needle":
                place = item.fields["place"]
                assert re.findall(rf"access code of {place} is (\d+)", text) == [answer]
                assert text.count("The access code of") == 4
                assert text.count(". ") == item.fields["sentences"] + 4
            elif task.name == "word_problems":
                assert int(answer) > 0
            else:  # the arguments stand in the request
                called = json.loads(answer)
                assert f"\n{called['name']}(" in f"\n{item.messages[0]['content']}"
                for value in called["arguments"].values():
                    assert value is True or str(value) in text


def test_the_gate_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = load_gate("capabilities")
    assert gate.baseline == "original" and gate.rules[0].kind == "capability"
    monkeypatch.chdir(tmp_path)
    own = '[[rule]]\ntask = "*"\nmax_drop = 0.2\n'
    Path("capabilities").write_text(f'baseline = "mine"\n{own}')
    assert load_gate("capabilities").baseline == "mine"
