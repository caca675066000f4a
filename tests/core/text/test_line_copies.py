"""Lines, paragraphs and sentences that occur before, against dictionaries in plain Python."""

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import stage
from naive_cuts import expected, folded, lines_of, paragraphs_of, sentences_of

from sabia.core.errors import UsageError
from sabia.core.text.dedup import piece_bounds


def write(path: Path, texts: list[str], parts: int = 1) -> list[str]:
    table = pa.table({"id": [f"d{i}" for i in range(len(texts))], "text": texts})
    size, paths = -(-max(len(texts), 1) // parts), []
    for part in range(parts):
        paths.append(str(path / f"in{part}.parquet"))
        pq.write_table(table.slice(part * size, size), paths[-1], row_group_size=7)
    return paths


def run(
    paths: list[str], out: Path, jobs: int = 1, mem: int = 1 << 30, **options
) -> dict[str, dict]:
    options = {"method": "line", "engine": "numpy"} | options
    stage("dedup", {"mem": mem}, inputs=paths, out=out, jobs=jobs, **options)
    return {row["id"]: row for row in pq.read_table(out).to_pylist()}


LINES = [
    "Home",
    "  home ",
    "HÔME",
    "Login | Register",
    "a b c d",
    "",
    " ",
    "\t",
    "----",
    "}",
    "日本語",
    "x",
]


def make_texts(source: random.Random, count: int = 60) -> list[str]:
    texts = [
        source.choice(["\n", "\n\n"]).join(source.choices(LINES, k=source.randrange(9)))
        for _ in range(count)
    ]
    unique = (f"\nonly {i} here" * (source.random() < 0.7) for i in range(count))
    ends = ("\n" * source.randrange(3) for _ in range(count))
    return [text + own + end for text, own, end in zip(texts, unique, ends, strict=True)]


@pytest.mark.parametrize("unit", ["line", "paragraph"])
@pytest.mark.parametrize(("min_copies", "min_words"), [(2, 1), (4, 0), (2, 2)])
def test_lines_and_paragraphs_are_those_of_a_dictionary(
    tmp_path: Path, unit: str, min_copies: int, min_words: int
) -> None:
    texts = make_texts(random.Random(f"{unit}{min_copies}"))
    cut = {"line": lines_of, "paragraph": paragraphs_of}[unit]
    pieces = [cut(text) for text in texts]
    assert ["".join(piece) for piece in pieces] == texts
    left = expected(pieces, 1, min_copies, min_words)
    kept = run(write(tmp_path, texts, 3), tmp_path / "o.parquet", unit=unit,
               min_copies=min_copies, min_words=min_words)  # fmt: skip
    for i, text in enumerate(texts):
        if left[i].strip() or left[i] == text:
            assert kept[f"d{i}"]["text"] == left[i]
        else:
            assert f"d{i}" not in kept
    assert sum(map(len, left)) < 0.98 * sum(map(len, texts))


@pytest.mark.parametrize("unit", ["line", "paragraph"])
def test_copies_of_neighbours_are_cut_from_each(tmp_path: Path, unit: str) -> None:
    """Documents in one order twice: the copies of one end where those of the next begin."""
    gap = "\n" if unit == "line" else "\n\n"
    once = [f"é number {i} {'x' * (i % 7)}{gap}second {i}{gap}" for i in range(200)]
    texts = once + [text + f"own {i}\n" * (i % 3 == 2) for i, text in enumerate(once)]
    split = lines_of if unit == "line" else paragraphs_of
    wanted = expected([split(text) for text in texts], 1, 2, 1)
    got = run(write(tmp_path, texts, 2), tmp_path / "o.parquet", unit=unit)
    for i, text in enumerate(wanted):
        assert (got[f"d{i}"]["text"] if f"d{i}" in got else "") == text


def test_three_sentences(tmp_path: Path) -> None:
    source = random.Random(9)
    stock = [f"This is sentence number {i} of ação." for i in range(4)]
    texts = [" ".join(source.choices(stock, k=source.randrange(9))) for _ in range(80)]
    texts[5] += "\nA line.\n\nAnother one.  "
    pieces = [sentences_of(text) for text in texts]
    left = expected(pieces, 3, 2, 1)
    kept = run(write(tmp_path, texts), tmp_path / "o.parquet", unit="sentences")
    for i, text in enumerate(texts):
        assert (f"d{i}" in kept) == bool(left[i].strip() or left[i] == text)
        assert kept.get(f"d{i}", {"text": left[i]})["text"] == left[i]
    assert sum(map(len, left)) < 0.9 * sum(map(len, texts))


def test_bounds_cover_the_text(tmp_path: Path) -> None:
    texts = [*make_texts(random.Random(1)), "", "é.\n\nÉ! 日本 x. Y", "\n", "\r\n\r\na"]
    column = pa.array(texts)
    for bounds in piece_bounds.BOUNDS.values():
        whole, part = bounds(column), bounds(column.slice(7, 20))
        assert whole[0] == 0 and whole[-1] == sum(len(text.encode()) for text in texts)
        assert set(part.tolist()) <= set(whole.tolist())


def test_removed_lines_and_the_answer_for_any_workers(tmp_path: Path) -> None:
    texts = make_texts(random.Random(2), 200)
    one = run(write(tmp_path, texts), tmp_path / "a.parquet", removed=str(tmp_path / "ra.parquet"))
    gone = pq.read_table(tmp_path / "ra.parquet").to_pylist()
    (tmp_path / "many").mkdir()
    many = run(write(tmp_path / "many", texts, 4), tmp_path / "b.parquet", jobs=2, mem=1000,
               removed=str(tmp_path / "rb.parquet"))  # fmt: skip
    assert one == many and pq.read_table(tmp_path / "rb.parquet").to_pylist() == gone
    assert {row["reason"] for row in gone} == {"line", "line document"}
    for row in gone:
        raw = texts[int(row["id"][1:])].encode()
        assert raw[row["start"] : row["start"] + row["length"]] == row["text"].encode()
        if row["reason"] == "line":
            kept = texts[int(row["kept_id"][1:])].encode()[row["kept_start"] :].decode()
            assert folded(lines_of(kept)[0]) == folded(lines_of(row["text"])[0])


def test_odd_options_and_no_rows(tmp_path: Path) -> None:
    paths = write(tmp_path, [])
    assert run(paths, tmp_path / "o.parquet") == {}
    for wrong in ({"unit": "word"}, {"min_copies": 1}, {"min_words": -1}, {"action": "mask"}):
        with pytest.raises(UsageError):
            run(paths, tmp_path / "w.parquet", **wrong)
