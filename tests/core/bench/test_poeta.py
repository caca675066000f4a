"""The definitions of PoETa v2 on hand-made files in their authors' form.

Prompts and answers are as `doc_to_text` and `doc_to_target` of PoETaV2/PoETaV2 write them, in the
order and with the examples of its generator.
"""

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sabia.core.bench.answers import Answer, score_exact
from sabia.core.bench.corpus_metrics import corpus_value
from sabia.core.bench.items import Item
from sabia.core.bench.task import Task
from sabia.core.bench.task_data.few_shot import target_text
from sabia.core.bench.task_files import items_of, load_tasks
from sabia.core.errors import UsageError

Form = tuple[str, dict[str, Any], str, str]
PAIR = {"premise": "p", "hypothesis": "h", "relatedness_score": 4.5, "entailment_judgment": 1}
OPTIONS = {"first": 0, "second": 1, "third": 0}
ARC = {"question": "q", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"}
EXAM = {"question": " \n q  r\ns", "answer": "b", "has_associated_images": False,
        "alternatives": ["a) x ", "b) y\nz"]}  # fmt: skip
STORY = {f"input_sentence_{number}": f"s{number}" for number in range(1, 5)}
TWEET = {"sentiment": "-1", "text": "a  b\n\nc"}
# by the name of a task, without that of its group: file, row, prompt, answer of an example
FORMS: dict[str, Form] = {
    "agnews_pt": ("ag_news_pt/data/test-00000-of-00001.parquet",
                  {"title": "t", "text": "x", "label": 2},
                  "Título: t\nTexto: x\nCategoria:", "Negócios"),
    "assin_rte": ("assin2/data/test-00000-of-00001.parquet", PAIR,
                  'Pergunta: Dado que "p", é verdade que "h"?\nResposta:', "Sim"),
    "assin_sts": ("assin2/data/test-00000-of-00001.parquet", PAIR,
                  "Sentença 1: p\nSentença 2: h\nResposta:", "4"),
    "boolq_pt": ("boolq_pt/default/validation/0000.parquet",
                 {"question": "q", "passage": "p" * 700, "answer": False},
                 f"Pergunta: q\nContexto: {'p' * 700}\nResposta:", "não"),
    "hatebr_binary": ("hatebr/test.parquet",
                      {"instagram_comments": "c", "offensive_language": True},
                      'Mensagem: "c".\nResposta:', "ofensiva"),
    "imdb_pt": ("imdb_pt/plain_text/test/0000.parquet", {"text": "a<br />b", "label": 1},
                "Crítica: a b\nAvaliação:", "positiva"),
    "massive": ("data/MASSIVE/1.0/data/pt-PT.jsonl",
                {"utt": "u", "scenario": "iot", "partition": "test"},
                "Comando: u\nCategoria:", "IoT"),
    "pt_hate_speech": ("Portuguese-Hate-Speech-Dataset/data.csv",
                       {"text": 'a "b", c', "hatespeech_comb": "0"},
                       'Mensagem: "a "b", c".\nResposta:', "inofensiva"),
    "sst2_pt": ("sst2_pt/data/validation-00000-of-00001.parquet", {"text": "s", "label": 0},
                "Crítica: s\nAvaliação:", "negativa"),
    "storycloze_pt": ("story_cloze_pt/data/eval-00000-of-00001.parquet",
                      STORY | {"sentence_quiz1": "e1", "sentence_quiz2": "e2",
                               "answer_right_ending": 2},
                      "Passagem 1: s1\nPassagem 2: s2\nPassagem 3: s3\nPassagem 4: s4\n"
                      "Desfecho 1: e1\nDesfecho 2: e2\nResposta:", "2"),
    "tweetsentbr": ("data/tweetsentbr/tweetsentbr.json", TWEET | {"group": "test"},
                    'Mensagem: "a b c".\nResposta:', "negativa"),
    "arc_challenge_greedy_pt": ("ai2_arc_pt/ARC-Challenge/test.parquet", ARC,
                                "q\nA. x\nB. y\nResposta:", "B"),
    "arc_easy_greedy_pt": ("ai2_arc_easy/ARC-Easy/test.parquet", ARC,
                           "q\nA. x\nB. y\nResposta:", "B"),
    "bluex_launch_version": ("BLUEX/data/questions-00000-of-00001.parquet", EXAM,
                             "Enunciado: q r s\nAlternativas:\nA. x \nB. y z\nResposta:", "B."),
    "poscomp": ("poscomp/data/train-00000-of-00001.parquet",
                EXAM | {"alternatives": ["A) x", " B) y"], "answer": "A"},
                "Enunciado: q  r\ns\nAlternativas:\nA. x\nB. y\nResposta:", "A."),
    "wsc285_pt": ("data/wsc285_pt/portuguese_wsc_portuguese_names.json",
                  {"manually_fixed_correct_sentence": "O pai viu Ana. Fim.",
                   "manually_fixed_incorrect_sentence": "O pai viu Eva. Fim."},
                  "O pai viu\nA. Ana. Fim.\nB. Eva. Fim.\nResposta:", "A."),
    "bigbench_pt_strategyqa": ("bigbench_pt/strategyqa/task.json",
                               {"input": "q", "target_scores": OPTIONS},
                               "q\nA) first\nB) second\nC) third\nResposta:", "B)"),
    "bigbench_pt_empirical_judgments": (
        "bigbench_pt/empirical_judgments/task.json",
        {"input": "q", "target_scores": {"causal": 0, "correlative": 0, "neutral": 1}},
        "q\nA) Causal\nB) Correlativa\nC) Neutra\nResposta:", "C)"),
    "broverbs_history_to_proverb": ("BRoverbs/BRoverbs_history_to_proverb.json",
                                    {"input": " q", "target_scores": OPTIONS},
                                    "História: q\nA) first\nB) second\nC) third\nResposta:", "B)"),
    "bigbench_pt_mathematical_induction": (
        "bigbench_pt/mathematical_induction/task.json",
        {"input": "q", "target_scores": {"Yes": 0, "No": 1}}, "q\nResposta:", "Não"),
    "repro": ("bigbench_pt/repro/task.json",
              {"input": "q", "target_scores": {"Positiva": 1, "Negativa": 0}},
              "Avaliação: q\nResposta:", "Positiva"),
}  # fmt: skip
# whose description has the ending of the authors' name
DESCRIBED = ("hatebr_binary", "pt_hate_speech", "storycloze_pt", "bluex_launch_version", "poscomp",
             "wsc285_pt")  # fmt: skip


def key_of(name: str, file: str) -> str:
    whole = name in DESCRIBED or file.startswith(("bigbench_pt", "BRoverbs"))
    return f"{name}_greedy" if whole else name


def written(root: Path, file: str, rows: list[dict[str, Any]]) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if file.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif file.endswith(".csv"):
        with path.open("w", newline="") as opened:
            table = csv.DictWriter(opened, rows[0].keys())
            table.writeheader()
            table.writerows(rows)
    elif "tweet" in file:
        path.write_text(json.dumps({str(number): row for number, row in enumerate(rows)}))
    elif file.startswith(("bigbench_pt", "BRoverbs")):
        path.write_text(json.dumps({"name": "x", "examples": rows}))
    elif file.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A clone of the authors' repository with 40 equal rows of each data set."""
    keys = {key_of(name, file): f"Instrução de {name}." for name, (file, *_) in FORMS.items()}
    (tmp_path / "description.json").write_text(json.dumps(keys))
    for name, (file, row, *_) in FORMS.items():
        rows = [row | {"id": f"U_{2018 + n % 2}_{n}", "question_id": 2 * n} for n in range(40)]
        if name == "massive":
            rows += [row | {"partition": "train"} for row in rows]
        if name == "tweetsentbr":
            rows += [row | {"group": "train"} for row in rows]
            rows += [rows[0] | {"sentiment": "-"}, rows[0] | {"text": None}]
        written(tmp_path, file, rows)
        for split in ("test", "validation", "eval"):
            if f"/{split}" in file:
                written(tmp_path, file.replace(f"/{split}", "/train"), rows)
    return tmp_path


def task_of(name: str, root: Path) -> Task:
    (task,) = load_tasks([f"poeta_{name}"], [f"poeta={root}"])
    return task


@pytest.mark.parametrize("name", FORMS)
def test_a_task_asks_as_its_authors_do(name: str, root: Path) -> None:
    _, _, prompt, answer = FORMS[name]
    task = task_of(name, root)
    items = items_of(task)
    assert len(items) == 40
    shown = [f"Exemplo {n + 1}:\n{prompt} {answer}\n###\n" for n in range(task.shots)]
    last = f"Exemplo {task.shots + 1}:\n{prompt}"
    assert items[0].text == "".join([f"Instrução de {name}.\n\n", *shown, last])
    assert target_text(task, items[0]) == answer
    right = score_exact(task, "m", [(items[0], Answer("", 0, f" {answer}"))])
    assert right[0].value == (0 if task.metric == "pearson" else 1)


def test_rows_and_examples_come_in_the_order_of_the_authors_generator(root: Path) -> None:
    """random.Random(42) shuffles the rows, then draws the examples of one after the other."""
    file, row, *_ = FORMS["agnews_pt"]
    written(root, file, [row | {"title": f"t{n}"} for n in range(350)])
    texts = ["long" * 80 if n % 3 == 0 else "see http" if n % 3 == 1 else "x" for n in range(90)]
    train = [row | {"title": f"e{n}", "text": text} for n, text in enumerate(texts)]
    written(root, file.replace("/test", "/train"), train)
    items = items_of(task_of("agnews_pt", root))
    generator, order = random.Random(42), list(range(350))
    generator.shuffle(order)
    assert [item.id for item in items] == [str(n) for n in order[:300]]
    for item in items:
        drawn = generator.sample(range(2, 90, 3), 12)
        titles = [line for line in item.text.splitlines() if line.startswith("Título")]
        assert titles == [*(f"Título: e{n}" for n in drawn), f"Título: t{item.id}"]


def test_examples_are_of_other_examinations_or_other_items(root: Path) -> None:
    file, row, *_ = FORMS["bluex_launch_version"]
    rows = [row | {"id": f"USP_{year}_{n}", "question": f"{year}"}
            for year in (2019, 2020, 2024) for n in range(5)]  # fmt: skip
    written(root, file, [*rows, rows[0] | {"answer": None}])
    items = items_of(task_of("bluex_launch_version", root))
    assert len(items) == 10
    for item in items:
        years = [line for line in item.text.splitlines() if line.startswith("Enunciado")]
        assert len(set(years)) == 2 and str(item.fields["question"]) in years[1]
    file, row, *_ = FORMS["wsc285_pt"]
    written(root, file, [row | {"question_id": n} for n in range(19)])
    for item in items_of(task_of("wsc285_pt", root)):
        assert item.text.count("B.\n###") == 9 - int(item.id) % 2  # all others, odd ones swapped
        assert item.answer == "AB"[int(item.id) % 2]


@pytest.mark.parametrize(
    ("name", "text", "right"),
    [
        ("bigbench_pt_strategyqa", "b)", True),
        ("bigbench_pt_strategyqa", "É B) e não A)", True),
        ("bigbench_pt_strategyqa", "b) é A)", False),
        ("bigbench_pt_mathematical_induction", "NÃO, porque sim", True),
        ("bigbench_pt_mathematical_induction", "sim ou não", False),
        ("bluex_launch_version", "A) ou a letra B. Fim", True),
        ("bluex_launch_version", "C ou D, ou b)", True),
        ("bluex_launch_version", "B, depois C", False),
        ("arc_easy_greedy_pt", " b ", True),
        ("arc_easy_greedy_pt", "a resposta b. é A", True),
        ("arc_easy_greedy_pt", "letra B", False),
        ("hatebr_binary", "É ofensiva, não inofensiva", True),
        ("hatebr_binary", "inofensiva", False),
        ("agnews_pt", "negócios", True),
        ("agnews_pt", "Negócios e Mundo", False),
        ("wsc285_pt", "B ou A", True),
    ],
)
def test_answers_are_read_as_by_the_authors(name: str, text: str, right: bool, root: Path) -> None:
    task = task_of(name, root)
    (row,) = score_exact(task, "m", [(items_of(task)[0], Answer("", 0, text))])
    assert row.value == right


def corpus(task: Task, pairs: list[tuple[str, str]]) -> float:
    scored = [(Item(str(n), answer=right), Answer(str(n), 0, text))
              for n, (right, text) in enumerate(pairs)]  # fmt: skip
    rows = score_exact(task, "m", scored)
    parts = [[row.value for row in rows if row.metric == f"{task.metric}.{n}"] for n in (0, 1)]
    return corpus_value(task.metric, np.array(parts).T)


def test_labels_are_averaged_and_numbers_correlated(root: Path) -> None:
    f1 = task_of("tweetsentbr", root)
    pairs = [("positiva", "Positiva"), ("positiva", "neutra"), ("neutra", "neutra"),
             ("neutra", "talvez"), ("positiva", "negativa")]  # fmt: skip
    # of the labels that occur: positive 2·1/(3+1), neutral 2·1/(2+2)
    assert corpus(f1, pairs) == pytest.approx((2 / 4 + 2 / 4) / 2)
    r = task_of("assin_sts", root)
    given = [("4.5", "4"), ("2.0", "1.5"), ("3.0", " 3 "), ("4.8", "quatro"), ("1.0", "nan")]
    # an answer that is no number stands for the lowest of 5, as with its authors
    right, text = [4.5, 2, 3, 5, 5], [4, 1.5, 3, 1, 1]
    assert corpus(r, given) == pytest.approx(np.corrcoef(right, text)[0, 1])
    assert corpus(r, [("1", "2"), ("3", "2")]) == 0


def test_all_tasks_are_named_and_each_is_one(root: Path) -> None:
    with pytest.raises(UsageError, match=r"poeta=.* expected .* bigbench_pt/sat_math/task.json"):
        load_tasks(["poeta"], [f"poeta={root}"])
    with pytest.raises(UsageError, match=r"poeta_bbq is no file, .* none of the definitions"):
        load_tasks(["poeta_bbq"], [f"poeta={root}"])
    with pytest.raises(UsageError, match=r"poeta_mina_br .expected .*MinaBR/task.json of a clone"):
        load_tasks(["poeta_mina_br"])
