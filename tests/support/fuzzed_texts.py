"""Awkward strings for tokenizers, and the documents on which the compiled kernel differs."""

import random

import numpy as np
import pyarrow as pa

from sabia.core.text.tokenize.bpe_encoder import KernelEncoder
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.kernels.text.unicode_classes import UNKNOWN, class_table

_WORDS = """
    the quick brown fox can't won't I'll you've DON'T ' 's 'S '\u017f 'll 12 1234567 3.14 x=1;
    foo(bar) == [] ... !!! // /* \u00e9t\u00e9 \u00e7\u00e3o n\u00e3o \u4e00\u9fa5
    \u3042\u30a2\u30fb\u3099 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35
    \u0627\u0644\u0633\u0644\u0627\u0645 \u0939\u093f\u0928\u094d\u0926\u0940
    \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e7\U0001f1f7 e\u0301 \u01c5 \u02b0a
    \u2160 \u00bd \u00b2 ABCdef AbC \u0130 \u00df \ufffd \ufeff \u00ad HTTPServer camelCase
    <tool> </tool> \u2581 \u2581the of\u2581the
"""
WORDS = _WORDS.split()
SPACES = [" ", "  ", "   ", "\n", "\r\n", "\n\n", "\t", " \n", "\n ", "\u00a0", "\u3000", "\x85",
          "\u2028", "\x00", "\x1c", "\x1f", "\u200b", "\r", "\v", "\f", " " * 40]  # fmt: skip


def fuzz(count: int, seed: int) -> list[str]:
    """Strings of words, runs of white space and code points of all planes."""
    draw = random.Random(seed)
    planes = [(0, 0x80), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x20000),
              (0x20000, 0x110000), (0x300, 0x370), (0x3040, 0x3100),
              (0x1F300, 0x1FB00)]  # fmt: skip

    def piece():
        kind = draw.random()
        if kind < 0.35:
            return draw.choice(WORDS)
        if kind < 0.65:
            return draw.choice(SPACES)
        if kind < 0.8:
            return "".join(
                draw.choice("aAzZ'09 !/\n\u0301\u00e9") for _ in range(draw.randint(1, 6))
            )
        low, high = draw.choice(planes)
        return "".join(chr(draw.randrange(low, high)) for _ in range(draw.randint(1, 3)))

    made = ("".join(piece() for _ in range(draw.randint(1, 24))) for _ in range(count))
    return [text.encode("utf-8", "replace").decode() for text in made]


def known(texts: list[str]) -> list[str]:
    """The texts with known code points only, so that no document is handed to the library."""
    unknown = class_table() & UNKNOWN
    return ["".join(c for c in text if not unknown[ord(c)]) for text in texts]


def differing(tokenizer: Tokenizer, texts: list[str]) -> list[str]:
    kernel = KernelEncoder(tokenizer)
    ids, lengths = kernel.encode(pa.array(texts, pa.string()), end_id=7)
    rows = np.split(ids, np.cumsum(lengths)[:-1])
    wanted = tokenizer.encode_ordinary_batch(texts)
    return [
        text
        for text, row, want in zip(texts, rows, wanted, strict=True)
        if row.tolist() != [*want, 7]
    ]


def added(content, number, **flags):
    usual = {"special": False, "normalized": False, "single_word": False, "lstrip": False}
    return {"id": number, "content": content, "rstrip": False} | usual | flags
