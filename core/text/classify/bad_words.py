"""Lists of bad words: count the words of a text that are on a list.

A list is a text file in UTF-8 with one word or phrase per line (lines that begin with # are
comments), or a directory of such files. A file named after a language (`pt.txt`, `en`) applies to
texts in that language, any other file to all texts. Case and accents are ignored (NFKD without
combining marks, case folded). Words are runs of letters, digits and `_`; a phrase matches the same
words in a row, with any characters between them. Entries in scripts without spaces match anywhere.
    bad_words       number of matches; each occurrence of a phrase counts once
    bad_word_share  matches / words (characters in scripts without spaces), at most 1
"""

import functools
import hashlib
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sabia.core.errors import BadData, UsageError
from sabia.core.text.classify.language import SCRIPTS
from sabia.kernels.text.character_flags import SOLO
from sabia.kernels.text.words import flags_of

NAMES = ("bad_words", "bad_word_share")
_WORD = re.compile(r"\w+")
_LANGUAGE = re.compile(r"[a-z]{2}")
_MARKS = re.compile("[\u0300-\u036f\u0591-\u05c7\u064b-\u065f]")
_UNSPACED = frozenset({"zh", "ja", "th", "lo", "km", "my"} & set(SCRIPTS))


@dataclass(frozen=True)
class _Entries:
    """Phrases by number of words, and a pattern of the entries that match anywhere."""

    phrases: dict[int, frozenset[str]]
    anywhere: re.Pattern[str] | None


@dataclass(frozen=True)
class BadWords:
    """Entries by language; those under an empty name apply to every text."""

    entries: dict[str, _Entries]

    def count(self, text: str, language: str | None) -> tuple[int, int]:
        """(matches, words) of a text."""
        folded = fold(text)
        words = _WORD.findall(folded)
        total = len(words)
        if language in _UNSPACED:
            total = sum(not char.isspace() for char in folded)
        lists = [self.entries[name] for name in {"", language or ""} if name in self.entries]
        return sum(_matches(entries, folded, words) for entries in lists), total


def fold(text: str) -> str:
    """The text without case and accents."""
    if text.isascii():
        return text.lower()
    return _MARKS.sub("", unicodedata.normalize("NFKD", text)).casefold()


def _matches(entries: _Entries, folded: str, words: Sequence[str]) -> int:
    count = 0
    for size, phrases in entries.phrases.items():
        if size == 1:
            count += sum(map(phrases.__contains__, words))
            continue
        runs = zip(*(words[i:] for i in range(size)), strict=False)
        count += sum(" ".join(run) in phrases for run in runs)
    if entries.anywhere is not None:
        count += sum(1 for _ in entries.anywhere.finditer(folded))
    return count


def _compiled(lines: Sequence[str]) -> _Entries:
    phrases: dict[int, set[str]] = {}
    anywhere = set()
    for line in lines:
        folded = fold(line)
        if any(flags_of(char) & SOLO for char in folded):
            anywhere.add(folded)
        elif words := _WORD.findall(folded):
            phrases.setdefault(len(words), set()).add(" ".join(words))
    ordered = sorted(anywhere, key=lambda word: (-len(word), word))
    pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
    return _Entries({size: frozenset(group) for size, group in sorted(phrases.items())}, pattern)


def _files(path: str) -> list[Path]:
    root = Path(path)
    if not root.exists():
        raise UsageError(f"--bad-words: {path}: No such file or directory")
    files = sorted(file for file in root.iterdir() if file.is_file()) if root.is_dir() else [root]
    if not files:
        raise UsageError(f"--bad-words: {path}: the directory has no file")
    return files


def digest(paths: Sequence[str]) -> str:
    """Hash of the files' names and content, for fingerprints."""
    total = hashlib.blake2b(digest_size=16)
    for file in (file for path in paths for file in _files(path)):
        total.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()


@functools.lru_cache(maxsize=2)
def load(paths: tuple[str, ...]) -> BadWords:
    """The lists at paths. UsageError where one does not exist, BadData where one is not UTF-8."""
    lines: dict[str, list[str]] = {}
    for file in (file for path in paths for file in _files(path)):
        stem = file.name.partition(".")[0]
        name = stem if _LANGUAGE.fullmatch(stem) else ""
        try:
            text = file.read_text("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadData(f"--bad-words: {file}: not UTF-8 ({error})") from error
        stripped = (line.strip() for line in text.splitlines())
        lines.setdefault(name, []).extend(line for line in stripped if line and line[0] != "#")
    return BadWords({name: _compiled(entries) for name, entries in lines.items()})


def scan(
    lists: BadWords, texts: Sequence[str], languages: Sequence[str | None]
) -> dict[str, np.ndarray]:
    """The scores of NAMES, float64[n]."""
    pairs = zip(texts, languages, strict=True)
    counted = np.array([lists.count(text, language) for text, language in pairs], float)
    matches, words = counted.reshape(-1, 2).T
    return {
        "bad_words": matches,
        "bad_word_share": np.minimum(matches / np.maximum(words, 1), 1.0),
    }
