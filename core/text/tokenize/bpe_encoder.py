"""Documents to ids through the compiled kernel, straight from Arrow buffers.

Exact by construction where the kernel is sure, and by the library `tokenizers` itself for the rest:
a document with a code point that Python's unicodedata does not know, or one that NFC changes around
added tokens, is encoded by the library and put back in its place.
"""

from __future__ import annotations

import unicodedata

import numpy as np
import pyarrow as pa

from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.text.tokenize.bpe_tables import compile_tables
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.kernels.bpe.definitions import Cache
from sabia.kernels.bpe.interface import document_flags, padded
from sabia.kernels.bpe.interface import encode as encode_documents
from sabia.kernels.text.unicode_classes import NFC_MAYBE, UNKNOWN


class KernelEncoder:
    """One tokenizer as arrays, with a cache of its own: one of these a thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises bpe_tables.Unsupported where the kernel has no form for the tokenizer."""
        self.tokenizer = tokenizer
        self.compiled = compile_tables(tokenizer)
        self.cache: Cache = Cache()

    def encode(self, texts: pa.Array, end_id: int = -1) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32[Σ n], lengths int64[documents]) of a string array without nulls.

        `end_id` >= 0 ends every document and is counted. Raises pa.ArrowInvalid where a text is not
        UTF-8.
        """
        texts.validate(full=True)
        data, offsets = text_buffers(texts)
        data, offsets = padded(data[offsets[0] : offsets[-1]]), offsets - offsets[0]
        flags = document_flags(data, offsets, self.compiled.tables.classes)
        sure = (flags & UNKNOWN) == 0
        if self.compiled.nfc:
            sure &= (flags & NFC_MAYBE) == 0
        if sure.all():
            return encode_documents(data, offsets, self.compiled.tables, self.cache, end_id)
        skip, special = self._unsure(texts, ~sure)
        found = encode_documents(data, offsets, self.compiled.tables, self.cache, end_id, skip)
        return _spliced(*found, skip, special, end_id)

    def _unsure(self, texts: pa.Array, unsure: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """(bool[n]: documents among the unsure ones that the library has to encode, their ids)."""
        skip = unsure.copy()
        rows = np.flatnonzero(unsure)
        found = []
        for row in rows.tolist():
            text = texts[row].as_py()
            if self.compiled.nfc and _settled(text):
                skip[row] = False
            else:
                found.append(np.asarray(self.tokenizer.encode_ordinary(text), np.int32))
        return skip, found


def _settled(text: str) -> bool:
    """True where NFC leaves the text as it is and all of its code points are known."""
    if not unicodedata.is_normalized("NFC", text):
        return False
    return not any(unicodedata.category(c) == "Cn" for c in set(text))


def _spliced(
    ids: np.ndarray, lengths: np.ndarray, skip: np.ndarray, special: list[np.ndarray], end_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Puts the ids of the library where its documents stand."""
    end = np.array([end_id] if end_id >= 0 else [], np.int32)
    rows = np.flatnonzero(skip)
    pieces, at = [], 0
    ends = np.cumsum(lengths)
    for row, found in zip(rows.tolist(), special, strict=True):
        pieces += [ids[at : ends[row]], found, end]
        at = ends[row]
        lengths[row] = len(found) + len(end)
    return np.concatenate([*pieces, ids[at:]]), lengths
