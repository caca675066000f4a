"""Rows that `sabia show` reads and samples, differences of texts, and lines of a terminal."""

import json
import random
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len

from sabia.core.errors import BadData, UsageError
from sabia.core.recipes.show.html import page_of
from sabia.core.recipes.show.parts import (
    ADDED,
    PLAIN,
    QUIET,
    REMOVED,
    difference,
    field,
    heading,
    spans,
    text,
    title,
    visible,
)
from sabia.core.recipes.show.reading import Where, rows_of, sample, sources_of
from sabia.core.recipes.show.terminal import lines_of
from sabia.core.shards.outputs import open_file

WORDS = ["alpha", "beta", "gamma", "delta", "number", "tree", "ünïcödé", "漢字", "🎉", "a\u0301"]


@pytest.mark.parametrize("form", ["parquet", "arrow", "jsonl"])
@pytest.mark.parametrize("where", ["", "number >= 1000"])
def test_a_sample_is_uniform_and_determined_by_its_seed(
    tmp_path: Path, form: str, where: str
) -> None:
    """Every row is drawn about as often as others, over many seeds."""
    total, folder = 0, tmp_path / "shards"
    folder.mkdir()
    for shard, count in enumerate((700, 1, 1300)):
        batch = pa.RecordBatch.from_pydict({"number": np.arange(total, total + count)})
        path = folder / f"part-{shard:05d}.{form}"
        if form == "parquet":
            pq.write_table(pa.Table.from_batches([batch]), path, row_group_size=77)
        else:
            with open_file(str(path), batch.schema, {}) as file:
                file.write(batch)
        total += count
    sources = [*sources_of([str(folder)])]
    drawn = Counter[int]()
    for seed in range(60):
        one = [row.values["number"] for chunk in sample(sources, Where(where), 40, seed)
               for row in chunk]  # fmt: skip
        assert len(one) == len(set(one)) == 40 and one == sorted(one)
        drawn.update(one)
    again = [
        row.values["number"] for chunk in sample(sources, Where(where), 40, 59) for row in chunk
    ]
    assert again == one
    low = 1000 if where else 0
    assert min(drawn) >= low
    quarters = np.histogram(list(drawn.elements()), 4, (low, total))[0]
    assert quarters.min() > 600 * 0.8 and quarters.max() < 600 * 1.2
    everything = [r.values["number"] for c in sample(sources, Where(where), 9999, 0) for r in c]
    assert everything == list(range(low, total))
    numbers = [
        (row.source.name, row.number) for c in sample(sources, Where(where), 9999, 0) for row in c
    ]
    assert numbers == [
        (r.source.name, r.number) for s in sources for c in rows_of(s, Where(where)) for r in c
    ]


def test_only_row_groups_with_shown_rows_are_read(tmp_path: Path) -> None:
    draw = random.Random(0)
    table = pa.Table.from_pylist(
        [{"id": str(n), "text": draw.randbytes(3000).hex()} for n in range(3000)]
    )
    path = tmp_path / "big.parquet"
    pq.write_table(table, path, row_group_size=100)
    assert path.stat().st_size > 10 << 20
    for where, count in (("", 0), ("id == '2950'", 0), ("", 2)):
        (source,) = sources_of([str(path)])
        before = _read_bytes()
        if count:
            assert sum(map(len, sample([source], Where(where), count, 0))) == count
        else:
            assert next(rows_of(source, Where(where)))
        assert _read_bytes() - before < 3 << 20


def _read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def test_texts_are_restored_from_their_difference() -> None:
    draw = random.Random(0)
    for _ in range(300):
        old = [draw.choice([*WORDS, " ", "\n", ".", "_"]) for _ in range(draw.randrange(60))]
        new = [w for w in old if draw.random() < 0.9]
        for _ in range(draw.randrange(4)):
            new.insert(draw.randrange(len(new) + 1), draw.choice(WORDS))
        before, after = "".join(old), "".join(new)
        changes = difference(before, after)
        if before == after:
            assert changes == [(QUIET, "the same text")]
            continue
        if any(style == QUIET for style, _ in changes):
            continue
        assert "".join(w for s, w in changes if s in (PLAIN, REMOVED)) == before
        assert "".join(w for s, w in changes if s in (PLAIN, ADDED)) == after


def test_text_cannot_act_on_a_terminal() -> None:
    """Lines of any width hold all visible characters of a text, and none that acts."""
    draw = random.Random(0)
    letters = [
        *"ab .-",
        "漢",
        "🎉",
        "e\u0301",
        "\n",
        "\t",
        "\x1b",
        "\x9b",
        "\u202e",
        "\ud83d",
        "\x00",
    ]
    for width in (20, 33, 80):
        for _ in range(15):
            words = "".join(draw.choice(letters) * draw.randrange(1, 9) for _ in range(80))
            styles = [(draw.choice([PLAIN, REMOVED, "trained", "masked"]), words[n : n + 50])
                      for n in range(0, len(words), 50)]  # fmt: skip
            parts = [title(words[:200], words[:100]), field(words[:50], words), heading(words),
                     spans(styles), text(words, 100)]  # fmt: skip
            lines = [*lines_of(parts, width, False)]
            assert max(map(cell_len, lines)) <= width
            whole = "".join(lines)
            assert visible(whole) == whole
            plain = "".join(lines_of([text(words)], width, False))
            assert [c for c in plain if not c.isspace()] == [
                c for c in visible(words) if not c.isspace()
            ]
            styled = "".join(lines_of(parts, width, True))
            assert re.sub(r"\x1b\[\d+m", "", styled).replace(" ", "") == whole.replace(" ", "")
            ElementTree.fromstring(page_of(parts, words, words).removeprefix("<!DOCTYPE html>"))


def test_a_name_that_only_some_rows_have(tmp_path: Path) -> None:
    lines = [{"id": n, **({"late": n} if n > 500 else {"early": 1})} for n in range(600)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (source,) = sources_of([str(path)])
    found = [row.number for chunk in rows_of(source, Where("early == 1")) for row in chunk]
    assert found == list(range(501))
    with pytest.raises(UsageError, match="'late' is neither"):
        next(rows_of(source, Where("late > 1")))


@pytest.mark.parametrize("form", ["parquet", "arrow", "jsonl"])
def test_columns_of_folders_and_the_column_of_texts(tmp_path: Path, form: str) -> None:
    folder = tmp_path / "language=pt"
    folder.mkdir()
    batch = pa.RecordBatch.from_pydict({"body": ["um", "dois"], "n": [1, 2]})
    with open_file(str(folder / f"rows.{form}"), batch.schema, {}) as file:
        file.write(batch)
    (source,) = sources_of([str(tmp_path)], "body")
    expected = [{"language": "pt", "text": "dois", "n": 2}]
    for where in ("language == 'pt' and n == 2", "'dois' in text", "len(text) > n + 1"):
        matching = [row.values for chunk in rows_of(source, Where(where)) for row in chunk]
        assert matching == expected
        drawn = [row.values for chunk in sample([source], Where(where), 9, 0) for row in chunk]
        assert drawn == expected
    if form != "jsonl":
        with pytest.raises(BadData, match="no column 'none'"):
            next(sources_of([str(tmp_path)], "none"))
    else:
        (source,) = sources_of([str(tmp_path)], "none")
        (chunk,) = rows_of(source, Where(""))
        assert [row.values["reason"] for row in chunk] == ["no none in the row"] * 2
