"""Scores of one item by their definitions, with accents, ties, extraction and normalisation."""

import math

import pytest

from sabia.core.bench import metrics as m
from sabia.core.bench.answers import Answer, score_exact
from sabia.core.bench.items import Item
from sabia.core.bench.task import Task


def task(**changes: object) -> Task:
    return Task("t", "exact_match", "x", **changes)


def exact_match(of: Task, text: str, answer: str) -> m.Match:
    return m.exact_matches(of, [(text, answer)])[0]


def test_lengths_are_characters_for_acc_norm_and_bytes_for_acc_bytes() -> None:
    choices = ["ação", "casas"]  # 4 characters, 6 bytes; 5 characters, 5 bytes
    # by sum -8.0: ação; per character -2.00 against -2.02: ação; per byte -1.33 against -2.02: ação
    assert m.choice_scores([-8.0, -10.1], choices, 0) == {"acc": 1, "acc_norm": 1, "acc_bytes": 1}
    # sums: first; per character: -2.125 against -2.1; per byte: -1.417 against -2.1
    assert m.choice_scores([-8.5, -10.5], choices, 1) == {"acc": 0, "acc_norm": 1, "acc_bytes": 0}
    # composed and decomposed accents differ in characters, as Python counts
    pair = ["\u00e7", "c\u0327"]
    assert m.choice_scores([-2.0, -2.9], pair, 1) == {"acc": 0, "acc_norm": 1, "acc_bytes": 1}


def test_the_first_of_equals_wins() -> None:
    assert m.choice_scores([-1.0, -1.0], ["a", "b"], 0)["acc"] == 1
    assert m.choice_scores([-1.0, -1.0], ["a", "b"], 1)["acc"] == 0


def test_extraction_takes_group_one_first_or_last() -> None:
    pattern = r"#### (-?[\d.,]+)"
    text = "#### 3 then #### 1,234"
    assert m.extracted(task(extract=pattern), text) == "1,234"
    assert m.extracted(task(extract=pattern, extract_pick="first"), text) == "3"
    assert m.extracted(task(extract=pattern), "no mark") is None
    assert exact_match(task(extract=pattern), "no mark", "3") == m.Match(0.0, None)


@pytest.mark.parametrize(
    ("normalize", "text", "answer", "right"),
    [
        ((), "  São\nPaulo ", "São Paulo", 1),
        ((), "são paulo", "São Paulo", 0),
        (("case",), "são paulo", "São Paulo", 1),
        (("case", "accents"), "SAO PAULO", "São Paulo", 1),
        (("punctuation",), "São Paulo!", "São Paulo", 1),
        (("digit_groups",), "1,234", "1234", 1),
        (("digit_groups",), "1,23", "123", 0),
    ],
)
def test_normalisers(normalize: tuple[str, ...], text: str, answer: str, right: int) -> None:
    assert exact_match(task(normalize=normalize), text, answer).score == right


def test_number_verifier_reads_solutions() -> None:
    gsm = task(verifier="number")
    assert exact_match(gsm, "so it costs 18 dollars", "She has 16 - 3 ...\n#### 18").score == 1


def test_document_sums() -> None:
    sums = m.document_sums("não há", -6.0, 3)
    assert sums == {m.LOGLIKELIHOOD: -6.0, "bytes": 8, "words": 2, "tokens": 3}
    bits = m.METRICS["bits_per_byte"]
    assert bits.transform(6.0 / 8) == pytest.approx(6 / 8 / math.log(2))


def test_an_extraction_past_its_limit_has_no_score() -> None:
    evil = task(extract=r"(a+)+$")
    assert exact_match(evil, "a" * 60 + "!", "3") == m.Match(
        None, None, "extract: past the limit of time"
    )
    item = Item("1", "?", answer="3")
    (row,) = score_exact(evil, "model", [(item, Answer("1", 0, "a" * 60 + "!"))])
    assert (row.metric, row.value) == (m.NO_VERDICT, 1.0)


@pytest.mark.parametrize(
    ("text", "answer", "f1"),
    [
        ("the red fox", "red fox", 2 * (2 / 3) * 1 / (2 / 3 + 1)),
        ("a a b", "a b b", 2 / 3),
        ("Red, fox!", "red fox", 1.0),
        ("", "red", 0.0),
        ("blue", "red", 0.0),
        ("", "", 1.0),
    ],
)
def test_f1_of_words_by_hand(text: str, answer: str, f1: float) -> None:
    normal = task(normalize=["case", "punctuation"])
    assert m.word_f1(normal, text, answer) == pytest.approx(f1)


def test_f1_is_among_the_rows_where_the_task_wants_it() -> None:
    pairs = [(Item("i", "q", answer="red fox"), Answer("i", 0, "the red fox"))]
    values = {row.metric: row.value for row in score_exact(task(metric="f1"), "m", pairs)}
    assert values == {"exact_match": 0.0, "f1": pytest.approx(0.8)}
    assert [row.metric for row in score_exact(task(), "m", pairs)] == ["exact_match"]
