"""Letters of a text against tables of n-grams: the arithmetic of language identification.

A word is a run of letters (with vowel signs) of a script with spaces, in lower case, between two
boundary marks. Its features are the n-grams of FIRST_GRAM letters and of one more over word and
marks, and the word as a whole; the key of a feature is the upper half of
mix(sum of (code + 1) * P**i), marks counting as 0, with WHOLE added for words. A table has the
sorted keys of the features it knows and, for each, one small integer for every language: about STEP
times the logarithm of how much more frequent the feature is there than in the mean of all. The
first MOST letters of words decide. `numpy` is the reference, `numba` the fast engine; both give the
same integers.
"""

import numpy as np

from sabia.kernels.language.definitions import Table
from sabia.kernels.runtime.dispatch import engine_module


def score(
    data: np.ndarray, offsets: np.ndarray, model: Table, engine: str = "numpy"
) -> tuple[np.ndarray, ...]:
    """Of n documents in UTF-8: sums int32[n, languages], features found int32[n], words listed as
    frequent int32[n, languages], words int32[n], letters by script int32[n, scripts]."""
    return engine_module("language", engine).score(data, offsets, model)
