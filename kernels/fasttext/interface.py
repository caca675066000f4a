"""Scores of fastText classifiers from Arrow buffers: definition and engines.

The model is fastText's own (Joulin et al. 2016, "Bag of Tricks for Efficient Text Classification";
Joulin et al. 2016, "FastText.zip" for the quantized form). A document is one line: its bytes up to
a closing newline, which reads as the token `</s>`. Tokens are separated by space, \\t, \\n, \\v,
\\f, \\r and NUL, and by no other Unicode space. fastText itself ends a line at \\n; a document has
many lines, so here \\n inside a text separates like a space, and only the token `</s>`, where a
text spells it out, ends the reading early, as it does there. Tokens that begin with `__label__`
are skipped. With FNV-1a hashes h of the remaining tokens (bytes are signed):

    rows of a token in the vocabulary: its own, then those of its character n-grams;
    of another token: those of its character n-grams (minn to maxn code points of `<token>`),
        at words + (h(n-gram) mod bucket);
    of a word n-gram i … j, 2 to wordNgrams long: words + (g mod bucket), where
        g = h_i, then g * 116049371 + h_(i+1) … in 64 bits, every h extended as signed;
    hidden = mean of all rows;  logits = output @ hidden.

A pruned model maps a bucket to a row, or to none. softmax: p = softmax(logits), score p + 1e-5;
one-vs-all and negative sampling: p from fastText's table of 512 steps of the sigmoid in (-8, 8),
score p + 1e-5; hierarchical softmax: a leaf's score is the product down the Huffman tree of
f + 1e-5 or 1 - f + 1e-5, and 0 below a product of 1e-5. (The library adds 1e-5 inside its
logarithms; scores here are its scores, at most 1.) A text without any row has no score: NaN.
"""

import numpy as np

from sabia.kernels.fasttext.definitions import Classifier
from sabia.kernels.runtime.dispatch import engine_module


def score(
    data: np.ndarray, offsets: np.ndarray, model: Classifier, engine: str = "numpy"
) -> np.ndarray:
    """Scores float32[n, labels] of documents whose bytes are data[offsets[i]:offsets[i + 1]].

    data[bytes] uint8, offsets[n + 1] int64. The numba engine holds no GIL while it works.
    """
    return engine_module("fasttext", engine).score(data, offsets, model)
