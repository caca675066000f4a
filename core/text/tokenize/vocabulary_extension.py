"""A larger vocabulary for a BPE tokenizer that exists: new tokens behind the old ones.

BPE training goes on where it ended: the documents' pre-tokens are encoded by the old tokenizer,
and the most frequent pair of neighbouring tokens becomes a new token, again and again. New merges
come behind the old ones, so a text is first encoded as before and then shortened: old ids keep
their meaning, and text that the old tokenizer wrote still decodes. Added tokens keep their ids.
Each new token records the old ones it is made of; `grown_rows` gives its row of an embedding as the
mean of theirs (Gee et al. 2022, arXiv 2402.09977), and rows that no token has the mean of all
(Hewitt 2021). Sennrich et al. 2016 (the pairs).
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
    """Ids from `base_size` on are new; pieces[i] are the old ids that base_size + i is made of.

    multiple: of the rows of an embedding for it.
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
        """Rows of an embedding that had `before`: padded to the multiple, and never fewer."""
        return max(before, -(-self.size // self.multiple) * self.multiple)

    def save(self, directory: str | Path) -> None:
        """Writes extension.json beside the tokenizer."""
        text = json.dumps(self.__dict__ | {"pieces": [list(p) for p in self.pieces]})
        write_atomic(Path(directory) / EXTENSION_FILE, text + "\n")


def load_extension(tokenizer: str | Path) -> Extension | None:
    """The record beside a tokenizer (directory or file); None if not extended. Raises BadData."""
    place = Path(tokenizer)
    path = (place if place.is_dir() else place.parent) / EXTENSION_FILE
    if not path.is_file():
        return None
    try:
        said = json.loads(path.read_text("utf-8"))
        pieces = tuple(tuple(int(i) for i in piece) for piece in said["pieces"])
        base = int(said["base_size"]), str(said["base_fingerprint"])
        return Extension(*base, pieces, max(1, int(said.get("multiple", 1))))
    except (ValueError, KeyError, TypeError) as error:
        raise BadData(f"{path}: not the record of an extended vocabulary ({error})") from error


def extension_of(tokenizer: Tokenizer, place: str | Path, base: Tokenizer) -> Extension | None:
    """The record beside `tokenizer`, at `place`, where `base` is what it extends; None elsewhere.

    It is where the old tokens are those of `base`, with their ids. Raises BadData where the record
    is another tokenizer's.
    """
    extension = load_extension(place)
    if extension is None or base.vocab_size != extension.base_size:
        return None
    if extension.size != tokenizer.vocab_size:
        raise BadData(
            f"{place}: {EXTENSION_FILE} is of {extension.size} tokens (expected the tokenizer's "
            f"{tokenizer.vocab_size}; remove it if it is left from another)"
        )
    ids = tokenizer.backend.get_vocab(with_added_tokens=True).items()
    old = {token: number for token, number in ids if number < extension.base_size}
    return extension if old == base.backend.get_vocab(with_added_tokens=True) else None


def grown_rows(rows: np.ndarray, extension: Extension) -> np.ndarray:
    """rows[V, …] → [extension.rows(V), …], in their dtype, the old tokens' rows as they are.

    Each new token's row is the mean of its pieces' rows; those behind it that `rows` does not have
    are the mean of all old tokens'. Raises UsageError where the old tokens have no rows.
    """
    base, size = extension.base_size, extension.size
    if len(rows) < base:
        raise UsageError(f"{len(rows)} rows (expected at least {base})")
    old = rows[:base]
    grown = np.empty((extension.rows(len(rows)), *rows.shape[1:]), rows.dtype)
    grown[: len(rows)] = rows
    for number, piece in enumerate(extension.pieces, base):
        grown[number] = old[list(piece)].mean(axis=0, dtype=np.float32)
    if (behind := max(len(rows), size)) < len(grown):
        grown[behind:] = old.mean(axis=0, dtype=np.float32)
    return grown


def extend(
    tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int, min_frequency: int = 2
) -> tuple[Tokenizer, Extension]:
    """A tokenizer of at most `vocab_size` tokens that keeps every id of the old one.

    Fewer where no pair is seen `min_frequency` times. Raises UsageError where the tokenizer is not
    a BPE that splits text before it merges, or `vocab_size` has no room for new tokens.
    """
    definition = json.loads(tokenizer.definition)
    _check(definition, tokenizer, vocab_size)
    words = _words(tokenizer, texts)
    merges = _learn(
        words, vocab_size - tokenizer.vocab_size, min_frequency, _Vocabulary(definition)
    )
    made = _with_merges(definition, tokenizer, merges)
    extension = Extension(tokenizer.vocab_size, tokenizer.fingerprint, _pieces(merges, definition))
    return Tokenizer(made, tokenizer.config, tokenizer.chat_template, tokenizer.stop_ids), extension


def _check(definition: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int) -> None:
    model = definition["model"]
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if model.get("type") != "BPE" or affixes or definition.get("pre_tokenizer") is None:
        raise UsageError("--extend: not a BPE tokenizer that splits text before it merges")
    if vocab_size <= tokenizer.vocab_size:
        raise UsageError(
            f"--vocab-size: {vocab_size} (expected more than the {tokenizer.vocab_size} tokens "
            "that are extended)"
        )


def _words(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[tuple[str, ...], int]:
    """How often each pre-token comes, as the old tokens it is encoded to."""
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
    """Which pairs may become a token: both whole pieces, their text not a token yet."""

    def __init__(self, definition: Mapping[str, Any]) -> None:
        self.known = set(definition["model"]["vocab"])
        self.known |= {token["content"] for token in definition["added_tokens"]}
        self.closed = {definition["model"].get("unk_token")}
        if definition["model"].get("byte_fallback"):
            self.closed |= {token for token in self.known if token.startswith(_BYTE_TOKEN)}

    def allows(self, left: str, right: str) -> bool:
        if left in self.closed or right in self.closed:
            return False
        return left + right not in self.known


def _learn(
    words: Mapping[tuple[str, ...], int], room: int, least: int, vocabulary: _Vocabulary
) -> list[tuple[str, str]]:
    """The merges in the order learnt: the most frequent pair first, by spelling among equals."""
    pieces = [list(word) for word in words]
    counts = list(words.values())
    pairs: Counter[tuple[str, str]] = Counter()
    places: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for number, word in enumerate(pieces):
        for pair in pairwise(word):
            pairs[pair] += counts[number]
            places[pair].add(number)
    heap = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(heap)
    merges: list[tuple[str, str]] = []
    while heap and len(merges) < room:
        count, pair = heapq.heappop(heap)
        if pairs[pair] != -count or -count < least or not vocabulary.allows(*pair):
            continue
        merges.append(pair)
        vocabulary.known.add(pair[0] + pair[1])
        changed = set()
        for number in sorted(places.pop(pair)):
            changed |= _merge_word(pieces[number], pair, counts[number], number, pairs, places)
        pairs[pair] = 0
        for other in changed:
            if pairs[other] > 0:
                heapq.heappush(heap, (-pairs[other], other))
    return merges


def _merge_word(
    word: list[str],
    pair: tuple[str, str],
    count: int,
    number: int,
    pairs: Counter[tuple[str, str]],
    places: defaultdict[tuple[str, str], set[int]],
) -> set[tuple[str, str]]:
    """Merge a pair in one word and recount its neighbours; returns the pairs that changed."""
    before = Counter(pairwise(word))
    place = 0
    while place + 1 < len(word):
        if (word[place], word[place + 1]) == pair:
            word[place : place + 2] = [pair[0] + pair[1]]
        place += 1
    after = Counter(pairwise(word))
    for other, n in after.items():
        pairs[other] += n * count
        places[other].add(number)
    for other, n in before.items():
        pairs[other] -= n * count
    return set(before) | set(after)


def _with_merges(
    definition: dict[str, Any], tokenizer: Tokenizer, merges: Sequence[tuple[str, str]]
) -> str:
    """The definition with new tokens behind all others. Added tokens enter the model's vocabulary,
    as their ids are counted from its size where they are not in it."""
    model = definition["model"]
    model["vocab"] |= tokenizer.backend.get_vocab(with_added_tokens=True)
    model["merges"] += [
        list(pair)
        if not model["merges"] or isinstance(model["merges"][0], list)
        else " ".join(pair)
        for pair in merges
    ]
    first = tokenizer.vocab_size
    model["vocab"] |= {a + b: first + i for i, (a, b) in enumerate(merges)}
    return json.dumps(definition, ensure_ascii=False)


def _pieces(
    merges: Sequence[tuple[str, str]], definition: Mapping[str, Any]
) -> tuple[tuple[int, ...], ...]:
    """The old ids of each new token."""
    new = {a + b for a, b in merges}
    made: dict[str, tuple[int, ...]] = {
        token: (number,)
        for token, number in definition["model"]["vocab"].items()
        if token not in new
    }
    for left, right in merges:
        made[left + right] = made[left] + made[right]
    return tuple(made[left + right] for left, right in merges)
