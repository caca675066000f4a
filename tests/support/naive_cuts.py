"""What the methods of dedup that cut parts of documents must leave, in plain Python."""

import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from sabia.core.text.sentences import sentences


def folded(piece: str) -> tuple[str, ...]:
    """Words (Han characters are words) and marks; spacing, case and accents aside."""
    plain = unicodedata.normalize("NFKD", piece.lower())
    plain = "".join(c for c in plain if not unicodedata.combining(c))
    return tuple(re.findall(r"[一-龯]|(?:(?![一-龯])\w)+|[^\w\s]", plain))


def words_of(key: tuple[str, ...]) -> int:
    return sum(token[0].isalnum() for token in key)


def expected(pieces: list[list[str]], run_: int, min_copies: int, min_words: int) -> list[str]:
    """What stays of documents given as lists of pieces."""
    keys = [[folded(piece) for piece in document] for document in pieces]

    def heads(document: list[tuple[str, ...]]) -> list[int]:
        fit = [bool(key) and words_of(key) >= min_words for key in document]
        return [i for i in range(len(document) - run_ + 1) if all(fit[i : i + run_])]

    windows = [{i: tuple(keys[d][i : i + run_]) for i in heads(keys[d])} for d in range(len(keys))]
    copies = Counter(window for document in windows for window in document.values())
    first: dict[tuple, tuple[int, int]] = {}
    left = []
    for d, document in enumerate(windows):
        gone = set()
        for i, window in document.items():
            where = first.setdefault(window, (d, i))
            before = where[0] < d or where[1] + run_ <= i
            if before and copies[window] >= min_copies:
                gone |= set(range(i, i + run_))
        left.append("".join(p for i, p in enumerate(pieces[d]) if i not in gone))
    return left


def lines_of(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+$", text)


def paragraphs_of(text: str) -> list[str]:
    found: list[str] = []
    blank_before = False
    for line in lines_of(text):
        blank = not line.strip(" \t\r\n\f\v")
        if not found or (blank_before and not blank):
            found.append("")
        found[-1] += line
        blank_before = blank
    return found


def sentences_of(text: str) -> list[str]:
    starts, end = list[int](), 0
    for sentence in sentences(text) or [""]:
        starts.append(text.index(sentence, end) if starts else 0)
        end = text.index(sentence, end) + len(sentence)
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


class Unit(NamedTuple):
    """How a text divides into pieces, and how many of them repeat together."""

    pieces_of: Callable[[str], list[str]]
    run: int


UNITS = {
    "line": Unit(lines_of, 1),
    "paragraph": Unit(paragraphs_of, 1),
    "sentences": Unit(sentences_of, 3),
}


def without_repeats(texts: list[str], span: int) -> list[str]:
    """The texts without the whole characters in windows of `span` bytes that occurred before."""
    first: dict[bytes, int] = {}
    base, kept = 0, []
    for text in texts:
        data = text.encode()
        cut = bytearray(len(data))
        for i in range(len(data) - span + 1):
            if first.setdefault(data[i : i + span], base + i) + span <= base + i:
                cut[i : i + span] = b"\1" * span
        left, at = "", 0
        for character in text:
            size = len(character.encode())
            left += "" if all(cut[at : at + size]) else character
            at += size
        base += len(data)
        kept.append(left)
    return kept


PIECES = ["Home", "  home ", "HÔME", "Login | Register", "a b c d", "", " ", "\t", "----", "}",
          "日本語", "x", "Ends here. Starts É 👍!"]  # fmt: skip


def make_corpus(source: random.Random, most: int) -> list[str]:
    """Up to `most` texts with repeated pieces; some texts again, in runs that keep their order."""
    count = int(most ** source.uniform(0.5, 1)) + 1
    gaps = source.choice([["\n"], ["\n", "\n\n"], [". ", "\n"], ["\n \n", "! ", ""]])
    own, common = source.random(), source.choices(PIECES, k=5)
    texts = list[str]()
    while len(texts) < count:
        if texts and source.random() < 0.2:
            low = source.randrange(len(texts))
            texts += texts[low : low + source.randrange(1, 40)]
            continue
        parts = [
            f"Número {source.randrange(9 * count)} é {'x' * source.randrange(9)}"
            if source.random() < own
            else source.choice(common)
            for _ in range(source.choice([0, 1, 1, 2, 3, 8]))
        ]
        text = "".join(part + source.choice(gaps) for part in parts)
        texts.append(text.rstrip() if source.random() < 0.3 else text)
    return texts[:count]
