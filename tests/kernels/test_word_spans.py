"""Words with their bytes, n-grams looked up, alignment: both engines against plain Python."""

import random
from itertools import combinations, pairwise

import numpy as np
import pytest

from sabia.kernels.minhash.definitions import ENGINES
from sabia.kernels.word_spans.definitions import ALONE
from sabia.kernels.word_spans.interface import Lookup, align, ngram_hashes, word_spans

ALPHABET = "abc déÉ漢字 ,._-\n\u0301\u00ad\u200b\U00020001\U0001f600ไ"
ODD = [b"", b" ", b"\xff\xfeab \xc3", b"ab\xe2\x82", "e\u0301a\u00adb c".encode(), b"a" * 300]


def buffers(parts: list[bytes], lead: bytes = b"") -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([len(lead)] + [len(part) for part in parts]).astype(np.int64)
    return np.frombuffer(lead + b"".join(parts), np.uint8), offsets


def random_texts(count: int) -> list[bytes]:
    rng = random.Random(5)
    made = ["".join(rng.choices(ALPHABET, k=rng.randrange(60))) for _ in range(count)]
    return [text.encode() for text in made]


def test_engines_agree_on_words_and_ngrams() -> None:
    data, offsets = buffers([*ODD, *random_texts(200)], b"XY")
    results = [word_spans(data, offsets, engine) for engine in ENGINES]
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype and (one == other).all()
    for ngram in (1, 2, 5, 13):
        fast, plain = (ngram_hashes(results[0], ngram, engine) for engine in ENGINES)
        assert (fast == plain).all()
        wanted = np.unique(plain[plain != 0])[::2]
        places = [Lookup(wanted, engine).find(plain) for engine in ENGINES]
        assert (places[0] == places[1]).all()
        hit = places[0] != ALONE
        assert (wanted[places[0][hit]] == plain[hit]).all()
        assert (np.isin(plain, wanted) == hit).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_spans_are_the_bytes_of_the_words(engine: str) -> None:
    texts = ["Olá, mundo!", "uma_coisa  é 12", "漢字 kana"]
    data, offsets = buffers([text.encode() for text in texts], b"??")
    words = word_spans(data, offsets, engine)
    spelled = [bytes(data[a:b]).decode() for a, b in zip(words.begin, words.end, strict=True)]
    assert spelled == ["Olá", "mundo", "uma_coisa", "é", "12", "漢", "字", "kana"]
    assert [b - a for a, b in pairwise(words.starts)] == [2, 3, 3]
    folded = word_spans(*buffers([b"OLA mundo"]), engine)
    assert (folded.hash == words.hash[:2]).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_ngrams_end_with_their_document(engine: str) -> None:
    words = word_spans(*buffers([b"a b c", b"a b", b"b c"]), engine)
    two = ngram_hashes(words, 2, engine)
    assert (two == 0).tolist() == [False, False, True, False, True, False, True]
    assert two[0] == two[3] and two[1] == two[5] and two[0] != two[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_wanted_and_nothing_given(engine: str) -> None:
    none = np.empty(0, np.uint64)
    assert (Lookup(none, engine).find(np.arange(4, dtype=np.uint64)) == ALONE).all()
    assert len(Lookup(np.array([3], np.uint64), engine).find(none)) == 0
    assert len(align(none, np.empty(0), none, engine)) == 0


def heaviest(part: list[int], weight: list[float], window: list[int]) -> float:
    """The greatest weight of a common subsequence, by trying all."""
    best = 0.0
    for size in range(len(part) + 1):
        for chosen in combinations(range(len(part)), size):
            rest = iter(window)
            if all(any(part[i] == word for word in rest) for i in chosen):
                best = max(best, sum(weight[i] for i in chosen))
    return best


@pytest.mark.parametrize("engine", ENGINES)
def test_alignment_is_the_heaviest(engine: str) -> None:
    rng = random.Random(2)
    for _ in range(40):
        part = [rng.randrange(5) for _ in range(rng.randrange(8))]
        window = [rng.randrange(5) for _ in range(rng.randrange(10))]
        weight = [rng.random() for _ in part]
        arrays = np.array(part, np.uint64), np.array(weight), np.array(window, np.uint64)
        matches = align(*arrays, engine)
        taken = np.flatnonzero(matches != ALONE)
        assert (arrays[0][taken] == arrays[2][matches[taken]]).all()
        assert (np.diff(matches[taken]) > 0).all()
        assert arrays[1][taken].sum() == pytest.approx(heaviest(part, weight, window))
