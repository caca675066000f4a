"""Extend the vocabulary of a BPE tokenizer: new tokens get the ids after the old ones.

BPE training (Sennrich et al. 2016) continues: the old tokenizer encodes the pre-tokens of the
documents, and the most frequent pair of neighbouring tokens becomes a new token, repeatedly. The
new merges follow the old ones, so all old ids, those of added tokens included, keep their meaning
and old token sequences still decode. `extension.json` records the old tokens of each new token;
`grown_rows` initializes its embedding row with the mean of their rows (Gee et al. 2022,
arXiv 2402.09977), and rows without a token with the mean of all (Hewitt 2021).
"""

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core.errors import BadData, UsageError
from sabia.core.shards.atomic import write_atomic
from sabia.core.text.tokenize.tokenizer import Tokenizer

EXTENSION_FILE = "extension.json"
_BYTE_TOKEN = "<0x"


@dataclass(frozen=True)
class Extension:
    """Ids from `base_size` on are new; pieces[i] are the old ids of the new id base_size + i.

    multiple: the number of embedding rows is a multiple of it.
    """

    base_size: int
    base_fingerprint: str
    pieces: tuple[tuple[int, ...], ...]
    multiple: int = 1

    @property
    def size(self) -> int:
        """Tokens of the extended vocabulary."""
        return self.base_size + len(self.pieces)

    def rows(self, before: int) -> int:
        """Rows of an embedding that had `before` rows: padded to the multiple, never fewer."""
        return max(before, -(-self.size // self.multiple) * self.multiple)

    def save(self, directory: str | Path) -> None:
        """Write extension.json beside the tokenizer."""
        text = json.dumps(self.__dict__ | {"pieces": [list(p) for p in self.pieces]})
        write_atomic(Path(directory) / EXTENSION_FILE, text + "\n")


def load_extension(tokenizer: str | Path) -> Extension | None:
    """The record beside a tokenizer (directory or file); None if not extended. Raises BadData."""
    location = Path(tokenizer)
    path = (location if location.is_dir() else location.parent) / EXTENSION_FILE
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text("utf-8"))
        pieces = tuple(tuple(int(i) for i in piece) for piece in fields["pieces"])
        base = int(fields["base_size"]), str(fields["base_fingerprint"])
        return Extension(*base, pieces, max(1, int(fields.get("multiple", 1))))
    except (ValueError, KeyError, TypeError) as error:
        raise BadData(f"{path}: not the record of an extended vocabulary ({error})") from error


def extension_of(tokenizer: Tokenizer, path: str | Path, base: Tokenizer) -> Extension | None:
    """The record of `tokenizer`, loaded from `path`, if it extends `base`; else None.

    It extends `base` if the old tokens are those of `base`, with the same ids. Raises BadData where
    the record belongs to another tokenizer.
    """
    extension = load_extension(path)
    if extension is None or base.vocab_size != extension.base_size:
        return None
    if extension.size != tokenizer.vocab_size:
        raise BadData(
            f"{path}: {EXTENSION_FILE} is of {extension.size} tokens (expected the tokenizer's "
            f"{tokenizer.vocab_size}; remove it if it is left from another)"
        )
    ids = tokenizer.backend.get_vocab(with_added_tokens=True).items()
    old = {token: number for token, number in ids if number < extension.base_size}
    return extension if old == base.backend.get_vocab(with_added_tokens=True) else None


def grown_rows(rows: np.ndarray, extension: Extension) -> np.ndarray:
    """rows[V, …] → [extension.rows(V), …] of the same dtype; rows of old tokens do not change.

    The row of a new token is the mean of its pieces' rows; further new rows are the mean of all old
    tokens'. Raises UsageError where `rows` is shorter than the old vocabulary.
    """
    base, size = extension.base_size, extension.size
    if len(rows) < base:
        raise UsageError(f"{len(rows)} rows (expected at least {base})")
    old = rows[:base]
    grown = np.empty((extension.rows(len(rows)), *rows.shape[1:]), rows.dtype)
    grown[: len(rows)] = rows
    for number, piece in enumerate(extension.pieces, base):
        grown[number] = old[list(piece)].mean(axis=0, dtype=np.float32)
    if (padding := max(len(rows), size)) < len(grown):
        grown[padding:] = old.mean(axis=0, dtype=np.float32)
    return grown


def extend(
    tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int, min_frequency: int = 2
) -> tuple[Tokenizer, Extension]:
    """A tokenizer of at most `vocab_size` tokens that keeps every id of the old one.

    It has fewer where no pair occurs `min_frequency` times. Raises UsageError where the tokenizer
    is not a BPE that splits text before it merges, or `vocab_size` allows no new token.
    """
    definition = json.loads(tokenizer.definition)
    model = definition["model"]
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if model.get("type") != "BPE" or affixes or definition.get("pre_tokenizer") is None:
        raise UsageError("--extend: not a BPE tokenizer that splits text before it merges")
    if vocab_size <= tokenizer.vocab_size:
        raise UsageError(
            f"--vocab-size: {vocab_size} (expected more than the {tokenizer.vocab_size} tokens "
            "of the tokenizer to extend)"
        )
    words = _words(tokenizer, texts)
    merges = _learn(
        words, vocab_size - tokenizer.vocab_size, min_frequency, _Vocabulary(definition)
    )
    made = _with_merges(definition, tokenizer, merges)
    extension = Extension(tokenizer.vocab_size, tokenizer.fingerprint, _pieces(merges, definition))
    return Tokenizer(made, tokenizer.config, tokenizer.chat_template, tokenizer.stop_ids), extension


def _words(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[tuple[str, ...], int]:
    """How often each pre-token occurs, by the old tokens that encode it."""
    backend = tokenizer.backend
    counts: Counter[str] = Counter()
    for text in texts:
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        counts.update(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text))
    words: Counter[tuple[str, ...]] = Counter()
    for word, count in counts.items():
        pieces = tuple(token.value for token in backend.model.tokenize(word))
        if len(pieces) > 1:
            words[pieces] += count
    return dict(words)


class _Vocabulary:
    """Decides which pairs may become a token: no unknown or byte token, and no known text."""

    def __init__(self, definition: Mapping[str, Any]) -> None:
        self.known = set(definition["model"]["vocab"])
        self.known |= {token["content"] for token in definition["added_tokens"]}
        self.closed = {definition["model"].get("unk_token")}
        if definition["model"].get("byte_fallback"):
            self.closed |= {token for token in self.known if token.startswith(_BYTE_TOKEN)}

    def allows(self, left: str, right: str) -> bool:
        return self.closed.isdisjoint((left, right)) and left + right not in self.known


def _learn(
    words: Mapping[tuple[str, ...], int], limit: int, min_frequency: int, vocabulary: _Vocabulary
) -> list[tuple[str, str]]:
    """At most `limit` merges in order: the most frequent pair first, ties in string order."""
    pieces = [list(word) for word in words]
    counts = list(words.values())
    pairs: Counter[tuple[str, str]] = Counter()
    words_with: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for number, word in enumerate(pieces):
        for pair in pairwise(word):
            pairs[pair] += counts[number]
            words_with[pair].add(number)
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    merges: list[tuple[str, str]] = []

    def merge(pair: tuple[str, str], number: int) -> set[tuple[str, str]]:
        """Merge a pair in one word and recount its neighbours; returns the pairs that changed."""
        word, count = pieces[number], counts[number]
        before, index = Counter(pairwise(word)), 0
        while index + 1 < len(word):
            if (word[index], word[index + 1]) == pair:
                word[index : index + 2] = [pair[0] + pair[1]]
            index += 1
        after = Counter(pairwise(word))
        for other, n in after.items():
            pairs[other] += n * count
            words_with[other].add(number)
        for other, n in before.items():
            pairs[other] -= n * count
        return set(before) | set(after)

    while heap and len(merges) < limit:
        count, pair = heapq.heappop(heap)
        if pairs[pair] != -count or -count < min_frequency or not vocabulary.allows(*pair):
            continue
        merges.append(pair)
        vocabulary.known.add(pair[0] + pair[1])
        changed = set()
        for number in sorted(words_with.pop(pair)):
            changed |= merge(pair, number)
        pairs[pair] = 0
        for other in changed:
            if pairs[other] > 0:
                heapq.heappush(heap, (-pairs[other], other))
    return merges


def _with_merges(
    definition: dict[str, Any], tokenizer: Tokenizer, merges: Sequence[tuple[str, str]]
) -> str:
    """The definition with the new tokens after all others.

    Added tokens are put into the model's vocabulary; otherwise their ids would depend on its size.
    """
    model = definition["model"]
    model["vocab"] |= tokenizer.backend.get_vocab(with_added_tokens=True)
    as_lists = not model["merges"] or isinstance(model["merges"][0], list)
    model["merges"] += [list(pair) if as_lists else " ".join(pair) for pair in merges]
    first = tokenizer.vocab_size
    model["vocab"] |= {a + b: first + i for i, (a, b) in enumerate(merges)}
    return json.dumps(definition, ensure_ascii=False)


def _pieces(
    merges: Sequence[tuple[str, str]], definition: Mapping[str, Any]
) -> tuple[tuple[int, ...], ...]:
    """The old ids of each new token."""
    new = {a + b for a, b in merges}
    vocab = definition["model"]["vocab"].items()
    pieces: dict[str, tuple[int, ...]] = {t: (number,) for t, number in vocab if t not in new}
    for left, right in merges:
        pieces[left + right] = pieces[left] + pieces[right]
    return tuple(pieces[left + right] for left, right in merges)
