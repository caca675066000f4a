"""Judges of pages, what links inherit, what is learnt from them."""

import pytest

from sabia.core.errors import BadData, UsageError
from sabia.core.options.crawl import CrawlOptions
from sabia.core.web.focus import (
    ExampleJudge,
    FastTextJudge,
    WordJudge,
    link_relevance,
    make_judge,
    words_of,
)

BEES = [
    "the bee visits flowers and stores honey in the hive",
    "a hive of bees guards its honey and wax through the winter",
    "flowers give nectar, and the bees of the hive make honey from it",
]


def test_words_fold_case_accents_and_numbers():
    assert words_of("Lição 12: ÁGUA e 3,5") == ["licao", "0", "agua", "e", "0", "0"]


def test_word_judge():
    judge = WordJudge("soma carry")
    assert judge("As Somas de hoje") == 0.5
    assert judge("somas and carrying") == 1.0
    assert judge("nothing") == 0.0
    assert judge.knows("somar")
    assert not judge.knows("oferta")
    with pytest.raises(UsageError):
        WordJudge("!?")


def test_example_judge_prefers_what_resembles_the_examples():
    judge = ExampleJudge(BEES)
    near, far = judge("bees carry nectar to the hive for honey"), judge("buy cheap watches now")
    assert near > 0.5 > far
    assert all(judge(text) == 1.0 for text in BEES)
    with pytest.raises(UsageError):
        ExampleJudge(["only one"])


def test_fasttext_judge(tmp_path):
    pytest.importorskip("fasttext")
    from sabia.core.text.classify.train_stage import Settings, fit
    from sabia.examples.little_web.labels import labelled_documents

    rows = list(labelled_documents(0))
    lines = [f"__label__{row['label']} {' '.join(row['text'].split())}" for row in rows]
    (tmp_path / "train.txt").write_text("\n".join(lines))
    path = str(tmp_path / "m.bin")
    fit(str(tmp_path / "train.txt"), Settings(epoch=10, bucket=1 << 14), path)
    judge = FastTextJudge(path, "keep")
    right = [(judge(row["text"]) >= 0.5) == (row["label"] == "keep") for row in rows]
    assert sum(right) > 0.9 * len(right)
    with pytest.raises(UsageError, match="expected"):
        FastTextJudge(path, "absent")
    (tmp_path / "bad.bin").write_bytes(b"not a model")
    with pytest.raises(BadData):
        FastTextJudge(str(tmp_path / "bad.bin"), "keep")


def test_make_judge(tmp_path):
    examples = tmp_path / "examples.txt"
    examples.write_text("\n".join(BEES))
    assert isinstance(make_judge(CrawlOptions(focus=str(examples))), ExampleJudge)
    assert isinstance(make_judge(CrawlOptions(focus="bee honey")), WordJudge)
    assert make_judge(CrawlOptions()) is None
    with pytest.raises(UsageError):
        make_judge(CrawlOptions(focus="a", classifier="b"))
    with pytest.raises(UsageError):
        make_judge(CrawlOptions(classifier="no/such/file"))


def test_worth_soft_and_hard():
    soft, hard = CrawlOptions(focus="bee"), CrawlOptions(focus="bee", hard=True)
    assert link_relevance(0.8, 0.1, soft) == link_relevance(0.8, 0.1, hard) == 0.8
    assert link_relevance(0.1, 1.0, hard) is None
    first = link_relevance(0.1, 1.0, soft)
    second = link_relevance(0.1, first, soft)
    assert 0 < second < first < 0.5
