"""Texts as token rows for a classifier: with special tokens, truncated or in windows.

A text that is too long is truncated as in transformers, or becomes several overlapping windows.
A special token that is written out in a text stays ordinary text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sabia.core.errors import UsageError
from sabia.core.text.tokenize.tokenizer import Tokenizer

OVERLAP = 8  # windows share an eighth of their tokens


@dataclass(frozen=True)
class TextReader:
    """length: most tokens of a row; long: `truncate` or `windows`."""

    tokenizer: Tokenizer
    length: int
    long: str = "truncate"

    def __post_init__(self) -> None:
        if self.length < 4:
            raise UsageError(f"--length: {self.length} tokens (expected 4 or more)")

    def __getstate__(self) -> dict[str, object]:
        # without the cached backend, which cannot be pickled
        return {"tokenizer": self.tokenizer, "length": self.length, "long": self.long}

    @cached_property
    def _backend(self) -> Any:
        import tokenizers

        backend = tokenizers.Tokenizer.from_str(self.tokenizer.definition)
        backend.no_padding()
        backend.encode_special_tokens = True  # the library's name for "as ordinary text"
        stride = self.length // OVERLAP if self.long == "windows" else 0
        backend.enable_truncation(self.length, stride=stride)
        return backend

    def read(self, texts: Sequence[str]) -> tuple[list[np.ndarray], np.ndarray]:
        """(token ids int32 of each row, the number of its text [rows]), without empty rows."""
        rows: list[np.ndarray] = []
        owner: list[int] = []
        for number, encoded in enumerate(self._backend.encode_batch(list(texts))):
            windows = encoded.overflowing if self.long == "windows" else ()
            for window in (encoded, *windows):
                if window.ids:
                    rows.append(np.array(window.ids, np.int32))
                    owner.append(number)
        return rows, np.array(owner, np.int64)


def means_by_text(
    vectors: np.ndarray, rows: Sequence[np.ndarray], owner: np.ndarray, texts: int
) -> np.ndarray:
    """The mean of the vectors[rows, D] of each text's rows, float32[texts, D]; NaN without rows.

    Σ over the rows of a text of tokens · vector, divided by Σ tokens.
    """
    sizes = np.array([len(row) for row in rows], np.float64)
    sums = np.zeros((texts, vectors.shape[1]))
    np.add.at(sums, owner, vectors * sizes[:, None])
    total = np.bincount(owner, sizes, minlength=texts)
    with np.errstate(invalid="ignore"):
        return (sums / total[:, None]).astype(np.float32)
