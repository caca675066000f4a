"""Recall of planted benchmark items at five levels of paraphrase, false positives, speed.

    OMP_NUM_THREADS=1 python tests/bench/bench_decontaminate.py DATA [--items 300]

DATA holds eval/enem/2022.json, eval/gsm8k/test.jsonl, text/*/*.txt and saved pages. Items (question
and options as one text) are planted, one a document, into 3,000-character pieces of the books and
pages; a document counts as found when its own item is. Beside it stands the plain rule of 13 equal
words (Brown et al. 2020, appendix C), in Python sets over the same words. The clean corpus is the
same pieces with nothing planted. Edits take words from the pieces themselves.
"""

import argparse
import gzip
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from sabia.core.text.contamination.benchmark_index import BenchmarkItem, Index, words_of
from sabia.core.text.contamination.matching import ITEM, Finder, Finding
from sabia.kernels.minhash.definitions import ENGINES

PIECE = 3000
Change = Callable[[random.Random, str, Sequence[str]], str]


def exams(data: Path) -> list[BenchmarkItem]:
    """The text-only items of ENEM 2022 and the test items of GSM8K."""
    made = []
    for row in json.loads((data / "eval/enem/2022.json").read_text()):
        if not row.get("IU"):
            options = tuple(re.sub(r"^[A-E] +", "", option) for option in row["alternatives"])
            made.append(BenchmarkItem("enem", row["id"], row["question"], options))
    lines = (data / "eval/gsm8k/test.jsonl").read_text().splitlines()
    for number, row in enumerate(map(json.loads, lines)):
        made.append(BenchmarkItem("gsm8k", str(number), row["question"], (), row["answer"]))
    return made


def pieces(data: Path) -> list[str]:
    """Books in pieces, and the visible words of saved pages."""
    found: list[str] = []
    for path in sorted(data.glob("text/*/*.txt")):
        text = path.read_text()
        found += [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    for path in sorted(data.glob("web/article-extraction/html/*.gz")):
        html = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
        bare = re.sub(r"(?s)<(script|style).*?</\1>|<[^>]*>", " ", html)
        text = " ".join(bare.split())
        found += [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
    return found


def edited(rng: random.Random, text: str, share: float, words: Sequence[str]) -> str:
    """A share of the words: 40 % replaced, 30 % left out, 30 % with a new one behind."""
    result: list[str] = []
    for word in text.split():
        kind = rng.random() / share
        if kind >= 0.7 or kind < 0.4:
            result.append(rng.choice(words) if kind < 0.4 else word)
        if 0.7 <= kind < 1:
            result.append(rng.choice(words))
    return " ".join(result)


def halves_moved(text: str) -> str:
    words = text.split()
    return " ".join(words[len(words) // 2 :] + words[: len(words) // 2])


LEVELS: dict[str, Change] = {
    "as it is": lambda rng, text, words: text,
    "marks left out, capitals": lambda rng, text, words: re.sub(r"[^\w\s]", "", text).upper(),
    "10 % of the words edited": lambda rng, text, words: edited(rng, text, 0.1, words),
    "20 % edited, halves changed places": lambda rng, text, words: halves_moved(
        edited(rng, text, 0.2, words)
    ),
    "35 % edited": lambda rng, text, words: edited(rng, text, 0.35, words),
}


def search(finder: Finder, texts: Sequence[str]) -> dict[int, list[Finding]]:
    encoded = [text.encode("utf-8", "replace") for text in texts]
    offsets = np.cumsum([0] + [len(one) for one in encoded]).astype(np.int64)
    return finder.find(np.frombuffer(b"".join(encoded), np.uint8), offsets)


def ngrams(words: np.ndarray, n: int) -> Iterator[tuple[int, ...]]:
    return zip(*(words[i:].tolist() for i in range(n)), strict=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--items", type=int, default=300)
    given = parser.parse_args()
    rng = random.Random(0)
    everyone, documents = exams(given.data), pieces(given.data)
    words = [word for text in documents[::7] for word in text.split()]
    finder = Finder(Index.build(everyone), engine=ENGINES[0])
    search(finder, documents[:5])  # compile
    started = time.process_time()
    clean = search(finder, documents)
    spent = time.process_time() - started
    size = sum(len(text.encode()) for text in documents) / 1e6
    print(f"{len(everyone)} items; clean: {len(documents)} documents, {size:.1f} MB,"
          f" {len(clean)} with findings, {size / spent:.0f} MB a CPU second")  # fmt: skip
    for row, findings in clean.items():
        print("  false:", documents[row][:80], [f.as_dict() for f in findings])
    asked = words_of([" ".join((exam.question, *exam.options)) for exam in everyone])
    grams = {gram for item in asked for gram in ngrams(item, 13)}
    false = sum(any(g in grams for g in ngrams(w, 13)) for w in words_of(documents))
    print(f"13-gram rule: {false} clean documents with findings")
    for task in ("enem", "gsm8k"):
        mine = [exam for exam in everyone if exam.task == task]
        mine = rng.sample(mine, min(given.items, len(mine)))
        for name, change in LEVELS.items():
            texts = []
            for exam in mine:
                around, at = rng.choice(documents), rng.randrange(PIECE)
                item = change(rng, " ".join((exam.question, *exam.options)), words)
                texts.append(f"{around[:at]}\n{item}\n{around[at:]}")
            found = search(finder, texts)
            right = [any(f.item == exam.item and f.level == ITEM for f in found.get(row, ()))
                     for row, exam in enumerate(mine)]  # fmt: skip
            plain = [any(g in grams for g in ngrams(w, 13)) for w in words_of(texts)]
            print(
                f"| {task} ({len(mine)}) | {name} | {np.mean(right):.3f} | {np.mean(plain):.3f} |"
            )


if __name__ == "__main__":
    main()
