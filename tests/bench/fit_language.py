"""Makes the profile of the language identifier (language_profiles.npz) from texts.

usage: python tests/bench/fit_language.py TEXTS.json PROFILE.npz

TEXTS.json: language → texts of it, such as {"pt": ["…", "…"]}: kinds of text, weighted alike.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sabia.kernels.language.definitions import STEP
from sabia.kernels.language.numba_impl import features

FEATURES = 16_000
FREQUENT = 150
FLOOR = 2e-6
_WORD = re.compile(r"[^\W\d_]+")


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
            at = np.searchsorted(keys, features(word)[0][0])
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
        keys, whole = features(text)
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


def main() -> None:
    """Write the profile."""
    texts, profile = sys.argv[1:]
    np.savez_compressed(profile, **build(json.loads(Path(texts).read_text("utf-8"))))


if __name__ == "__main__":
    main()
