"""The compiled words and figures equal the plain ones on texts made to be awkward."""

import random

import numpy as np
import pyarrow as pa
import pytest

from sabia.core.shards.arrow_arrays import text_buffers
from sabia.kernels.quality.definitions import FIGURES
from sabia.kernels.quality.interface import measure
from sabia.kernels.text.words import word_hash, words
from tests.support.fuzzed_texts import fuzz

_WORDS = """the mill Água x 42 END http://a.b/c { }; #tag ... … "Mr. X." don't cannot 5km 3.14 U.S.
well-known a--b foo@bar.com www.site.org/x?y (e.g. he's 50% $5 [12] [edit] lorem ipsum Javascript
terms of use. privacy policy! ): '' we're 漢字かな ไทย 👍🏽 ﬁ İ ß and/or a,b c:d +5 5+ 5-6 word.Next
…x -- — – ~ - •"""
SPACES = ("\x1c", "\x85", "\u2028", "\r\n", "\xa0", "\t", "\u200b", "e\u0301", "Σ\u0345")
ATOMS = [*_WORDS.split(), *SPACES]


def random_page(source: random.Random) -> str:
    lines = []
    for _ in range(source.randrange(12)):
        line = source.choice([" ", " ", ""]).join(source.choices(ATOMS, k=source.randrange(9)))
        ends = ["", ".", "...", "!", '."', " "]
        lines.append(source.choice(["", "", "- ", "• "]) + line + source.choice(ends))
    lines += source.choices(lines, k=source.randrange(4)) if lines else []
    return source.choice(["\n", "\n\n", "\r\n", "\n \n"]).join(lines)


def both(texts: list[str]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    data, offsets = text_buffers(pa.array(texts, pa.string()))
    stops = np.array([word_hash(word) for word in ("the", "and", "água")], np.uint64)
    lists = (stops, np.array([0, 2, 3]))
    which = np.arange(len(texts)) % 3 - 1
    return (
        measure(data, offsets, lists, which, "python"),
        measure(data, offsets, lists, which, "numba"),
    )


def test_both_engines_count_the_same() -> None:
    source = random.Random(11)
    texts = ["", " \n ", "\n", "a", "a b", "\n\nx\n\n", *(random_page(source) for _ in range(1500))]
    plain, fast = both(texts + fuzz(1500, seed=3))
    for name in FIGURES:
        np.testing.assert_array_equal(plain[name], fast[name], name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\"'em", "\" 'em"), ("!'s", "! 's"), ("(:D)", "( :D )"), ("''ll", "' 'll"),
        ("e.rg/o@b", "e.rg/o@b"), ("a://b@c.de:80/f", "a://b@c.de:80/f"),
        ("ab://b@c.de:80/f", "ab://b@c.de:80/f"), ("b@c.de:8/", "b@c.de:8/"),
    ],
)  # fmt: skip
def test_marks_and_addresses(text: str, expected: str) -> None:
    """Both engines find the same words: a listed one behind other marks, @ behind a path."""
    assert words(text) == expected.split()
    plain, fast = both([text] * 3)
    for name in FIGURES:
        np.testing.assert_array_equal(plain[name], fast[name], name)


BLOCK_ATOMS = (
    "", "...", "…", "[12]", "lo[1]rem ipsum", "LOREM Ipsum", "coo\u212aies: use coo\u212aies", "{",
    "terms of use", "Privacy Policy", "javascript", "http://a.b", "\n\n", "\r\n", "\u2028", "漢字",
    "don't.", "É", "\U00020000\U000e0001", "\x00", "#", "(x)..", "“Mr.” a.b,c ",
)  # fmt: skip


@pytest.mark.parametrize("atom", BLOCK_ATOMS)
def test_both_engines_agree_at_each_place_of_a_block(atom: str) -> None:
    """The compiled engine works on 64 characters or bytes at a time."""
    texts = ["ab " * (k // 3) + "é" * (k % 3) + atom + " is so here." for k in range(0, 150, 1)]
    texts += [atom * k for k in range(40)] + ["a b " + "x" * k + atom + "." for k in (999, 1001)]
    plain, fast = both(texts)
    for name in FIGURES:
        np.testing.assert_array_equal(plain[name], fast[name], name)


def test_figures_do_not_depend_on_the_company() -> None:
    source = random.Random(1)
    texts = [random_page(source) for _ in range(30)]
    together = both(texts)[1]
    data, offsets = text_buffers(pa.array(texts[7:9], pa.string()))
    stops = (np.array([word_hash("the"), word_hash("and")], np.uint64), np.array([0, 2]))
    alone = measure(data, offsets, stops, np.array([0, -1]))
    for name in set(FIGURES) - {"gopher_stop_words"}:
        assert alone[name] == pytest.approx(together[name][7:9], nan_ok=True), name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't go (e.g. to x.com/y.), it's 5%.", "Do n't go ( e.g. to x.com/y . ) , it 's 5 % ."),
        ("well-known and/or... wait—what?", "well - known and/or ... wait — what ?"),
        ('"Mr. X said." U.S. 3.14 a,b', '" Mr. X said . " U.S. 3.14 a , b'),
        ("cannot 10km foo@bar.com, $5+", "can not 10 km foo@bar.com , $ 5 +"),
        ("漢字 word.Next", "漢 字 word . Next"),
    ],
)
def test_words_of_sentences(text: str, expected: str) -> None:
    assert words(text) == expected.split()


def test_long_runs_take_linear_time() -> None:
    texts = ["." * 300_000, "-" * 300_000, "a." * 150_000, "[" * 300_000, "(" * 300_000]
    data, offsets = text_buffers(pa.array([*texts, "@" * 300_000, "1," * 150_000]))
    none = (np.empty(0, np.uint64), np.zeros(1, np.int64))
    got = measure(data, offsets, none, np.full(7, -1))
    assert got["links"].tolist() == [0.0] * 7
