"""An index of benchmark items to search documents for: hashes of the words, and their weights.

The question, each option and the answer of an item are separate parts. A question longer than PIECE
words is cut into pieces, so that one passage of it can match alone. The weight of a word is
idf(w) = ln(1 + N / n(w)), where n(w) of N items have the word (Robertson 2004). An n-gram that
occurs in many items is a template of the benchmark ("which of the following …"): templates are not
searched for, and words that only templates cover have weight 0.

The index holds hashes of words (those of sabia.kernels.word_spans) and never the text, so the index
of a private benchmark can be published. It holds a digest of each task's items, so that an
evaluation can check that it uses the items that the corpus was cleaned of.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from sabia.core.digests import open_parquet
from sabia.core.errors import BadData
from sabia.core.shards.outputs import open_file
from sabia.kernels.word_spans.definitions import Words
from sabia.kernels.word_spans.interface import ngram_hashes, word_spans

VERSION = 1
SEED = 5  # words of the n-grams that are looked up
PIECE = 400  # words per part at most
SHORT = 12  # a shorter question (in words) is joined with its options and answer
TEMPLATE_SHARE = 0.02  # an n-gram in more than this share of the items, and more than
TEMPLATE_ITEMS = 3  # so many items, is a template
QUESTION, OPTION, ANSWER = KINDS = ("question", "option", "answer")
_SCHEMA = pa.schema(
    [
        ("task", pa.string()),
        ("item", pa.string()),
        ("kind", pa.string()),
        ("words", pa.list_(pa.uint64())),
    ]
)


@dataclass(frozen=True)
class BenchmarkItem:
    """The text of one benchmark item; `options` are those of a multiple choice."""

    task: str
    item: str
    question: str
    options: tuple[str, ...] = ()
    answer: str = ""


@dataclass(frozen=True)
class ItemPart:
    """A part of an item: its kind (QUESTION, OPTION or ANSWER) and word hashes uint64[n]."""

    task: str
    item: str
    kind: str
    words: np.ndarray

    @property
    def owner(self) -> tuple[str, str]:
        """(task, item) that it belongs to."""
        return self.task, self.item


class Index:
    """Parts of all items; `tasks` maps a task's name to the digest of its items."""

    def __init__(self, parts: Sequence[ItemPart], tasks: Mapping[str, str]) -> None:
        self.parts, self.tasks = tuple(parts), dict(tasks)

    @classmethod
    def build(cls, items: Iterable[BenchmarkItem], engine: str = "numba") -> "Index":
        """The index of the items. Raises BadData where there are none."""
        items = list(items)
        if not items:
            raise BadData("no benchmark item to look for (expected one or more)")
        parts = [part for item in items for part in _parts_of(item, engine)]
        return cls(parts, {task: _digest(parts, task) for task in {item.task for item in items}})

    @cached_property
    def numbers(self) -> dict[tuple[str, str], list[int]]:
        """The indices in `parts` of each item's parts."""
        numbers: dict[tuple[str, str], list[int]] = {}
        for number, part in enumerate(self.parts):
            numbers.setdefault(part.owner, []).append(number)
        return numbers

    @cached_property
    def owners(self) -> dict[tuple[str, str], list[ItemPart]]:
        """The parts of each item."""
        return {owner: [self.parts[n] for n in mine] for owner, mine in self.numbers.items()}

    @cached_property
    def digest(self) -> str:
        """Hash of all tasks and items."""
        content = json.dumps([VERSION, sorted(self.tasks.items())])
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    @property
    def too_short(self) -> list[tuple[str, str]]:
        """Items that cannot be searched for: no part of them has SEED words."""
        return [
            owner for owner, parts in self.owners.items()
            if max(len(part.words) for part in parts) < SEED
        ]  # fmt: skip

    def merged(self, other: "Index") -> "Index":
        """The union of both. Raises BadData where a task has different items in them."""
        for name in self.tasks.keys() & other.tasks.keys():
            if self.tasks[name] != other.tasks[name]:
                raise BadData(f"task {name}: two indices hold different items of this task")
        new = [part for part in other.parts if part.task not in self.tasks]
        return Index((*self.parts, *new), self.tasks | other.tasks)

    def save(self, path: str) -> None:
        """Write the index as a Parquet file, atomically."""
        rows = [vars(part) for part in self.parts]
        with open_file(path, _SCHEMA, {"contamination": VERSION, "tasks": self.tasks}) as writer:
            writer.write(pa.RecordBatch.from_pylist(rows, _SCHEMA))

    @classmethod
    def load(cls, path: str) -> "Index":
        """Read an index; raises BadData for other files, damaged ones and other versions."""
        try:
            with open(path, "rb") as file:
                table = open_parquet(file, path).read()
            metadata = json.loads((table.schema.metadata or {})[b"sabia"])
            if metadata["contamination"] != VERSION:
                version = metadata["contamination"]
                raise BadData(f"{path}: index version {version} (expected {VERSION})")
            rows = table.cast(_SCHEMA).to_pylist()
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:
            reason = str(error).partition("\n")[0]
            raise BadData(f"{path}: not an index of benchmark items ({reason})") from error
        parts = [ItemPart(**row | {"words": np.array(row["words"], np.uint64)}) for row in rows]
        for task, digest in metadata["tasks"].items():
            if _digest(parts, task) != digest:
                raise BadData(
                    f"{path}: the items of task {task} do not match their digest "
                    "(the file is damaged)"
                )
        return cls(parts, metadata["tasks"])


def words_of(texts: Sequence[str], engine: str = "numba") -> list[np.ndarray]:
    """The word hashes uint64[n] of each text."""
    encoded = [text.encode("utf-8", "replace") for text in texts]
    offsets = np.concatenate(([0], np.cumsum([len(text) for text in encoded]))).astype(np.int64)
    data = np.frombuffer(b"".join(encoded) or b"\0", np.uint8)
    words = word_spans(data, offsets, engine)
    return np.split(words.hash, words.starts[1:-1])


def _parts_of(source: BenchmarkItem, engine: str) -> Iterator[ItemPart]:
    """The question in pieces, each option, the answer; a short question is joined with them."""
    question, answer, *options = words_of((source.question, source.answer, *source.options), engine)
    if len(question) < SHORT:
        joined = np.concatenate((question, *options, answer))
        yield ItemPart(source.task, source.item, QUESTION, joined)
    else:
        for piece in np.array_split(question, -(-len(question) // PIECE)):
            yield ItemPart(source.task, source.item, QUESTION, piece)
    for option in options:
        yield ItemPart(source.task, source.item, OPTION, option[:PIECE])
    if len(answer):
        yield ItemPart(source.task, source.item, ANSWER, answer[:PIECE])


def _digest(parts: Sequence[ItemPart], task: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if part.task == task:
            digest.update(json.dumps([part.item, part.kind, len(part.words)]).encode())
            digest.update(part.words.astype("<u8").tobytes())
    return digest.hexdigest()


class WordWeights:
    """The weight of each word of each part, and where the n-grams that are looked up occur.

    weight[k]: float64 of part k's words; seeds: uint64[s] hashes of n-grams; (part, position) of
    seed i are postings[bounds[i]:bounds[i + 1]], int64[., 2].
    """

    def __init__(self, index: Index, engine: str = "numba") -> None:
        hashes = np.concatenate([np.empty(0, np.uint64), *(part.words for part in index.parts)])
        starts = np.concatenate(([0], np.cumsum([len(part.words) for part in index.parts])))
        unused = np.zeros(len(hashes), np.int64)
        words = Words(hashes, unused, unused, starts.astype(np.int64))
        owner_number = {owner: i for i, owner in enumerate(index.owners)}
        owners = np.array([owner_number[part.owner] for part in index.parts])
        owner_of_word = np.repeat(owners, np.diff(words.starts))
        count = len(owner_number)
        grams = ngram_hashes(words, SEED, engine)
        limit = max(TEMPLATE_ITEMS, TEMPLATE_SHARE * count)
        template = (grams != 0) & (_items_with(grams, owner_of_word) > limit)
        seed = (grams != 0) & ~template
        idf = np.log1p(count / _items_with(words.hash, owner_of_word))
        idf[_covered(template) & ~_covered(seed)] = 0.0
        self.weight = np.split(idf, words.starts[1:-1])
        position = np.flatnonzero(seed)
        position = position[np.argsort(grams[position], kind="stable")]
        self.seeds, first = np.unique(grams[position], return_index=True)
        self.bounds = np.append(first, len(position))
        part = np.searchsorted(words.starts, position, side="right") - 1
        self.postings = np.stack((part, position - words.starts[part]), axis=1)


def _items_with(values: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """int64[w]: the number of items that hold each value."""
    _, number = np.unique(values, return_inverse=True)
    pairs = np.unique(np.stack((number, owner), axis=1), axis=0)
    return np.bincount(pairs[:, 0], minlength=number.max(initial=-1) + 1)[number]


def _covered(starts: np.ndarray) -> np.ndarray:
    """bool[w]: words inside an n-gram that begins where starts[w] is true."""
    change = np.zeros(len(starts) + SEED, np.int64)
    np.add.at(change, np.flatnonzero(starts), 1)
    np.add.at(change, np.flatnonzero(starts) + SEED, -1)
    return np.cumsum(change)[: len(starts)] > 0
