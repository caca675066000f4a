"""The folding of texts for comparison, against unicodedata over all of Unicode."""

import random
import unicodedata

import numpy as np

from sabia.kernels.text.folding import SKIP, SPACE, TABLE_SIZE, folding_tables
from sabia.kernels.text.reference import compared_characters

DIACRITICS = [(0x0300, 0x036F), (0x1AB0, 0x1AFF), (0x1DC0, 0x1DFF), (0x20D0, 0x20FF),
              (0xFE00, 0xFE0F), (0xFE20, 0xFE2F)]  # fmt: skip
ASSIGNED = [
    code
    for code in range(0x110000)
    if not 0xD800 <= code < 0xE000 and unicodedata.category(chr(code)) != "Cn"
]


def bare(char: str) -> str:
    """The compatibility decomposition without combining diacritics."""
    parts = unicodedata.normalize("NFKD", char)
    return "".join(p for p in parts if not any(a <= ord(p) <= b for a, b in DIACRITICS))


def folded(text: str) -> list[int]:
    folds, kinds = folding_tables()
    codes = [ord(char) for char in text]
    inside = [code for code in codes if code >= TABLE_SIZE or kinds[code] != SKIP]
    return [code if code >= TABLE_SIZE else int(folds[code]) for code in inside]


def test_a_character_folds_if_its_decomposition_is_one_character() -> None:
    folds, kinds = folding_tables()
    several = set()
    for code in ASSIGNED:
        if code >= TABLE_SIZE or kinds[code] == SKIP:
            continue
        char, parts = chr(code), bare(chr(code))
        several |= {char} if len(parts) > 1 else set()
        lower = (parts if len(parts) == 1 else char).lower()
        assert folds[code] == (ord(lower) if len(lower) == 1 else code), hex(code)
    assert {*"ﬁ½①각"} - several == {"①"}  # as the manual says


def test_scripts_in_which_composed_and_decomposed_texts_are_equal() -> None:
    different = [
        unicodedata.name(chr(code)).split()[0]
        for code in ASSIGNED
        if folded(chr(code)) != folded(unicodedata.normalize("NFD", chr(code)))
    ]
    assert {"HANGUL", "KATAKANA", "HIRAGANA", "ARABIC", "DEVANAGARI", "CJK"} <= set(different)
    assert not {"LATIN", "GREEK", "CYRILLIC"} & set(different)


def test_compared_characters_are_neither_space_nor_diacritics() -> None:
    kinds, source = folding_tables()[1], random.Random(1)
    some = [*map(ord, "a b\té\u0301\u00ad\u3000あ\u2003\ufe0f👍")]
    for size in (0, 1, 3, 60):
        texts = [
            "".join(
                chr(source.choice([source.choice(ASSIGNED), source.choice(some)]))
                for _ in range(source.choice([0, size]))
            )
            for _ in range(200)
        ]
        raw = [text.encode() for text in texts]
        data = np.frombuffer(b"x " + b"".join(raw) + b"y", np.uint8)
        offsets = 2 + np.cumsum([0, *map(len, raw)])
        ignored = [
            sum(ord(c) < TABLE_SIZE and kinds[ord(c)] in (SPACE, SKIP) for c in text)
            for text in texts
        ]
        wanted = [len(text) - less for text, less in zip(texts, ignored, strict=True)]
        assert compared_characters(data, offsets).tolist() == wanted
