"""Train fastText classifiers through its library, so that no input ends in NaN or a traceback.

The library leaves nine tenths of its input matrix as malloc gave it when it trains with one thread
(each thread draws one tenth of the random start; read from densematrix.cc, and seen: 12 runs with
one seed gave 11 different models). Garbage there is what ends as NaN on small vocabularies, and
what makes runs differ. With glibc memory is therefore handed out as zeros while it trains
(mallopt M_PERTURB), which makes one thread exact: same data, same seed, same model. A rate too
high for the data can still end in NaN; then it trains again with the next of SAFER.
Sizes follow the data: a bucket for about each pair of words, so that a toy is a small file.
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
EXAMPLES_SEEN = 200_000  # epochs are chosen to show about so many, within EPOCHS
EPOCHS = (5, 50)
BUCKETS = (1 << 12, 1 << 20)
MANY_LABELS = 1_000  # from here on a tree of labels, whose cost is their logarithm
RARE = ((10_000_000, 5), (1_000_000, 2), (0, 1))  # from so many words on, drop rarer ones
QUANTIZED_ROWS = 256  # the library's least
SAFER: tuple[dict[str, Any], ...] = (
    {},
    {"lr": 0.1},
    {"lr": 0.02, "minn": 2, "maxn": 4},
    {"lr": 0.005, "minn": 2, "maxn": 4, "dim": 16, "thread": 1},
)
_M_PERTURB = -6


@dataclass(frozen=True)
class Settings:
    """The library's own settings, by its names."""

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
    """Settings that fit the size of the data: so many documents, words in all, and labels."""
    epochs = options.epochs or int(np.clip(EXAMPLES_SEEN // max(documents, 1), *EPOCHS))
    letters = options.letters()
    parts = max(options.ngrams - 1, 0) + 4 * (letters[1] > 0)
    bucket = 1 << int(np.clip(words * max(parts, 1), *BUCKETS) - 1).bit_length()
    rare = next(least for size, least in RARE if words >= size)
    loss = "hs" if labels >= MANY_LABELS else "softmax"
    dim = options.dim or (32 if labels <= 64 else 64)
    return Settings(
        int(epochs), bucket, rare, 0.5, dim, options.ngrams, *letters, loss, seed, threads
    )  # fmt: skip


@contextmanager
def zeroed_memory() -> Iterator[None]:
    """Let malloc hand out zeros, where the C library can be told to (glibc)."""
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
    """The package fasttext, without its warning on every load."""
    try:
        import fasttext
    except ModuleNotFoundError as error:
        raise MissingBackend("package 'fasttext-numpy2' is missing; pip install it") from error
    fasttext.FastText.eprint = lambda *_args: None
    return fasttext


def fit(lines: str, settings: Settings, out: str, quantize: bool = False) -> Settings:
    """Train on a file of lines `__label__x text` and write the model to `out`.

    Goes on to safer settings while the result is not finite, and returns those that served.
    Raises Failed, UsageError (nothing to quantize).
    """
    tried: list[Settings] = []
    for safer in SAFER:
        given = replace(settings, **_only_lower(settings, safer))
        if given in tried:
            continue
        if tried:
            changed = asdict(given).items() - asdict(tried[-1]).items()
            words = ", ".join(f"{name} {value}" for name, value in sorted(changed))
            notes.warn(f"training ended in NaN; again with {words}")
        tried.append(given)
        model = fit_once(lines, given)
        if model is not None:
            stop.check()
            _save(model, lines, out, quantize)
            return given
    raise Failed("fastText training ended in NaN with every setting tried; give it more text")


def _only_lower(settings: Settings, safer: dict[str, Any]) -> dict[str, Any]:
    """The changes that make it safer; never a higher rate or more dimensions than asked for."""
    lower = {"lr", "dim", "thread"}
    return {
        name: min(value, getattr(settings, name)) if name in lower
        else max(value, getattr(settings, name))
        for name, value in safer.items()
    }  # fmt: skip


def fit_once(lines: str, settings: Settings) -> Any:
    """The trained model, or None where it is not finite."""
    try:
        with zeroed_memory():
            model = library().train_supervised(input=lines, verbose=0, **asdict(settings))
    except RuntimeError as error:
        if "NaN" not in str(error):
            raise Failed(f"fastText: {error}") from error
        return None
    except ValueError as error:  # its own complaints of a file without words
        raise Failed(f"fastText: {error}") from error
    # sums are finite where the input matrix is, and take no room
    figures = model.get_output_matrix(), model.get_input_matrix().sum(axis=0, dtype=np.float64)
    return model if all(np.isfinite(one).all() for one in figures) else None


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
