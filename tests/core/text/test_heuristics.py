"""Quality figures: each against a plain Python count, and the verdict on texts that are plainly
good or bad."""

import random
import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from sabia.core.text import characters, heuristics, language
from sabia.core.text.sketching import text_buffers

PROSE = (
    "The mill stood at the end of the valley, where the road turned away from the river. In the"
    " autumn its wheel was repaired by two brothers, who had learnt the trade from their father"
    " and who never agreed on anything except the price.\nWhen the work was done they sat on the"
    " wall, shared a loaf of bread, and talked about the winter that was coming."
)


def measure(texts: list[str]) -> dict[str, np.ndarray]:
    data, offsets = text_buffers(pa.array(texts, pa.string()))
    parts = []
    for low, high in characters.chunks(offsets):
        some = characters.texts_of(data, offsets, low, high)
        parts.append(heuristics.measure(some, language.identify(some)))
    return {name: np.concatenate([part[name] for part in parts]) for name in heuristics.NAMES}


def plain(text: str) -> dict[str, float]:
    """The same figures for Latin text without odd code points, written with str and re."""
    words = re.findall(r"\w+", text.lower())
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    letters = sum(map(len, words))
    nan = float("nan")

    def share(part: float, whole: float) -> float:
        return part / whole if whole else nan

    seen: set[str] = set()
    doubled = 0
    for line in lines:
        doubled += len(line) if line.lower() in seen else 0
        seen.add(line.lower())
    pairs = Counter(pairwise(words))
    top = max((n * (len(a) + len(b)) for (a, b), n in pairs.items() if n > 1), default=0)
    grams, inside = set(), set()
    for i in range(len(words) - 4):
        gram = tuple(words[i : i + 5])
        if gram in grams:
            inside |= set(range(i, i + 5))
        grams.add(gram)
    alphabetic = sum(c.isalpha() for c in text)
    return {
        "word_count": len(words),
        "mean_word_length": share(letters, len(words)),
        "alpha_words": share(sum(any(c.isalpha() for c in w) for w in words), len(words)),
        "bullet_lines": share(sum(line[0] in heuristics.BULLETS for line in lines), len(lines)),
        "ellipsis_lines": share(sum(line.endswith(("...", "…")) for line in lines), len(lines)),
        "punctuated_lines": share(sum(x[-1] in heuristics.TERMINALS for x in lines), len(lines)),
        "short_lines": share(sum(len(line) < 30 for line in lines), len(lines)),
        "duplicate_lines": share(doubled, sum(map(len, lines))),
        "symbol_ratio": share(len(re.findall(r"#|…|\.{3,}", text)), len(words)),
        "upper_ratio": share(sum(c.isupper() for c in text), alphabetic),
        "links": share(text.count("://"), len(words)),
        "top_bigram": share(min(top, letters), letters),
        "duplicate_ngrams": share(sum(len(words[i]) for i in inside), letters),
        "code_marks": share(
            sum(c in heuristics.CODE_MARKS for c in text), sum(not c.isspace() for c in text)
        ),
    }


def random_page(source: random.Random) -> str:
    atoms = ["the", "mill", "Água", "x", "42", "END", "http://a.b/c", "{", "};", "#tag", "...", "…"]
    lines = []
    for _ in range(source.randrange(12)):
        line = " ".join(source.choices(atoms, k=source.randrange(9)))
        lines.append(
            source.choice(["", "", "- ", "• "]) + line + source.choice(["", ".", "...", "!"])
        )
    lines += lines[: source.randrange(3)]
    return "\n".join(lines)


def test_every_figure_equals_a_plain_count() -> None:
    source = random.Random(11)
    texts = ["", " \n ", "one", PROSE, PROSE.upper(), *(random_page(source) for _ in range(150))]
    got = measure(texts)
    for i, text in enumerate(texts):
        for name, value in plain(text).items():
            assert got[name][i] == pytest.approx(value, nan_ok=True), (name, text)


def test_figures_do_not_depend_on_the_company() -> None:
    source = random.Random(1)
    texts = [PROSE, "漢字とかなの文です。", *(random_page(source) for _ in range(20))]
    together = measure(texts)
    for i, text in enumerate(texts):
        for name, values in measure([text]).items():
            assert values[0] == pytest.approx(together[name][i], nan_ok=True), (name, text)


BAD = {
    "keyword spam": "cheap pills online buy cheap pills now " * 30,
    "navigation": "Home\nAbout us\nContact\nLog in\nRegister\nPrivacy\nTerms\nSite map\nHelp\nShop",
    "links": "see http://a.example/b and http://c.example/d or " * 20,
    "shouting": PROSE.upper(),
    "a repeated block": (PROSE + "\n") * 6,
    "a table of numbers": "\n".join(f"{i} {i * 7} {i * i} {i + 3}" for i in range(60)),
    "too short": "Page not found.",
    "nothing": "",
}


def test_quality_is_one_for_prose_and_low_for_what_is_not() -> None:
    quality = measure([PROSE, *BAD.values()])["quality"]
    assert quality[0] == pytest.approx(1.0)
    for name, value in zip(BAD, quality[1:], strict=True):
        assert value < 0.5, name
    assert np.all((quality >= 0) & (quality <= 1))


def test_each_rule_is_linear_between_its_bounds() -> None:
    for rule in heuristics.RULES:
        middle = (rule.good + rule.bad) / 2
        values = np.array([rule.good, middle, rule.bad, np.nan])
        expected = [1, 1 - rule.weight / 2, 1 - rule.weight, 1]
        assert rule.factor(values) == pytest.approx(expected), rule.score


def test_scripts_without_spaces_are_counted_by_character() -> None:
    got = measure(["這是一個沒有空格的句子", "ไทย"])
    assert got["word_count"].tolist() == [11, 3]
    assert np.isnan(got["mean_word_length"]).all()


def test_huge_and_odd_texts() -> None:
    texts = ["x" * 3_000_000, "a " * 400_000, "\x00\x01", "👍🏽" * 50, "e\u0301" * 30]
    quality = measure(texts)["quality"]
    assert np.isfinite(quality).all() and quality[0] == 0
