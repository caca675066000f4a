"""Metrics of a whole corpus: sacrebleu's own numbers, tables by hand, and what items change."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import sacrebleu

from sabia.core.bench.answers import Answer
from sabia.core.bench.corpus_metrics import CORPUS, corpus_value, item_values
from sabia.core.bench.harness.scores import score_answers, score_pairs
from sabia.core.bench.result_summary import summarise
from sabia.core.bench.task_files import items_of, load_tasks
from sabia.core.errors import BadData, UsageError

TEXT = "a rápida raposa não pulou, 3.5 vezes! o cão (preguiçoso) dorme 猫 é — x"
WORDS = TEXT.split()
TASK = """
task: translated
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
doc_to_text: "{{q}}"
doc_to_target: text
metric_list: [{metric: bleu}, {metric: chrf}, {metric: chrf++}, {metric: ter}]
"""
WHOLE = {
    "bleu": sacrebleu.corpus_bleu,
    "chrf": sacrebleu.corpus_chrf,
    "chrf++": lambda texts, references: sacrebleu.corpus_chrf(texts, references, word_order=2),
    "ter": sacrebleu.corpus_ter,
}


@pytest.mark.parametrize("seed", range(4))
def test_a_translation_task_has_the_numbers_of_sacrebleu(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    said = lambda least: " ".join(rng.choices(WORDS, k=rng.randint(least, 12)))  # noqa: E731
    rows = [{"q": str(n), "text": said(1)} for n in range(rng.choice([1, 2, 37]))]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(TASK)
    (task,) = load_tasks([str(tmp_path / "task.yaml")])
    items = items_of(task)
    texts = [rng.choice([said(0), f"{row['text']} {said(0)}"]) for row in rows]
    answered = [(item, Answer(item.id, 0, text)) for item, text in zip(items, texts, strict=True)]
    summary = summarise(score_answers(task, "m", answered), {task.name: task.metric})
    assert summary.headlines[task.name] == "bleu"
    for name, whole in WHOLE.items():
        result = summary.result("m", task.name, name)
        assert result is not None and result.items == len(rows)
        wanted = whole(texts, [[row["text"] for row in rows]]).score
        assert result.interval.value == pytest.approx(wanted, rel=1e-12)
    assert CORPUS.keys() - WHOLE.keys() == {"binary_f1", "mcc", "checks", "f1_macro", "pearson"}


def test_several_references_are_those_of_one_item(tmp_path: Path) -> None:
    rows = [{"q": "x", "text": ["o cão dorme", "um cão dorme agora"]}, {"q": "y", "text": ["é x"]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(TASK)
    (task,) = load_tasks([str(tmp_path / "task.yaml")])
    answered = [
        (item, Answer(item.id, 0, t))
        for item, t in zip(items_of(task), ["um cão dorme", "é z"], strict=True)
    ]
    result = summarise(score_answers(task, "m", answered)).result("m", task.name, "bleu")
    references = [["o cão dorme", "é x"], ["um cão dorme agora", None]]
    wanted = sacrebleu.corpus_bleu(["um cão dorme", "é z"], references).score
    assert result is not None and result.interval.value == pytest.approx(wanted, rel=1e-12)


def test_f1_and_mcc_of_tables_by_hand() -> None:
    two = np.array([[1, 1]] * 6 + [[0, 1]] * 1 + [[1, 0]] * 2 + [[0, 0]] * 3)
    assert corpus_value("binary_f1", two) == 12 / 15
    assert corpus_value("mcc", two) == pytest.approx((6 * 3 - 1 * 2) / math.sqrt(7 * 8 * 4 * 5))
    assert corpus_value("binary_f1", two * 0) == corpus_value("mcc", two * 0) == 0.0
    three = np.random.default_rng(0).integers(0, 3, (200, 2))
    of_right, of_given = (np.eye(3)[three[:, column]] for column in (0, 1))
    x, y = of_right - of_right.mean(0), of_given - of_given.mean(0)
    wanted = (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())
    assert corpus_value("mcc", three) == pytest.approx(wanted)


def test_the_items_values_have_the_metric_as_mean_and_its_standard_error() -> None:
    rng = np.random.default_rng(3)

    def drawn(n: int) -> np.ndarray:
        right = rng.integers(0, 2, n)
        return np.stack([right, np.where(rng.random(n) < 0.75, right, 1 - right)], axis=1)

    values = [item_values("mcc", drawn(150)) for _ in range(400)]
    found = np.array([v.mean() for v in values])
    errors = np.array([v.std(ddof=1) / math.sqrt(150) for v in values])
    assert errors.mean() == pytest.approx(found.std(ddof=1), rel=0.12)
    pairs = drawn(40)
    assert item_values("mcc", pairs).mean() == pytest.approx(corpus_value("mcc", pairs))
    assert item_values("mcc", pairs[:1]).tolist() == [corpus_value("mcc", pairs[:1])]


CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: options
doc_to_target: gold
metric_list: [{metric: f1}, {metric: mcc}, {metric: acc}]
"""


def test_f1_of_a_choice_task_is_that_of_the_second_of_two_choices(tmp_path: Path) -> None:
    rows = [{"q": f"q{n}", "options": ["não", "sim"], "gold": n % 2} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "task.yaml").write_text(CHOICES)
    (task,) = load_tasks([str(tmp_path / "task.yaml")])
    scores = [
        row
        for item in items_of(task)
        for row in score_pairs(task, "m", item, [(-1.0, False), (-0.5 - (item.id > "4"), False)])
    ]
    summary = summarise(scores, {task.name: task.metric})
    assert summary.headlines["choices"] == "binary_f1"
    values = {r.metric: r.interval.value for r in summary.results}
    # items 0 to 4 are taken for 1, of which 1 and 3 are right; 5 and 7 are missed
    assert values == pytest.approx({"acc": 3 / 8, "binary_f1": 4 / 9, "mcc": -4 / math.sqrt(240)})
    (tmp_path / "rows.jsonl").write_text('{"q": "x", "options": ["a", "b", "c"], "gold": 0}')
    with pytest.raises(BadData, match="f1 needs one right choice of two"):
        score_pairs(task, "m", items_of(task)[0], [(-1.0, False)] * 3)


def test_translations_take_no_settings_of_exact_match(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text(
        TASK.replace("{metric: bleu}", "{metric: bleu, ignore_case: true}")
    )
    with pytest.raises(UsageError, match="metric bleu: ignore_case is not supported"):
        load_tasks([str(tmp_path / "task.yaml")])


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_f1_of_labels_and_the_correlation_are_those_of_their_definitions(
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    right, given = rng.integers(0, 4, 60), rng.integers(0, 6, 60)  # 4 and 5 are no labels
    each = []
    for label in set(right.tolist()):
        hits = int(((right == label) & (given == label)).sum())
        each.append(2 * hits / int((right == label).sum() + (given == label).sum()))
    wanted = sum(each) / len(each)
    assert corpus_value("f1_macro", np.stack([right, given], 1)) == pytest.approx(wanted)
    x = rng.normal(3, 1, 60)
    y = 0.5 * x + rng.normal(0, 1, 60)
    r = corpus_value("pearson", np.stack([x, y], 1))
    assert r == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-12)
    assert corpus_value("pearson", np.stack([x * 1e6, y / 1e6], 1)) == pytest.approx(r)
