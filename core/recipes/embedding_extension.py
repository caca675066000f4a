"""The model that a training starts from, with embedding rows for new tokens of its tokenizer.

Where the run's tokenizer extends the model's own (`tokenize --extend`), embedding and head get a
row for each new token, the mean of its pieces' rows, and the configuration the larger vocabulary.
The existing rows stay bit-identical, and so do the logits of the old tokens. Rows are added when a
trainer reads them, one tensor at a time; the other tensors stay mapped from the files.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core import notes
from sabia.core.errors import UsageError
from sabia.core.model.lora import LoraConfig
from sabia.core.model.storage import hub
from sabia.core.model.storage.lazy_array import LazyArray
from sabia.core.recipes.model_source import Params, load_arrays, own_tokenizer
from sabia.core.spec import ModelSpec, load_spec
from sabia.core.spec.extend import extend_vocabulary
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.text.tokenize.vocabulary_extension import (
    Extension,
    extension_of,
    grown_rows,
    load_extension,
)


def model_for(
    tokenizer: str, directory: str, lora: LoraConfig | None
) -> tuple[ModelSpec, Callable[[], Params]]:
    """(spec, a function that gives its parameters) of a model directory, for a tokenizer ('': any).

    lora: the adapters, if only these are trained. Raises UsageError where the tokenizer has more
    tokens than the model and does not extend its own, or where new rows could not be trained or
    exported.
    """
    spec = load_spec(directory)
    extension = _extension(spec, tokenizer, directory)
    if extension is None:
        return spec, partial(load_arrays, directory, lora)
    new = f"the {len(extension.pieces):,} tokens of {tokenizer} that {directory} lacks"
    if lora:
        raise UsageError(
            f"--lora-rank: adapters would not learn {new} (expected a model with them: train it "
            "without adapters first)"
        )
    if kept := _kept_rows(spec, directory):
        raise UsageError(
            f"--model: {kept} is copied unchanged, without {new} (give the model's own tokenizer)"
        )
    notes.note(f"{new} are initialised with the means of their pieces")
    extended = extend_vocabulary(spec, extension.rows(spec.vocab_size))
    return extended, partial(_load_extended, spec, directory, extension)


def _extension(spec: ModelSpec, tokenizer: str, directory: str) -> Extension | None:
    """How the tokenizer extends the model's own; None where the model needs no new rows."""
    if not tokenizer or Path(tokenizer) == Path(directory):
        return None
    new, rows = load_tokenizer(tokenizer), spec.vocab_size
    if own_tokenizer(directory):
        own = load_tokenizer(directory)
        extension, rows = extension_of(new, tokenizer, own), max(rows, own.vocab_size)
    else:
        extension = load_extension(tokenizer) if new.vocab_size > rows else None
    if extension is None and new.vocab_size > rows:
        raise UsageError(
            f"--tokenizer: {tokenizer} has {new.vocab_size:,} tokens, {directory} {rows:,} "
            f"(expected its own, or one of sabia tokenize --extend {directory})"
        )
    return extension


def _kept_rows(spec: ModelSpec, directory: str) -> str:
    """A tensor with one row per token among those that are copied unchanged; '' if none."""
    tensors = hub.read_checkpoint(directory) if spec.kept else {}
    names = (n for n in tensors if any(re.fullmatch(pattern, n) for pattern in spec.kept))
    return next((n for n in names if tensors[n].shape[:1] == (spec.vocab_size,)), "")


def _load_extended(spec: ModelSpec, directory: str, extension: Extension) -> Params:
    """The parameters of `spec`; those with one row per token are extended when they are used."""
    params: dict[str, Any] = dict(load_arrays(directory))
    for tensor in spec.tensors():
        if tensor.axes[0] == "vocab":
            params[tensor.name] = _extended(params[tensor.name], extension)
    return params


def _extended(array: np.ndarray, extension: Extension) -> LazyArray:
    shape = (extension.rows(len(array)), *array.shape[1:])
    return LazyArray(shape, array.dtype, lambda i, j: grown_rows(array, extension)[i:j])
