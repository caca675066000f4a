"""Find benchmark items in documents: seeds, clusters, alignment, decision.

1. Seeds: look up every word 5-gram of a document in the index (which leaves templates out).
2. Clusters: group the seeds of one part that are at most the length of the part apart.
3. Alignment: the common subsequence of part and document with the greatest IDF weight; repeated on
   the remaining words while it adds much (sentences may be in another order). `overlap` is the
   share of the part's weight that matches, `evidence` the matching weight in units of the rarest
   word, `run` the longest sequence of equal words (an n-gram match as in Brown et al. 2020,
   appendix C).
4. Decision: an ITEM is a question with enough overlap and evidence; options and answer near it
   count as evidence too. A RUN is a long sequence of equal words of any part that is no ITEM.

Items are still found after edits of words, punctuation, case and accents, and with cut or added
sentences; a translation or a paraphrase without five equal words in a row is not found.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np

from sabia.core.text.contamination.benchmark_index import (
    QUESTION,
    SEED,
    Index,
    ItemPart,
    WordWeights,
)
from sabia.kernels.word_spans.definitions import ALONE, Words
from sabia.kernels.word_spans.interface import Lookup, align, ngram_hashes, word_spans

ITEM, RUN = LEVELS = ("item", "run")
EVIDENCE = 6.0  # least matching weight of an item, in units of the rarest word
RUN_EVIDENCE = 4.0  # the same for a run
BESIDE = 0.8  # share of the options' and answer's weight from which they count as near
GAP = 10  # consecutive words inside a span that do not match, at most
ROUNDS = 4  # alignments of one part, at most
MOVED = 0.15  # share of a part's weight that an alignment must add
NEAR_WORDS = 60  # distance of options and answer from the question, at most


@dataclass(frozen=True)
class Finding:
    """A match of one part in a document: its level, and bytes [begin, end) of the text."""

    task: str
    item: str
    part: str
    level: str
    overlap: float
    run: int
    beside: float
    begin: int
    end: int

    def as_dict(self) -> dict[str, object]:
        """For JSON; shares are rounded to three decimals."""
        return asdict(self) | {"overlap": round(self.overlap, 3), "beside": round(self.beside, 3)}


@dataclass(frozen=True)
class _Cluster:
    """Seeds of one part in one document: word positions in document and part, int64[k] each."""

    part: int
    in_document: np.ndarray
    in_part: np.ndarray


class Finder:
    """Finds the items of an index in documents; safe to share between threads.

    overlap: least share of a question's weight for an ITEM; run: least number of equal words in a
    row for a RUN (0: no runs).
    """

    def __init__(
        self, index: Index, overlap: float = 0.6, run: int = 13, engine: str = "numba"
    ) -> None:
        self.index, self.overlap, self.run, self.engine = index, overlap, run, engine
        self.weights = WordWeights(index, engine)
        self.lookup = Lookup(self.weights.seeds, engine)
        self.unit = float(np.log1p(max(1, len(index.owners))))  # weight of the rarest word

    def find(self, data: np.ndarray, offsets: np.ndarray) -> dict[int, list[Finding]]:
        """Findings by index of the document; documents are data[offsets[i]:offsets[i + 1]]."""
        words = word_spans(data, offsets, self.engine)
        seed = self.lookup.find(ngram_hashes(words, SEED, self.engine))
        hits = np.flatnonzero(seed != ALONE)
        document = np.searchsorted(words.starts, hits, side="right") - 1
        findings: dict[int, list[Finding]] = {}
        for mine in np.split(hits, np.flatnonzero(np.diff(document)) + 1) if len(hits) else ():
            number = int(np.searchsorted(words.starts, mine[0], side="right")) - 1
            text = _Text(words, number, int(offsets[number]))
            clusters = self._clusters(mine - text.first, seed[mine])
            matches = [self._judge(text, cluster) for cluster in clusters]
            if any(matches):
                findings[number] = [match for match in matches if match]
        return findings

    def _clusters(self, position: np.ndarray, seed: np.ndarray) -> Iterator[_Cluster]:
        """Seeds by part, cut where they are further apart than the part is long."""
        low, count = self.weights.bounds[seed], np.diff(self.weights.bounds)[seed]
        in_document = np.repeat(position, count)
        first = np.repeat(low - np.cumsum(count) + count, count)
        part, in_part = self.weights.postings[first + np.arange(len(in_document))].T
        for number in np.unique(part).tolist():
            mine = part == number
            x, y = in_document[mine], in_part[mine]
            length = len(self.index.parts[number].words)
            block = (x - x[0]) // (2 * length + SEED)
            cuts = np.flatnonzero((np.diff(x) > length + SEED) | (np.diff(block) > 0)) + 1
            for a, b in zip(np.split(x, cuts), np.split(y, cuts), strict=True):
                yield _Cluster(number, a, b)

    def _judge(self, text: "_Text", cluster: _Cluster) -> Finding | None:
        part, weight = self.index.parts[cluster.part], self.weights.weight[cluster.part]
        total = float(weight.sum())
        if total <= 0:
            return None
        low, high, matched = self._align(text, cluster, part, weight)
        shared = float(weight[matched].sum())
        run, run_weight = _longest_run(cluster, weight)
        beside, extra = self._beside(text, part, low, high)
        enough = shared + (extra if beside >= BESIDE else 0.0) >= EVIDENCE * self.unit
        if part.kind == QUESTION and shared / total >= self.overlap and enough:
            level = ITEM
        elif self.run and run >= self.run and run_weight >= RUN_EVIDENCE * self.unit:
            level = RUN
        else:
            return None
        begin, end = text.bytes(low, high)
        return Finding(
            part.task, part.item, part.kind, level, shared / total, run, beside, begin, end
        )

    def _align(
        self, text: "_Text", cluster: _Cluster, part: ItemPart, weight: np.ndarray
    ) -> tuple[int, int, np.ndarray]:
        """(first word, end, bool[p]: matched words of the part) of the span [first, end)."""
        length = len(part.words)
        slack = length // 4
        low = max(0, int((cluster.in_document - cluster.in_part).min()) - slack)
        high = int((cluster.in_document - cluster.in_part).max()) + length + slack
        low = max(low, int(cluster.in_document.min()) - 2 * length)
        high = min(high, int(cluster.in_document.max()) + SEED + 2 * length, len(text.hash))
        position = self._rounds(part.words, weight, text.hash[low:high])
        first, last = _extend(
            np.sort(position[position != ALONE]) + low,
            int(cluster.in_document.min()), int(cluster.in_document.max()) + SEED - 1,
        )  # fmt: skip
        inside = (position != ALONE) & (position + low >= first) & (position + low <= last)
        return first, last + 1, inside

    def _rounds(self, part: np.ndarray, weight: np.ndarray, window: np.ndarray) -> np.ndarray:
        """int64[p]: the position of each word of the part in the window, or ALONE."""
        part, window = part.copy(), window.copy()
        positions = np.full(len(part), ALONE, np.int64)
        for _ in range(ROUNDS):
            aligned = align(part, weight, window, self.engine)
            new = aligned != ALONE
            if weight[new].sum() < MOVED * weight.sum():
                break
            positions[new] = aligned[new]
            part[new], window[aligned[new]] = 0, 1  # two different hashes that no word has
        return positions

    def _beside(self, text: "_Text", part: ItemPart, low: int, high: int) -> tuple[float, float]:
        """(share, weight) of the words of options and answer that are near [low, high)."""
        others = [p for p in self.index.owners[part.owner] if p.kind != QUESTION]
        if part.kind != QUESTION or not others:
            return 0.0, 0.0
        words = np.unique(np.concatenate([p.words for p in others]))
        reach = NEAR_WORDS + sum(len(p.words) for p in others)
        near = np.concatenate(
            (text.hash[max(0, low - reach) : low], text.hash[high : high + reach])
        )
        weight = self._word_weight(part.owner, words)
        total, present = float(weight.sum()), float(weight[np.isin(words, near)].sum())
        return (present / total if total else 0.0), present

    def _word_weight(self, owner: tuple[str, str], words: np.ndarray) -> np.ndarray:
        """float64 of distinct words of an item: the highest weight that any of its parts gives."""
        highest = np.zeros(len(words))
        for number in self.index.numbers[owner]:
            index = np.searchsorted(words, self.index.parts[number].words)
            index = np.minimum(index, len(words) - 1)
            same = words[index] == self.index.parts[number].words
            np.maximum.at(highest, index[same], self.weights.weight[number][same])
        return highest


class _Text:
    """The words of one document of a batch; byte positions count from the document's start."""

    def __init__(self, words: Words, number: int, offset: int) -> None:
        self.first, self.last = (int(x) for x in words.starts[number : number + 2])
        self.hash = words.hash[self.first : self.last]
        self.words, self.offset = words, offset

    def bytes(self, low: int, high: int) -> tuple[int, int]:
        """The bytes of words low to high - 1."""
        begin = int(self.words.begin[self.first + low]) - self.offset
        return begin, int(self.words.end[self.first + high - 1]) - self.offset


def _extend(matched: np.ndarray, first: int, last: int) -> tuple[int, int]:
    """Extend [first, last] on both sides by matched positions at most GAP words away."""
    for position in matched[matched < first][::-1].tolist():
        if first - position > GAP + 1:
            break
        first = position
    for position in matched[matched > last].tolist():
        if position - last > GAP + 1:
            break
        last = position
    return first, last


def _longest_run(cluster: _Cluster, weight: np.ndarray) -> tuple[int, float]:
    """(words, weight) of the longest sequence of words that part and document share."""
    shift = cluster.in_document - cluster.in_part
    order = np.lexsort((cluster.in_document, shift))
    shift, in_part = shift[order], cluster.in_part[order]
    breaks = np.flatnonzero((np.diff(shift) != 0) | (np.diff(in_part) != 1)) + 1
    starts, ends = np.append(0, breaks), np.append(breaks, len(in_part))
    best = int(np.argmax(ends - starts))
    low, high = int(in_part[starts[best]]), int(in_part[ends[best] - 1]) + SEED
    return high - low, float(weight[low:high].sum())
