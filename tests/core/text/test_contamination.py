"""Benchmark items planted in documents: what is found at five levels of paraphrase, what is not
found in clean text, what becomes of a document."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from sabia.core.errors import BadData
from sabia.core.text.contamination.benchmark_index import (
    ANSWER,
    OPTION,
    PIECE,
    QUESTION,
    SEED,
    BenchmarkItem,
    Index,
    WordWeights,
    words_of,
)
from sabia.core.text.contamination.matching import ITEM, RUN, Finder, Finding
from sabia.core.text.contamination.stage import cut_spans

RNG = random.Random(11)
SYLLABLES = [c + v for c in "bdfglmnprstv" for v in "aeiou"]
COMMON = ["the", "of", "and", "to", "in", "is", "that", "for", "was", "on"]
WORDS = sorted({"".join(RNG.choices(SYLLABLES, k=3)) for _ in range(3000)})


def prose(rng: random.Random, count: int) -> str:
    """Words with a few very common ones among them, in sentences."""
    words = [rng.choice(COMMON if rng.random() < 0.4 else WORDS) for _ in range(count)]
    for at in range(11, count, 12):
        words[at] += "."
    return " ".join(words)


def exams(count: int, options: bool = True) -> list[BenchmarkItem]:
    rng = random.Random(3)
    made = []
    for number in range(count):
        given = tuple(prose(rng, 8) for _ in range(4)) if options else ()
        question = f"Read the text and mark the one that is true: {prose(rng, 45)}"
        made.append(
            BenchmarkItem("quiz", str(number), question, given, given[1] if given else "42")
        )
    return made


EXAMS = exams(80)


def edited(rng: random.Random, text: str, share: float) -> str:
    """A share of the words replaced, left out, or with another beside them."""
    words: list[str] = []
    for word in text.split():
        kind = rng.random() / share
        if kind < 0.3:
            continue
        words += [rng.choice(WORDS)] if kind < 0.7 else [word, rng.choice(WORDS)]
        words = words if kind < 1 else [*words[:-2], word]
    return " ".join(words)


def moved(rng: random.Random, text: str) -> str:
    sentences = text.split(". ")
    return ". ".join(sentences[len(sentences) // 2 :] + sentences[: len(sentences) // 2])


LEVELS = {
    "as it is": (lambda rng, text: text, 1.0),
    "marks and case": (lambda rng, text: re.sub(r"[.:]", "", text).upper(), 1.0),
    "a tenth edited": (lambda rng, text: edited(rng, text, 0.1), 1.0),
    "a fifth edited, halves moved": (
        lambda rng, text: moved(rng, edited(rng, text, 0.2)), 0.85),
    "a third edited": (lambda rng, text: edited(rng, text, 0.33), 0.7),
}  # fmt: skip


def search(finder: Finder, texts: list[str]) -> dict[int, list[Finding]]:
    data = [text.encode() for text in texts]
    offsets = np.cumsum([0] + [len(one) for one in data]).astype(np.int64)
    return finder.find(np.frombuffer(b"".join(data), np.uint8), offsets)


@pytest.fixture(scope="module")
def finder() -> Finder:
    return Finder(Index.build(EXAMS))


@pytest.mark.parametrize("level", LEVELS)
def test_planted_items_are_found(level: str, finder: Finder) -> None:
    change, least = LEVELS[level]
    rng = random.Random(7)
    texts = []
    for exam in EXAMS:
        planted = change(rng, " ".join((exam.question, *exam.options)))
        texts.append(f"{prose(rng, 150)}\n{planted}\n{prose(rng, 150)}")
    findings = search(finder, texts)
    right = [
        any(f.item == exam.item and f.level == ITEM for f in findings.get(row, ()))
        for row, exam in enumerate(EXAMS)
    ]
    assert np.mean(right) >= least
    wrong = [f for row, fs in findings.items() for f in fs if f.item != EXAMS[row].item]
    assert not wrong


def test_clean_text_is_clean(finder: Finder) -> None:
    rng = random.Random(99)
    template = "Read the text and mark the one that is true: "
    texts = [template + prose(rng, 300) for _ in range(400)]
    assert search(finder, texts) == {}


def test_spans_are_where_the_item_stands(finder: Finder) -> None:
    rng = random.Random(1)
    before, item = prose(rng, 60), EXAMS[5]
    text = f"é {before} {item.question} {prose(rng, 60)}"
    (finding,) = [f for f in search(finder, [prose(rng, 9), text])[1] if f.part == QUESTION]
    span = text.encode()[finding.begin : finding.end].decode()
    assert span in item.question and len(span) > 0.8 * len(item.question)
    assert finding.overlap > 0.98 and finding.run >= 40 and finding.beside < 0.3


def test_a_long_run_alone_is_a_run(finder: Finder) -> None:
    rng = random.Random(4)
    piece = " ".join(EXAMS[9].question.split()[20:36])
    text = f"{prose(rng, 50)} {piece} {prose(rng, 50)}"
    (finding,) = search(finder, [text])[0]
    assert finding.level == RUN and finding.run == 16 and finding.overlap < 0.5
    assert search(Finder(finder.index, run=0), [text]) == {}
    short = " ".join(EXAMS[9].question.split()[20:28])
    assert search(finder, [f"{prose(rng, 50)} {short} {prose(rng, 50)}"]) == {}


def test_engines_agree() -> None:
    index = Index.build(EXAMS[:12], "numpy")
    texts = [EXAMS[3].question + " " + prose(random.Random(0), 30), "x", ""]
    assert search(Finder(index, engine="numpy"), texts) == search(Finder(index), texts) != {}


def test_options_and_answer_count_for_short_questions() -> None:
    given = []
    for i in range(40):
        option = prose(random.Random(i + 500), 9)
        given.append(BenchmarkItem("t", str(i), prose(random.Random(i), 6), (option, option)))
    finder = Finder(Index.build(given))
    whole = f"{given[7].question} {given[7].options[0]} {given[7].options[1]}"
    assert [f.item for f in search(finder, [whole])[0]] == ["7"]


def test_parts_are_apart_and_long_ones_in_pieces() -> None:
    exam = BenchmarkItem("t", "a", prose(random.Random(0), 1000), ("yes it is so", "no"), "no")
    index = Index.build([exam])
    kinds = [part.kind for part in index.parts]
    assert kinds == [QUESTION] * 3 + [OPTION] * 2 + [ANSWER]
    assert max(len(part.words) for part in index.parts) <= PIECE
    assert sum(len(p.words) for p in index.parts if p.kind == QUESTION) == 1000
    assert Index.build([BenchmarkItem("t", "b", "2 + 2?", (), "4")]).too_short == [("t", "b")]


def test_templates_weigh_nothing(finder: Finder) -> None:
    weights = WordWeights(finder.index)
    template, own = words_of(["Read the text and mark the one that is true", EXAMS[0].question])
    only = len(template) - SEED + 1  # the words behind also stand in 5-grams of the item's own
    assert (weights.weight[0][:only] == 0).all()
    assert weights.weight[0][only : len(template)].max() < 0.7  # each of them is in every item
    assert weights.weight[0][len(template) :].min() > 0 and len(own) == len(weights.weight[0])
    assert len(weights.seeds) <= sum(len(p.words) for p in finder.index.parts) and SEED == 5


def test_an_index_file_is_the_index(tmp_path: Path, finder: Finder) -> None:
    path = str(tmp_path / "bench.parquet")
    finder.index.save(path)
    loaded = Index.load(path)
    assert loaded.digest == finder.index.digest and loaded.tasks == finder.index.tasks
    text = [EXAMS[2].question]
    assert search(Finder(loaded), text) == search(finder, text)
    assert "Read" not in Path(path).read_bytes().decode("latin-1")  # hashes, no text


def test_damaged_and_differing_indices_are_refused(tmp_path: Path, finder: Finder) -> None:
    path = str(tmp_path / "bench.parquet")
    with pytest.raises(BadData, match="not an index"):
        Path(path).write_bytes(b"PAR1 no")
        Index.load(path)
    finder.index.save(path)
    table = pq.read_table(path)
    pq.write_table(table.slice(3), path)
    with pytest.raises(BadData, match="do not match their digest"):
        Index.load(path)
    other = Index.build(EXAMS[:5])
    with pytest.raises(BadData, match="quiz"):
        finder.index.merged(other)
    both = finder.index.merged(Index.build([BenchmarkItem("more", "1", prose(RNG, 30))]))
    assert set(both.tasks) == {"quiz", "more"} and both.digest != finder.index.digest
    with pytest.raises(BadData, match="no benchmark item"):
        Index.build([])


def test_cutting_keeps_the_rest() -> None:
    text = "Antes. Qual é? Depois, é."
    begin = text.encode().index(b"Qual")
    end = text.encode().index(b"?")

    def span(a: int, b: int) -> Finding:
        return Finding("t", "i", QUESTION, ITEM, 1.0, 0, 0.0, a, b)

    assert cut_spans(text, [span(begin, end)]) == "Antes.\nDepois, é."
    assert cut_spans(text, [span(0, end), span(begin, end)]) == "Depois, é."
    assert cut_spans(text, [span(0, len(text.encode()))]) == ""
    assert json.dumps(span(1, 2).as_dict())
