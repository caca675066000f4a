"""The tasks of PoETa v2 whose data are XML, SQuAD's JSON or MKQA's, by hand in their authors' form,
and the mean over its tasks."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from in_process import stage

from sabia.core.bench.answers import Answer, score_exact
from sabia.core.bench.task import Task
from sabia.core.bench.task_data.few_shot import target_text
from sabia.core.bench.task_files import items_of, load_tasks

QUESTION = """<question id="{id}" EK="No" TC="Yes" DS="No" IC="{IC}" MR="No" CE="No">
<header> Um  texto
longo.</header><statement>\nQual {id}?</statement>
<answers><option id="A" correct="No">um</option><option id="B" correct="No"/>
<option id="C" correct="Yes">três
linhas</option><option id="D" correct="No">q</option><option id="E" correct="No">c</option>
</answers></question>"""
ASKED = ("Cabeçalho: Um texto longo.\nEnunciado: Qual {id}?\nAlternativas:\nA. um\nB. None\n"
         "C. três linhas\nD. q\nE. c\nResposta:")  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A clone of the authors' repository with what its code fetches."""
    names = {"enem": "E.", "enem_2022": "E2.", "faquad": "F.", "mkqa": "M."}
    (tmp_path / "description.json").write_text(json.dumps(names))
    for name in ("enem", "faquad", "mkqa"):
        (tmp_path / "data" / name).mkdir(parents=True)
    for exam, ids in (("2009-1", (1, 2)), ("2009-2", (91,)), ("2016_2_-1", (5, 104)),
                      ("2017-2", (7,))):  # fmt: skip
        rows = [QUESTION.format(id=n, IC="Yes" if n == 2 else "No") for n in ids]
        text = f"<?xml version='1.0' encoding='utf-8'?><exam>{''.join(rows)}</exam>"
        (tmp_path / "data/enem" / f"{exam}.xml").write_text(text)
    row = {"id": "ENEM_2022_6", "question": "Qual?", "context": "Um\ntexto", "label": "b",
           "options": ["um", "dois", "t", "q", "c"], "IU": False, "ML": False}  # fmt: skip
    rows = [row, row | {"id": "x", "ML": True}, row | {"id": "y", "IU": True}]
    (tmp_path / "data/enem/2022.json").write_text(json.dumps(rows))
    for split in ("train", "dev"):
        (tmp_path / "data/faquad" / f"{split}.json").write_text(json.dumps({"data": squad(split)}))
    lines = [mkqa(n) for n in range(42)] + [mkqa(50) | {"answers": {"pt": [
        {"type": "long_answer", "text": None}]}}]  # fmt: skip
    packed = gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())
    (tmp_path / "data/mkqa/mkqa.jsonl.gz").write_bytes(packed)
    return tmp_path


def squad(split: str) -> list[dict[str, Any]]:
    def answered(n: int) -> dict[str, Any]:
        answers = [{"text": "o curso", "answer_start": 0}, {"text": "um ano", "answer_start": 3}]
        return {"id": f"{split}{n}", "question": f"Quanto {n}?", "answers": answers}

    long = {"context": "x" * 1300, "qas": [answered(9)]}
    paragraphs = [{"context": "Um curso.", "qas": [answered(n) for n in range(4)]},
                  {"context": "Sem nada.", "qas": []}, long]  # fmt: skip
    return [{"title": "T", "paragraphs": paragraphs}, {"paragraphs": paragraphs[1:2]}]


def mkqa(number: int) -> dict[str, Any]:
    answer = {"type": "entity", "text": "Rio de Janeiro", "aliases": ["Rio", "A Cidade"]}
    yes = {"type": "binary", "text": "yes"}
    ask = "quem é" if number else "é?"
    return {"example_id": -number, "queries": {"pt": ask, "en": "who"},
            "answers": {"pt": [answer if number else yes], "en": []}}  # fmt: skip


def task_of(name: str, root: Path) -> Task:
    (task,) = load_tasks([f"poeta_{name}"], [f"poeta={root}"])
    return task


def graded(task: Task, item: Any, text: str) -> float:
    rows = score_exact(task, "m", [(item, Answer(item.id, 0, text))])
    return next(row.value for row in rows if row.metric == (task.metric or "exact_match"))


def test_questions_of_examinations_are_read_from_xml(root: Path) -> None:
    task = task_of("enem", root)
    items = {item.id: item for item in items_of(task)}
    assert sorted(items) == ["2009_1", "2009_91", "2016_2__104", "2016_2__5", "2017_7"]
    for name, item in items.items():
        start, number = "E.\n\nExemplo 1:\n", name.rpartition("_")[2]
        shown, _, asked = item.text.removeprefix(start).partition(" C.\n###\nExemplo 2:\n")
        assert asked == ASKED.format(id=number)
        others = ("1", "91", "5", "7")  # none of the same examination, nor a long one
        same = {"1", "91"} if number in ("1", "91") else {"5"} if "2016" in name else {"7"}
        assert shown in [ASKED.format(id=n) for n in others if n not in same]
        assert [graded(task, item, text) for text in ("C.", "a letra c)", "C ou D")] == [1, 1, 0]
    (item,) = items_of(task := task_of("enem_2022", root))
    assert item.text.startswith("E2.\n\nExemplo 1:\nCabeçalho: Um texto longo.\nEnunciado: Qual ")
    assert item.text.endswith(
        "\nE. c\nResposta: C.\n###\nExemplo 2:\nCabeçalho: Um\ntexto\nEnunciado: Qual?\n"
        "Alternativas:\nA. um\nB. dois\nC. t\nD. q\nE. c\nResposta:"
    )
    assert (target_text(task, item), graded(task, item, " B."), graded(task, item, "b")) == (
        "B.", 1, 0)  # fmt: skip


def test_the_best_of_several_right_answers_counts(root: Path) -> None:
    task = task_of("faquad", root)
    items = items_of(task)
    assert sorted(item.id for item in items) == ["dev0", "dev1", "dev2", "dev3", "dev9"]
    first = next(item for item in items if item.id == "dev0")
    asked = "Contexto: Um curso.\nPergunta: Quanto 0?\nResposta:"
    assert first.text.startswith("F.\n\nExemplo 1:\nContexto: Um curso.\nPergunta: Quanto ")
    assert first.text.endswith(f"Resposta: o curso\n###\nExemplo 5:\n{asked}")
    assert "xxx" not in first.text
    given = {" Curso": 1, "O ano.": 1, "ano ou curso": 2 / 4, "nada": 0, "um": 0}
    assert {text: graded(task, first, text) for text in given} == given
    task = task_of("mkqa", root)
    items = {item.id: item for item in items_of(task)}
    assert len(items) == 42
    answer = "A Cidade"  # the first in the order of characters
    asked = f"Pergunta: quem é?\nResposta: {answer}\n"
    assert items["-5"].text.count(asked) >= 39 and "Exemplo 41:" in items["-5"].text
    assert items["0"].text.endswith("Pergunta: é?\nResposta:")
    assert [graded(task, items["0"], text) for text in ("Sim", "não")] == [1, 0]
    assert graded(task, items["-5"], "o rio") == 1 and target_text(task, items["-5"]) == answer
    assert graded(task, items["-5"], "Janeiro") == pytest.approx(2 / 4)


def test_the_mean_counts_from_guessing_on(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """(value - chance) / (1 - chance): .6 of right letters and an F1 of 2/5."""
    texts = {
        item.id: "C" if n < 3 else "A" for n, item in enumerate(items_of(task_of("enem", root)))
    }
    texts |= {f"dev{n}": "curso" if n < 2 else "nada" for n in (0, 1, 2, 3, 9)}
    rows = [{"id": key, "response": text} for key, text in texts.items()]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage("eval", task=("poeta_enem", "poeta_faquad"), data=(f"poeta={root}",), json=True,
          answers=(f"m={tmp_path / 'm.jsonl'}",))  # fmt: skip
    (mean,) = json.loads(capsys.readouterr().out)["groups"]
    assert (mean["group"], mean["metric"], mean["tasks"]) == ("poeta", "normalised", 2)
    assert mean["value_share"] == pytest.approx(((0.6 - 0.2) / 0.8 + 0.4) / 2)
