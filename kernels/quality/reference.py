"""The statistics of sabia.kernels.quality in plain Python: their definition, slow and short."""

import re
from collections import Counter

import numpy as np

from sabia.kernels.quality import definitions
from sabia.kernels.text.character_flags import ALPHA, CODE, SOLO, SYMBOL, TERMINAL, lower_table
from sabia.kernels.text.folding import TABLE_SIZE
from sabia.kernels.text.words import flags_of, word_hash, words

_NAN = float("nan")
_CITATION = re.compile(r"\[[0-9]*\]|\[edit\]|\[citation needed\]")


def measure(
    data: np.ndarray, offsets: np.ndarray, stop_hashes: np.ndarray, stop_bounds: np.ndarray,
    which: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """float64[n, figures]; see sabia.kernels.quality.interface.measure."""
    table = np.empty((len(offsets) - 1, len(definitions.FIGURES)))
    for row in range(len(table)):
        text = data[offsets[row] : offsets[row + 1]].tobytes().decode()
        at = int(which[row])
        stops = None
        if at >= 0:
            stops = set(stop_hashes[stop_bounds[at] : stop_bounds[at + 1]].tolist())
        row_figures = figures(text, stops)
        table[row] = [row_figures[name] for name in definitions.FIGURES]
    return table


def figures(text: str, stops: set[int] | None) -> dict[str, float]:
    """All statistics of one text."""
    split = words(text)
    return (
        _word_figures(text, split, stops)
        | _line_figures(text)
        | _repetition(text, split)
        | _c4(text)
        | _fineweb(text, split)
        | _characters(text, split)
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else _NAN


def _has(word: str, flag: int) -> bool:
    return any(flags_of(char) & flag for char in word)


def _word_figures(text: str, split: list[str], stops: set[int] | None) -> dict[str, float]:
    plain = [word for word in split if not all(flags_of(char) & SYMBOL for char in word)]
    spelled = [len(word) for word in plain if not flags_of(word[0]) & SOLO]
    there = _NAN if stops is None else float(len(stops & {word_hash(word) for word in split}))
    return {
        "word_count": float(len(plain)),
        "mean_word_length": _share(sum(spelled), len(spelled)),
        "gopher_hash_ratio": _share(text.count("#"), len(split)),
        "gopher_ellipsis_ratio": _share(text.count("...") + text.count("…"), len(split)),
        "gopher_alpha_words": _share(sum(_has(word, ALPHA) for word in split), len(split)),
        "gopher_stop_words": there,
    }


def _line_figures(text: str) -> dict[str, float]:
    lines = text.splitlines()
    bullets = sum(line.lstrip().startswith(("•", "-")) for line in lines)
    dots = sum(line.rstrip().endswith(("...", "…")) for line in lines)
    return {
        "gopher_bullet_lines": _share(bullets, len(lines)),
        "gopher_ellipsis_lines": _share(dots, len(lines)),
    }


def _doubled(parts: list[str]) -> tuple[int, int]:
    """(number, characters) of the parts that are repetitions."""
    seen: set[str] = set()
    again = []
    for part in parts:
        if part in seen:
            again.append(len(part))
        seen.add(part)
    return len(again), sum(again)


def _repetition(text: str, split: list[str]) -> dict[str, float]:
    paragraphs, lines = re.split(r"\n{2,}", text.strip()), re.split(r"\n+", text)
    shares = {}
    for name, parts in (("paragraph", paragraphs), ("line", lines)):
        number, characters = _doubled(parts)
        shares[f"gopher_dup_{name}s"] = _share(number, len(parts)) if text else _NAN
        shares[f"gopher_dup_{name}_chars"] = _share(characters, len(text))
    for k in definitions.TOP:
        grams = Counter(" ".join(split[i : i + k]) for i in range(len(split) - k + 1))
        gram, times = grams.most_common(1)[0] if grams else ("", 0)
        shares[f"gopher_top_{k}gram_share"] = _share(len(gram) * times, len(text))
    for k in definitions.DUPLICATED:
        shares[f"gopher_dup_{k}gram_share"] = _share(_doubled_grams(split, k), len(text))
    return shares


def _doubled_grams(split: list[str], k: int) -> int:
    seen: set[tuple[str, ...]] = set()
    position = characters = 0
    while position + k <= len(split):
        gram = tuple(split[position : position + k])
        if gram in seen:
            characters += sum(map(len, gram))
            position += k
        else:
            seen.add(gram)
            position += 1
    return characters


def _sentences(line: str) -> int:
    """Sentences of a line: one begins at a word of no SYMBOL after a word that is a TERMINAL."""
    count, ended = 1, False
    for word in words(line):
        if len(word) == 1 and flags_of(word) & TERMINAL:
            ended = True
        elif ended and not all(flags_of(char) & SYMBOL for char in word):
            count, ended = count + 1, False
    return count


def c4_verdict(line: str) -> tuple[str, str]:
    """(verdict of the C4 rules, the line without citations); the verdict is `keep` or the reason:
    long word, no terminal, few words, lorem ipsum, javascript, curly bracket, policy."""
    line = line.strip()
    parts = line.split()
    if any(len(part) > definitions.MAX_LINE_WORD for part in parts):
        return "long word", line
    line = _CITATION.sub("", line)
    low = line.lower()
    rules = (
        ("no terminal", not line.endswith(tuple(definitions.LINE_ENDS)) or line.endswith("...")),
        ("few words", len(parts) < definitions.MIN_LINE_WORDS),
        ("lorem ipsum", definitions.LOREM in low),
        ("javascript", definitions.SCRIPT in low),
        ("curly bracket", "{" in line),
        ("policy", any(phrase in low for phrase in definitions.POLICY)),
    )
    return next((name for name, holds in rules if holds), "keep"), line


def _c4(text: str) -> dict[str, float]:
    judged = [c4_verdict(line) for line in text.splitlines()]
    names = [name for name, _ in judged]
    kept = [line for name, line in judged if name == "keep"]
    return {
        "c4_kept_lines": _share(len(kept), len(judged)),
        "c4_sentences": float(sum(map(_sentences, kept))),
        "c4_lorem_ipsum": float("lorem ipsum" in names),
        "c4_curly_bracket": float("curly bracket" in names),
    }


def _fineweb(text: str, split: list[str]) -> dict[str, float]:
    lines = [line for line in text.split("\n") if line.strip()]
    ends = sum(bool(flags_of(line[-1]) & TERMINAL) for line in lines)
    return {
        "fineweb_punctuated_lines": _share(ends, len(lines)),
        "fineweb_short_lines": _share(
            sum(len(line) <= definitions.SHORT_LINE for line in lines), len(lines)
        ),
        "fineweb_dup_chars": _share(_doubled(lines)[1], len(text.replace("\n", ""))),
        "fineweb_newline_ratio": _share(text.count("\n"), len(split)),
    }


def _characters(text: str, split: list[str]) -> dict[str, float]:
    codes = [code for code in map(ord, text) if code < TABLE_SIZE]
    capitals = int(np.count_nonzero(lower_table()[codes] != codes))
    return {
        "upper_ratio": _share(capitals, sum(bool(flags_of(char) & ALPHA) for char in text)),
        "links": _share(text.count("://"), len(split)),
        "code_marks": _share(
            sum(bool(flags_of(char) & CODE) for char in text), len("".join(text.split()))
        ),
    }
