"""Encode documents with the compiled kernel, directly from Arrow buffers.

The library `tokenizers` encodes the documents for which the kernel could differ from it: those with
a code point that Python's unicodedata does not know, and those that NFC changes.
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
    """One tokenizer as arrays, with its own cache; each thread needs its own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises bpe_tables.Unsupported where the kernel does not support the tokenizer."""
        self.tokenizer = tokenizer
        self.compiled = compile_tables(tokenizer)
        self.cache: Cache = Cache()

    def encode(self, texts: pa.Array, end_id: int = -1) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32[Σ n], lengths int64[documents]) of a string array without nulls.

        `end_id` >= 0 is appended to every document and counted. Raises pa.ArrowInvalid where a
        text is not UTF-8.
        """
        texts.validate(full=True)
        data, offsets = padded(*text_buffers(texts))
        if not self.compiled.classes and not self.compiled.nfc:
            return encode_documents(data, offsets, self.compiled.tables, self.cache, end_id)
        flags = document_flags(data, offsets, self.compiled.tables.classes)
        sure = (flags & UNKNOWN) == 0
        if self.compiled.nfc:
            sure &= (flags & NFC_MAYBE) == 0
        if sure.all():
            return encode_documents(data, offsets, self.compiled.tables, self.cache, end_id)
        skip = ~sure
        if self.compiled.nfc:
            for row in np.flatnonzero(~sure).tolist():
                skip[row] = not _is_known_nfc(texts[row].as_py())
        ids, lengths = encode_documents(
            data, offsets, self.compiled.tables, self.cache, end_id, skip
        )
        end = np.array([end_id] if end_id >= 0 else [], np.int32)
        pieces, position, ends = [], 0, np.cumsum(lengths)
        for row in np.flatnonzero(skip).tolist():
            encoded = np.asarray(self.tokenizer.encode_ordinary(texts[row].as_py()), np.int32)
            pieces += [ids[position : ends[row]], encoded, end]
            position = ends[row]
            lengths[row] = len(encoded) + len(end)
        return np.concatenate([*pieces, ids[position:]]), lengths


def _is_known_nfc(text: str) -> bool:
    """Whether NFC does not change the text and all of its code points are known."""
    known = (unicodedata.category(c) != "Cn" for c in set(text))
    return unicodedata.is_normalized("NFC", text) and all(known)
