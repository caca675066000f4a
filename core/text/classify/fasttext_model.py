"""fastText classifiers, with sabia's own file reader and scoring kernel.

Files are those of the fastText library, dense `.bin` or quantized `.ftz`. sabia.kernels.fasttext
documents the scores and how a document of many lines is read.
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

HELD_OUT = 10  # one document in HELD_OUT is held out


class Model(NamedTuple):
    """A classifier ready to score: its arrays, its labels, and the engine (numba or numpy)."""

    classifier: Classifier
    labels: tuple[str, ...]
    engine: str


def load(path: str) -> Model:
    """The model of a file, loaded once per process and version of the file.

    Raises UsageError where it cannot be opened, BadData where it is no classifier.
    """
    try:
        status = os.stat(path)
        return _load(path, (status.st_mtime_ns, status.st_size))
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
    elif (  # folding changes the order of summation; a tabulated sigmoid would amplify that
        classifier.head.loss in (SOFTMAX, HIERARCHICAL)
        and classifier.grams.maxn > 0
        and len(classifier.rows.dense) > 0
    ):
        from sabia.kernels.fasttext.numba_impl import fold_subwords

        fold_subwords(classifier)
    return Model(classifier, tuple(labels), engine)


def digest(path: str) -> str:
    """Hash of a model file, for fingerprints; UsageError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise UsageError(f"--model: {path}: {error.strerror}") from error


def score_array(model: Model, texts: pa.StringArray) -> np.ndarray:
    """float32[n, labels] of a string array without nulls, read in place; NaN for a text without
    known words."""
    data, offsets = text_buffers(texts)
    return score(data, offsets, model.classifier, model.engine)


def is_held_out(seed: int, name: str) -> bool:
    """Whether the document with the id `name` is held out of training."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT == 0
