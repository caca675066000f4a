"""Documents with planted duplicates, for the tests of dedup."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

VOCABULARY = [f"word{i}" for i in range(3000)]


def make_texts(source: random.Random, count: int, copies: int) -> tuple[list[str], list[int]]:
    """(texts, the original of each): originals, then edited copies, shuffled together."""
    originals = [source.choices(VOCABULARY, k=source.randrange(60, 160)) for _ in range(count)]
    rows = [(words, i) for i, words in enumerate(originals)]
    for _ in range(copies):
        i = source.randrange(count)
        words = list(originals[i])
        for _ in range(source.choice([0, 0, 1, 1, 2, 5])):
            words[source.randrange(len(words))] = source.choice(VOCABULARY)
        rows.append((words, i))
    source.shuffle(rows)
    return [" ".join(words) for words, _ in rows], [i for _, i in rows]


def write(path: Path, texts: list[str], parts: int = 1, **columns: list) -> list[str]:
    """Documents with ids d0, d1, … over `parts` Parquet files; returns their paths."""
    table = pa.table({"id": [f"d{i}" for i in range(len(texts))], "text": texts, **columns})
    size = -(-max(len(texts), 1) // parts)
    paths = []
    for part in range(parts):
        paths.append(str(path / f"in{part}.parquet"))
        pq.write_table(table.slice(part * size, size), paths[-1], row_group_size=37)
    return paths
