"""The compiled language scores equal the plain ones, whatever the text."""

import random

import numpy as np
import pyarrow as pa

from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.text.classify.language import load
from sabia.kernels.language.definitions import LONGEST, MOST
from sabia.kernels.language.interface import score
from tests.support.fuzzed_texts import fuzz

TEXT = """Água é boa quer the of and кот и не это في من 漢字 かな ไทย नमस्ते है ΑΒΓ Straße İstanbul"""
WORDS = TEXT.split()


def test_both_engines_give_the_same_integers() -> None:
    draw = random.Random(2)
    texts = ["", " ", *fuzz(2500, seed=4)]
    texts += [" ".join(draw.choices(WORDS, k=draw.randrange(300))) for _ in range(400)]
    texts += ["x" * k + " кот" * k for k in range(0, 8 * MOST, 331)]
    texts += ["é" * k + " a" * LONGEST for k in range(4 * MOST - 40, 4 * MOST + 40)]
    texts += ["ab " * MOST + "é" * k for k in range(5 * MOST - 9, 5 * MOST + 9)]
    data, offsets = text_buffers(pa.array(texts, pa.string()))
    model = load()[1]
    for low in (0, 7):
        both = [score(data, offsets[low:], model, engine) for engine in ("numpy", "numba")]
        for plain, fast in zip(*both, strict=True):
            assert plain.dtype == fast.dtype
            np.testing.assert_array_equal(plain, fast)
