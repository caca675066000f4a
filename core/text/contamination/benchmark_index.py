"""The index of benchmark items that documents are searched for: words as hashes, their weights.

Question, options and answer of an item are parts of their own. A part longer than PIECE words is
cut into pieces, so that one passage of a long question can be found alone. A word weighs
idf(w) = ln(1 + N / n(w)), N items, n(w) of them with the word (Robertson 2004); an n-gram that
stands in many items is a template of the benchmark ("which of the following …"): it is no reason to
look, and words that only templates cover weigh nothing.

The index keeps hashes of words (those of sabia.kernels.word_spans), never the text, so a private
benchmark can be given away as an index. Each task carries a digest of its items: whoever evaluates
on other items than the corpus was cleaned of can be told so.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sabia.core.errors import BadData
from sabia.core.shards.outputs import open_file
from sabia.kernels.word_spans.definitions import Words
from sabia.kernels.word_spans.interface import ngram_hashes, word_spans

VERSION = 1
SEED = 5  # words of the n-grams that lead to a part
PIECE = 400  # words of a part at most
SHORT = 12  # a question of fewer words is joined to its options and answer
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
class Exam:
    """One benchmark item as text; `options` of a multiple choice, `answer` the right one."""

    task: str
    item: str
    question: str
    options: tuple[str, ...] = ()
    answer: str = ""


@dataclass(frozen=True)
class Part:
    """A piece of an item: kind QUESTION, OPTION or ANSWER, and its word hashes uint64[n]."""

    task: str
    item: str
    kind: str
    words: np.ndarray

    @property
    def owner(self) -> tuple[str, str]:
        """The item that it belongs to."""
        return self.task, self.item


class Index:
    """Parts of all items; `tasks` maps a task's name to the digest of its items."""

    def __init__(self, parts: Sequence[Part], tasks: Mapping[str, str]) -> None:
        self.parts, self.tasks = tuple(parts), dict(tasks)

    @classmethod
    def build(cls, exams: Iterable[Exam], engine: str = "numba") -> "Index":
        """The index of some items. Raises BadData where there is none."""
        given = list(exams)
        if not given:
            raise BadData("no benchmark item to look for (expected one or more)")
        parts = [part for exam in given for part in _parts_of(exam, engine)]
        return cls(parts, {task: _digest(parts, task) for task in {exam.task for exam in given}})

    @cached_property
    def numbers(self) -> dict[tuple[str, str], list[int]]:
        """The places in `parts` of each item's parts."""
        found: dict[tuple[str, str], list[int]] = {}
        for number, part in enumerate(self.parts):
            found.setdefault(part.owner, []).append(number)
        return found

    @cached_property
    def owners(self) -> dict[tuple[str, str], list[Part]]:
        """The parts of each item."""
        return {owner: [self.parts[n] for n in mine] for owner, mine in self.numbers.items()}

    @cached_property
    def digest(self) -> str:
        """One name for all tasks and items."""
        said = json.dumps([VERSION, sorted(self.tasks.items())])
        return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

    @property
    def too_short(self) -> list[tuple[str, str]]:
        """Items with fewer than SEED words in all, which cannot be looked for."""
        return [
            owner for owner, parts in self.owners.items()
            if max(len(part.words) for part in parts) < SEED
        ]  # fmt: skip

    def merged(self, other: "Index") -> "Index":
        """Both; a task in both must be the same. Raises BadData where it is not."""
        for name in self.tasks.keys() & other.tasks.keys():
            if self.tasks[name] != other.tasks[name]:
                raise BadData(f"task {name}: two indices hold different items of it")
        new = [part for part in other.parts if part.task not in self.tasks]
        return Index((*self.parts, *new), self.tasks | other.tasks)

    def save(self, path: str) -> None:
        """Write the index as a Parquet file, at once."""
        rows = [vars(part) for part in self.parts]
        with open_file(path, _SCHEMA, {"contamination": VERSION, "tasks": self.tasks}) as writer:
            writer.write(pa.RecordBatch.from_pylist(rows, _SCHEMA))

    @classmethod
    def load(cls, path: str) -> "Index":
        """Read an index; raises BadData for a file that is none, is damaged or too new."""
        try:
            table = pq.read_table(path)
            made = json.loads((table.schema.metadata or {})[b"sabia"])
            if made["contamination"] != VERSION:
                raise BadData(f"{path}: index version {made['contamination']} (expected {VERSION})")
            rows = table.cast(_SCHEMA).to_pylist()
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:
            reason = str(error).partition("\n")[0]
            raise BadData(f"{path}: not an index of benchmark items ({reason})") from error
        parts = [Part(**row | {"words": np.array(row["words"], np.uint64)}) for row in rows]
        for task, digest in made["tasks"].items():
            if _digest(parts, task) != digest:
                raise BadData(f"{path}: items of task {task} do not have their digest")
        return cls(parts, made["tasks"])


def words_of(texts: Sequence[str], engine: str = "numba") -> list[np.ndarray]:
    """The word hashes uint64[n] of each text."""
    encoded = [text.encode("utf-8", "replace") for text in texts]
    offsets = np.concatenate(([0], np.cumsum([len(text) for text in encoded]))).astype(np.int64)
    data = np.frombuffer(b"".join(encoded) or b"\0", np.uint8)
    found = word_spans(data, offsets, engine)
    return np.split(found.hash, found.starts[1:-1])


def _parts_of(exam: Exam, engine: str) -> Iterator[Part]:
    """Pieces of the question, each option, the answer; a short question takes them all along."""
    question, answer, *options = words_of((exam.question, exam.answer, *exam.options), engine)
    if len(question) < SHORT:
        yield Part(exam.task, exam.item, QUESTION, np.concatenate((question, *options, answer)))
    else:
        count = -(-len(question) // PIECE)
        for piece in np.array_split(question, count):
            yield Part(exam.task, exam.item, QUESTION, piece)
    for option in options:
        yield Part(exam.task, exam.item, OPTION, option[:PIECE])
    if len(answer):
        yield Part(exam.task, exam.item, ANSWER, answer[:PIECE])


def _digest(parts: Sequence[Part], task: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if part.task == task:
            digest.update(json.dumps([part.item, part.kind, len(part.words)]).encode())
            digest.update(part.words.astype("<u8").tobytes())
    return digest.hexdigest()


class Weights:
    """What each word of each part weighs, and the n-grams that lead to it.

    weight[k]: float64 of part k's words; seeds: uint64[s] hashes; postings (part, position) of seed
    i are places[bounds[i]:bounds[i + 1]], int64[., 2].
    """

    def __init__(self, index: Index, engine: str = "numba") -> None:
        words = _joined(index.parts)
        owner_number = {owner: i for i, owner in enumerate(index.owners)}
        owners = np.array([owner_number[part.owner] for part in index.parts])
        lengths = np.diff(words.starts)
        owner_of_word = np.repeat(owners, lengths)
        count = len(owner_number)
        grams = ngram_hashes(words, SEED, engine)
        limit = max(TEMPLATE_ITEMS, TEMPLATE_SHARE * count)
        template = (grams != 0) & (_items_with(grams, owner_of_word) > limit)
        lead = (grams != 0) & ~template
        idf = np.log1p(count / _items_with(words.hash, owner_of_word))
        idf[_only_templates(template, lead)] = 0.0
        self.weight = np.split(idf, words.starts[1:-1])
        self._post(grams, lead, words.starts)

    def _post(self, grams: np.ndarray, lead: np.ndarray, starts: np.ndarray) -> None:
        at = np.flatnonzero(lead)
        at = at[np.argsort(grams[at], kind="stable")]
        self.seeds, first = np.unique(grams[at], return_index=True)
        self.bounds = np.append(first, len(at))
        part = np.searchsorted(starts, at, side="right") - 1
        self.places = np.stack((part, at - starts[part]), axis=1)


def _joined(parts: Sequence[Part]) -> Words:
    hashes = np.concatenate([np.empty(0, np.uint64), *(part.words for part in parts)])
    starts = np.concatenate(([0], np.cumsum([len(part.words) for part in parts])))
    nothing = np.zeros(len(hashes), np.int64)
    return Words(hashes, nothing, nothing, starts.astype(np.int64))


def _items_with(values: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """int64[w]: in how many items the value of each place stands."""
    _, number = np.unique(values, return_inverse=True)
    pairs = np.unique(np.stack((number, owner), axis=1), axis=0)
    return np.bincount(pairs[:, 0], minlength=number.max(initial=-1) + 1)[number]


def _only_templates(template: np.ndarray, lead: np.ndarray) -> np.ndarray:
    """bool[w]: covered by an n-gram that is a template, and by none that leads."""

    def covered(starts: np.ndarray) -> np.ndarray:
        change = np.zeros(len(starts) + SEED, np.int64)
        np.add.at(change, np.flatnonzero(starts), 1)
        np.add.at(change, np.flatnonzero(starts) + SEED, -1)
        return np.cumsum(change)[: len(starts)] > 0

    return covered(template) & ~covered(lead)
