"""fastText classifiers: train on a label column with held-out figures, predict as scores.

One thread trains unless told otherwise, so the same data gives the same model. A tenth of the
documents, chosen by a hash of their id, is held out. On tiny vocabularies training can end in
NaN (known of the library); then it starts again with safer settings, and says so.
Joulin et al. 2016.
"""

import functools
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sabia.core import notes, stop
from sabia.core.errors import BadData, Failed, MissingBackend, UsageError
from sabia.core.shards.atomic import atomic_path
from sabia.core.shards.sources import Source
from sabia.core.text import held_out
from sabia.core.text.held_out import LabelFigures

PREFIX = "__label__"
HELD_OUT = 10  # one document in so many
EXAMPLES_SEEN = 200_000  # epochs are chosen to show about so many, within EPOCHS
EPOCHS = (5, 50)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"lr": 0.5, "dim": 32, "wordNgrams": 2, "bucket": 1 << 18},
    {"lr": 0.2, "dim": 32, "wordNgrams": 1, "minn": 2, "maxn": 4, "bucket": 1 << 18},
    {"lr": 0.05, "dim": 16, "wordNgrams": 1, "minn": 2, "maxn": 4, "bucket": 1 << 16},
)


def _library() -> Any:
    try:
        import fasttext
    except ModuleNotFoundError as error:
        raise MissingBackend("package 'fasttext-numpy2' is missing; pip install it") from error
    fasttext.FastText.eprint = lambda *_args: None  # a warning on every load
    return fasttext


@functools.lru_cache(maxsize=4)
def _load(path: str, _stamp: tuple[int, int]) -> Any:
    try:
        return _library().load_model(path)
    except ValueError as error:
        raise BadData(f"--model: {path} is not a fastText model ({error})") from error


def load(path: str) -> Any:
    """The model of a .bin file; loaded once per process and version of the file."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise UsageError(f"--model: {path}: {error.strerror}") from error
    return _load(path, (found.st_mtime_ns, found.st_size))


def digest(path: str) -> str:
    """Hash of a model file, for fingerprints; UsageError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise UsageError(f"--model: {path}: {error.strerror}") from error


def one_line(text: str) -> str:
    """A text as fastText wants it: no line breaks (NUL ends a C string)."""
    return text.replace("\n", " ").replace("\r", " ").replace("\0", " ")


def label_names(model: Any) -> tuple[str, ...]:
    """The labels of a model without fastText's mark."""
    return tuple(label.removeprefix(PREFIX) for label in model.labels)


def predict(model: Any, texts: Sequence[str]) -> dict[str, np.ndarray]:
    """Probability float32[n] of every label."""
    names, chances = model.predict([one_line(text) for text in texts], k=-1)
    labels = label_names(model)
    place = {label: i for i, label in enumerate(model.labels)}
    result = np.zeros((len(labels), len(texts)), np.float32)
    for row, (found, values) in enumerate(zip(names, chances, strict=True)):
        for label, value in zip(found, values, strict=True):
            result[place[label], row] = min(float(value), 1.0)
    return dict(zip(labels, result, strict=True))


def is_held_out(seed: int, name: str) -> bool:
    """Whether the document of that id is one of those that training does not see."""
    mark = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(mark, "big") % HELD_OUT == 0


def labelled(sources: Iterable[Source], column: str, seed: int) -> Iterator[tuple[str, str, bool]]:
    """(label, text, is held out) of every document that has a label."""
    for source in sources:
        for batch in source.batches():
            stop.check()
            if column not in batch.schema.names:
                known = ", ".join(batch.schema.names)
                reason = f"no column {column!r} in {source.name} (there are {known})"
                raise UsageError(f"--label: {reason}")
            labels = batch.column(column).cast(pa.string()).to_pylist()
            rows = zip(labels, batch["text"].to_pylist(), batch["id"].to_pylist(), strict=True)
            for label, text, name in rows:
                if label is not None and label.strip():
                    yield label, text, is_held_out(seed, name)


def train(
    sources: Sequence[Source], column: str, out: str, seed: int, threads: int
) -> list[LabelFigures]:
    """Train on all documents with a label but those held out; write the model to `out`."""
    held: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        lines = f"{scratch}/train.txt"
        labels, count = _write_lines(lines, labelled(sources, column, seed), held)
        if len(labels) < 2:
            raise BadData(f"--label {column}: {len(labels)} different labels (expected 2 or more)")
        epochs = int(np.clip(EXAMPLES_SEEN // count, *EPOCHS))
        model = fit(lines, epochs, seed, threads, [text for _, text in held[:100]])
        stop.check()
        with atomic_path(Path(out)) as temporary:
            model.save_model(str(temporary))
    notes.note(f"{count:,} documents, {len(labels)} labels, {epochs} epochs → {out}")
    return evaluate(model, held)


def _write_lines(
    path: str, rows: Iterable[tuple[str, str, bool]], held: list[tuple[str, str]]
) -> tuple[set[str], int]:
    labels, count = set(), 0
    with open(path, "w", encoding="utf-8") as file:
        for label, text, is_held in rows:
            name = "_".join(label.split())
            if is_held:
                held.append((name, text))
                continue
            file.write(f"{PREFIX}{name} {one_line(text)}\n")
            labels.add(name)
            count += 1
    return labels, count


def fit(path: str, epochs: int, seed: int, threads: int, probe: Sequence[str]) -> Any:
    """Train on a file of lines; goes to safer settings while the result is not finite."""
    for attempt, settings in enumerate(SETTINGS):
        try:
            model = _library().train_supervised(
                input=path, epoch=epochs, seed=seed, thread=threads, verbose=0, **settings
            )
        except RuntimeError as error:
            if "NaN" not in str(error):
                raise Failed(f"fastText: {error}") from error
        else:
            if all(np.isfinite(v).all() for v in predict(model, ["", *probe]).values()):
                return model
        if attempt + 1 < len(SETTINGS):
            safer = ", ".join(f"{k} {v}" for k, v in SETTINGS[attempt + 1].items())
            notes.warn(f"training ended in NaN (few distinct words); again with {safer}")
    raise Failed("fastText training ended in NaN with every setting; give it more text")


def evaluate(model: Any, held: Sequence[tuple[str, str]]) -> list[LabelFigures]:
    """Figures of the most probable label, by label."""
    if not held:
        return []
    chances = predict(model, [text for _, text in held])
    scores = np.stack(list(chances.values()), -1)
    return held_out.one_of(tuple(chances), [label for label, _ in held], scores)[1]
