"""fastText classifiers: opened by our own reader, scored by our own kernel.

Files are those that the library writes, dense `.bin` or quantized `.ftz`; what a score is, and
how a document of many lines is read, is told in sabia.kernels.fasttext.
"""

import functools
import hashlib
import os
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from sabia.core import notes
from sabia.core.errors import BadData, UsageError
from sabia.core.shards.arrow_arrays import text_buffers
from sabia.kernels.fasttext.definitions import HIERARCHICAL, SOFTMAX, Classifier
from sabia.kernels.fasttext.interface import score
from sabia.kernels.runtime.dispatch import numba_available

HELD_OUT = 10  # one document in so many


class Model(NamedTuple):
    """A classifier ready to score: its arrays, its labels, the engine that serves."""

    classifier: Classifier
    labels: tuple[str, ...]
    engine: str


def load(path: str) -> Model:
    """The model of a file; loaded once per process and version of the file.

    Raises UsageError where it cannot be opened, BadData where it is no classifier.
    """
    try:
        found = os.stat(path)
        return _load(path, (found.st_mtime_ns, found.st_size))
    except OSError as error:
        raise UsageError(f"--model: {path}: {error.strerror}") from error


@functools.lru_cache(maxsize=4)
def _load(path: str, _stamp: tuple[int, int]) -> Model:
    from sabia.kernels.fasttext.model_file import NotFastText, read_classifier

    try:
        classifier, labels, _ = read_classifier(path)
    except NotFastText as error:
        raise BadData(f"--model: {path} is not a fastText model: {error}") from error
    engine = "numba" if numba_available() else "numpy"
    if engine == "numpy":
        notes.warn("package 'numba' is missing: fastText scores are computed about 100x slower")
    elif _can_fold(classifier):
        from sabia.kernels.fasttext.numba_impl import fold_subwords

        fold_subwords(classifier)
    return Model(classifier, tuple(labels), engine)


def _can_fold(classifier: Classifier) -> bool:
    """Where another order of summation changes nothing but the last bits: not where a score is
    taken from steps of the sigmoid."""
    smooth = classifier.head.loss in (SOFTMAX, HIERARCHICAL)
    return smooth and classifier.grams.maxn > 0 and len(classifier.rows.dense) > 0


def digest(path: str) -> str:
    """Hash of a model file, for fingerprints; UsageError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise UsageError(f"--model: {path}: {error.strerror}") from error


def score_array(model: Model, texts: pa.StringArray) -> np.ndarray:
    """float32[n, labels] of a string array without nulls, read in place; NaN where none of a text
    is known."""
    data, offsets = text_buffers(texts)
    return score(data, offsets, model.classifier, model.engine)


def is_held_out(seed: int, name: str) -> bool:
    """Whether the document of that id is one of those that training does not see."""
    mark = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(mark, "big") % HELD_OUT == 0
