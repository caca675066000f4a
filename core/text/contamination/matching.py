"""Where benchmark items stand in documents: seeds, clusters, alignment, evidence.

1. Seeds: every word 5-gram of a document is looked up in the index (templates are left out).
2. Clusters: seeds of one part that lie no further apart in the document than the part is long.
3. Alignment: the common subsequence of greatest IDF weight of part and surroundings, then of what
   that left over, while it finds much (sentences may have changed places). `overlap` is the share
   of the part's weight, `evidence` the weight in words of the rarest kind, `run` the longest
   stretch of equal words (an n-gram match, as in Brown et al. 2020, appendix C).
4. Verdict: an ITEM is a question with enough overlap and evidence; options and answer close by
   count as evidence for short questions. A RUN is a long stretch of any part, and no item.

Word edits, changed marks, case and accents, cut or added sentences leave an item recognisable;
a translation or a paraphrase that keeps no five words in a row does not.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sabia.core.text.contamination.benchmark_index import QUESTION, SEED, Index, Part, Weights
from sabia.kernels.word_spans.definitions import ALONE, Words
from sabia.kernels.word_spans.interface import Lookup, align, ngram_hashes, word_spans

ITEM, RUN = LEVELS = ("item", "run")
EVIDENCE = 6.0  # words of the rarest kind that an item must share
RUN_EVIDENCE = 4.0  # and a run
BESIDE = 0.8  # share of the options' and answer's weight that counts as standing by
GAP = 10  # other words inside a span in a row at most
ROUNDS = 4  # alignments of one part at most
MOVED = 0.15  # share of a part's weight that an alignment must add
NEAR_WORDS = 60  # options and answer stand at most so far from the question


@dataclass(frozen=True)
class Finding:
    """One part found in a document: bytes [begin, end) of its text, shares, and its level."""

    task: str
    item: str
    part: str
    level: str
    overlap: float
    run: int
    beside: float
    begin: int
    end: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON; shares have three places."""
        return asdict(self) | {"overlap": round(self.overlap, 3), "beside": round(self.beside, 3)}


@dataclass(frozen=True)
class _Cluster:
    """Seeds of one part in one document: word positions in both, int64[k] each."""

    part: int
    here: np.ndarray
    there: np.ndarray


class Finder:
    """Finds the items of an index.

    overlap: share of a question's weight that makes an item; run: equal words in a row that make
    a run (0: none). Safe to share between threads.
    """

    def __init__(
        self, index: Index, overlap: float = 0.6, run: int = 13, engine: str = "numba"
    ) -> None:
        self.index, self.overlap, self.run, self.engine = index, overlap, run, engine
        self.weights = Weights(index, engine)
        self.lookup = Lookup(self.weights.seeds, engine)
        self.unit = float(np.log1p(max(1, len(index.owners))))  # weight of the rarest word

    def find(self, data: np.ndarray, offsets: np.ndarray) -> dict[int, list[Finding]]:
        """Findings by number of the document; documents are data[offsets[i]:offsets[i + 1]]."""
        words = word_spans(data, offsets, self.engine)
        seed = self.lookup.find(ngram_hashes(words, SEED, self.engine))
        hits = np.flatnonzero(seed != ALONE)
        document = np.searchsorted(words.starts, hits, side="right") - 1
        found: dict[int, list[Finding]] = {}
        for mine in np.split(hits, np.flatnonzero(np.diff(document)) + 1) if len(hits) else ():
            number = int(np.searchsorted(words.starts, mine[0], side="right")) - 1
            text = _Text(words, number, int(offsets[number]))
            if findings := list(self._in_text(text, mine - text.first, seed[mine])):
                found[number] = findings
        return found

    def _in_text(self, text: "_Text", at: np.ndarray, seed: np.ndarray) -> Iterator[Finding]:
        for cluster in self._clusters(at, seed):
            if finding := self._judge(text, cluster):
                yield finding

    def _clusters(self, at: np.ndarray, seed: np.ndarray) -> Iterator[_Cluster]:
        """Seeds by part, cut where the document leaves the part."""
        low, high = self.weights.bounds[seed], self.weights.bounds[seed + 1]
        here = np.repeat(at, high - low)
        inside = np.arange(len(here)) - np.repeat(np.cumsum(high - low) - (high - low), high - low)
        part, there = self.weights.places[np.repeat(low, high - low) + inside].T
        for number in np.unique(part).tolist():
            mine = part == number
            x, y = here[mine], there[mine]
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
        self, text: "_Text", cluster: _Cluster, part: Part, weight: np.ndarray
    ) -> tuple[int, int, np.ndarray]:
        """(first word, word behind the last, matched words of the part) of the span."""
        length = len(part.words)
        slack = length // 4
        low = max(0, int((cluster.here - cluster.there).min()) - slack)
        high = int((cluster.here - cluster.there).max()) + length + slack
        low = max(low, int(cluster.here.min()) - 2 * length)
        high = min(high, int(cluster.here.max()) + SEED + 2 * length, len(text.hash))
        place = self._rounds(part.words, weight, text.hash[low:high])
        first, last = _dense(
            np.sort(place[place != ALONE]) + low,
            int(cluster.here.min()), int(cluster.here.max()) + SEED - 1,
        )  # fmt: skip
        inside = (place != ALONE) & (place + low >= first) & (place + low <= last)
        return first, last + 1, inside

    def _rounds(self, part: np.ndarray, weight: np.ndarray, window: np.ndarray) -> np.ndarray:
        """int64[p]: the place of each word of the part in the window, or ALONE."""
        part, window = part.copy(), window.copy()
        found = np.full(len(part), ALONE, np.int64)
        for _ in range(ROUNDS):
            place = align(part, weight, window, self.engine)
            new = place != ALONE
            if weight[new].sum() < MOVED * weight.sum():
                break
            found[new] = place[new]
            part[new], window[place[new]] = 0, 1  # hashes that no word has, and that differ
        return found

    def _beside(self, text: "_Text", part: Part, low: int, high: int) -> tuple[float, float]:
        """(share, weight) of the words of options and answer that stand near [low, high)."""
        others = [p for p in self.index.owners[part.owner] if p.kind != QUESTION]
        if part.kind != QUESTION or not others:
            return 0.0, 0.0
        words = np.unique(np.concatenate([p.words for p in others]))
        reach = NEAR_WORDS + sum(len(p.words) for p in others)
        near = np.concatenate(
            (text.hash[max(0, low - reach) : low], text.hash[high : high + reach])
        )
        weight = self._word_weight(part.owner, words)
        there = np.isin(words, near)
        total = float(weight.sum())
        return (float(weight[there].sum()) / total if total else 0.0), float(weight[there].sum())

    def _word_weight(self, owner: tuple[str, str], words: np.ndarray) -> np.ndarray:
        """float64 of distinct words of an item: the most that any of its parts gives them."""
        result = np.zeros(len(words))
        for number in self.index.numbers[owner]:
            place = np.searchsorted(words, self.index.parts[number].words)
            place = np.minimum(place, len(words) - 1)
            same = words[place] == self.index.parts[number].words
            np.maximum.at(result, place[same], self.weights.weight[number][same])
        return result


class _Text:
    """The words of one document among those of a batch; byte positions count from its start."""

    def __init__(self, words: Words, number: int, offset: int) -> None:
        self.first, self.last = (int(x) for x in words.starts[number : number + 2])
        self.hash = words.hash[self.first : self.last]
        self.words, self.offset = words, offset

    def bytes(self, low: int, high: int) -> tuple[int, int]:
        """The bytes of words low to high - 1."""
        begin = int(self.words.begin[self.first + low]) - self.offset
        return begin, int(self.words.end[self.first + high - 1]) - self.offset


def _dense(places: np.ndarray, first: int, last: int) -> tuple[int, int]:
    """Grow [first, last] over matched places that lie at most GAP words away, on both sides."""
    for place in places[places < first][::-1].tolist():
        if first - place > GAP + 1:
            break
        first = place
    for place in places[places > last].tolist():
        if place - last > GAP + 1:
            break
        last = place
    return first, last


def _longest_run(cluster: _Cluster, weight: np.ndarray) -> tuple[int, float]:
    """(words, weight) of the longest stretch in which part and document agree word for word."""
    shift = cluster.here - cluster.there
    order = np.lexsort((cluster.here, shift))
    shift, there = shift[order], cluster.there[order]
    broken = np.flatnonzero((np.diff(shift) != 0) | (np.diff(there) != 1)) + 1
    starts, ends = np.append(0, broken), np.append(broken, len(there))
    best = int(np.argmax(ends - starts))
    low, high = int(there[starts[best]]), int(there[ends[best] - 1]) + SEED
    return high - low, float(weight[low:high].sum())
