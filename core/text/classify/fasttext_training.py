"""Train fastText classifiers with the fastText library, without NaN and tracebacks.

With one thread the library initializes only one tenth of its input matrix (each thread draws one
tenth, see densematrix.cc); the rest is uninitialized memory. This is the cause of NaN on small
vocabularies and of runs that differ (12 runs with one seed gave 11 different models). During
training glibc therefore returns zeroed memory (mallopt M_PERTURB), so that training with one thread
is deterministic. A learning rate that is too high for the data can still end in NaN; then training
is repeated with the next of SAFER_SETTINGS. The number of buckets follows the size of the data
(about one per pair of words), so that a small data set gives a small file.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core import notes, stop
from sabia.core.errors import Failed, MissingBackend, UsageError
from sabia.core.options.classify_train import FastText
from sabia.core.shards.atomic import atomic_path

PREFIX = "__label__"
EXAMPLES_SEEN = 200_000  # documents times epochs; sets the epochs, within EPOCHS
EPOCHS = (5, 50)
BUCKETS = (1 << 12, 1 << 20)
MANY_LABELS = 1_000  # from here on hierarchical softmax, whose cost is logarithmic
MIN_COUNTS = ((10_000_000, 5), (1_000_000, 2), (0, 1))  # (words of the data, least count)
QUANTIZED_ROWS = 256  # the minimum of the library
SAFER_SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"lr": 0.1},
    {"lr": 0.02, "minn": 2, "maxn": 4},
    {"lr": 0.005, "minn": 2, "maxn": 4, "dim": 16, "thread": 1},
)
_M_PERTURB = -6


@dataclass(frozen=True)
class Settings:
    """The settings of the library, with its names."""

    epoch: int
    bucket: int
    minCount: int = 1
    lr: float = 0.5
    dim: int = 32
    wordNgrams: int = 2
    minn: int = 0
    maxn: int = 0
    loss: str = "softmax"
    seed: int = 0
    thread: int = 1


def settings_for(
    documents: int, words: int, labels: int, options: FastText, seed: int, threads: int
) -> Settings:
    """Settings for the size of the data: documents, words in all, and labels."""
    epochs = options.epochs or int(np.clip(EXAMPLES_SEEN // max(documents, 1), *EPOCHS))
    letters = options.letters()
    parts = max(options.ngrams - 1, 0) + 4 * (letters[1] > 0)
    bucket = 1 << int(np.clip(words * max(parts, 1), *BUCKETS) - 1).bit_length()
    min_count = next(least for size, least in MIN_COUNTS if words >= size)
    loss = "hs" if labels >= MANY_LABELS else "softmax"
    dim = options.dim or (32 if labels <= 64 else 64)
    return Settings(
        int(epochs), bucket, min_count, 0.5, dim, options.ngrams, *letters, loss, seed, threads
    )  # fmt: skip


@contextmanager
def zeroed_memory() -> Iterator[None]:
    """Let malloc return zeroed memory, with glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    before = int(os.environ.get("MALLOC_PERTURB_") or 0)
    if mallopt:
        mallopt(_M_PERTURB, 255)  # memory is filled with the complement: zeros
    try:
        yield
    finally:
        if mallopt:
            mallopt(_M_PERTURB, before)


def library() -> Any:
    """The package fasttext, without the warning that it prints on every load."""
    try:
        import fasttext
    except ModuleNotFoundError as error:
        raise MissingBackend("a package is missing; pip install fasttext-numpy2") from error
    fasttext.FastText.eprint = lambda *_args: None
    return fasttext


def fit(lines: str, settings: Settings, out: str, quantize: bool = False) -> Settings:
    """Train on a file of lines `__label__x text` and write the model to `out`.

    While the model is not finite, train again with safer settings. Returns the settings used.
    Raises Failed, UsageError (too few rows to quantize).
    """
    tried: list[Settings] = []
    for safer in SAFER_SETTINGS:
        changes = {  # never a higher rate, more dimensions or more threads than requested
            name: (min if name in ("lr", "dim", "thread") else max)(value, getattr(settings, name))
            for name, value in safer.items()
        }
        attempt = replace(settings, **changes)
        if attempt in tried:
            continue
        if tried:
            changed = asdict(attempt).items() - asdict(tried[-1]).items()
            words = ", ".join(f"{name} {value}" for name, value in sorted(changed))
            notes.warn(f"training ended in NaN; trying again with {words}")
        tried.append(attempt)
        model = fit_once(lines, attempt)
        if model is not None:
            stop.check()
            _save(model, lines, out, quantize)
            return attempt
    raise Failed("fastText training ended in NaN with every setting tried; give it more text")


def fit_once(lines: str, settings: Settings) -> Any:
    """The trained model, or None where it is not finite."""
    try:
        with zeroed_memory():
            model = library().train_supervised(input=lines, verbose=0, **asdict(settings))
    except RuntimeError as error:
        if "NaN" not in str(error):
            raise Failed(f"fastText: {error}") from error
        return None
    except ValueError as error:  # it raises this for a file without words
        raise Failed(f"fastText: {error}") from error
    # the sums are finite exactly where the input matrix is, and need no memory
    matrices = model.get_output_matrix(), model.get_input_matrix().sum(axis=0, dtype=np.float64)
    return model if all(np.isfinite(one).all() for one in matrices) else None


def _save(model: Any, lines: str, out: str, quantize: bool) -> None:
    if quantize:
        rows = model.get_input_matrix().shape[0]
        if rows < QUANTIZED_ROWS:
            raise UsageError(
                f"--quantize-model: the model has {rows} rows (expected {QUANTIZED_ROWS} or more)"
            )
        with zeroed_memory():
            model.quantize(input=lines, qnorm=True)
    with atomic_path(Path(out)) as temporary:
        model.save_model(str(temporary))
