"""Spans that occur before: cut exactly where an oracle says, whatever the shards and workers."""

import random
import sysconfig
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import stage

from sabia.core.errors import UsageError
from sabia.core.text.dedup import substring_method
from sabia.core.text.dedup.repeated_spans import HashPartitions, group_by_value
from sabia.core.text.tokenize.tokenizer import Tokenizer
from sabia.core.text.tokenize.tokenizer_training import train_bpe
from sabia.kernels.runtime.dispatch import numba_available

ENGINES = ["numpy", "numba"] if numba_available() else ["numpy"]


def suffix_array(units: np.ndarray) -> np.ndarray:
    """By doubling (Manber and Myers 1993): sort by the first 1, 2, 4, … units."""
    rank = np.unique(units, return_inverse=True)[1].astype(np.int64)
    width = 1
    while True:
        ahead = np.full(len(rank), -1)
        ahead[: len(rank) - width] = rank[width:]
        order = np.lexsort((ahead, rank))
        fresh = (np.diff(rank[order]) != 0) | (np.diff(ahead[order]) != 0)
        rank = np.empty_like(rank)
        rank[order] = np.concatenate(([0], np.cumsum(fresh)))
        if rank.max() == len(rank) - 1:
            return order
        width *= 2


def covered(order: np.ndarray, units: np.ndarray, starts: np.ndarray, span: int) -> np.ndarray:
    """bool[n]: units in a window whose first equal window ends before it, by a suffix array.

    Suffixes that begin with the same window lie side by side: neighbours of which `span` units
    agree (here compared unit by unit), leaving out windows that cross the end of a document.
    """
    ends = starts[np.searchsorted(starts, np.arange(len(units)), side="right")]
    order = order[order + span <= ends[order]]
    same = np.ones(max(len(order) - 1, 0), bool)
    for step in range(span):
        same &= units[order[1:] + step] == units[order[:-1] + step]
    group = np.concatenate(([0], np.cumsum(~same)))
    first = np.full(len(order), len(units))
    np.minimum.at(first, group, order)
    repeats = order[first[group] + span <= order]
    steps = np.zeros(len(units) + 1, np.int64)
    np.add.at(steps, repeats, 1)
    np.add.at(steps, repeats + span, -1)
    return np.cumsum(steps)[:-1] > 0


def oracle(texts: list[str], span: int) -> list[str]:
    """The texts without the whole characters among covered bytes."""
    units = np.frombuffer("".join(texts).encode(), np.uint8)
    starts = np.cumsum([0, *(len(text.encode()) for text in texts)])
    gone = covered(suffix_array(units), units, starts, span)
    left, at = [], 0
    for text in texts:
        kept = ""
        for character in text:
            size = len(character.encode())
            kept += "" if gone[at : at + size].all() else character
            at += size
        left.append(kept)
    return left


def make_texts(source: random.Random, letters: str, count: int = 40) -> list[str]:
    texts: list[str] = []
    for _ in range(count):
        text = "".join(source.choices(letters, k=source.randrange(0, 120)))
        if texts and source.random() < 0.5:
            other = source.choice(texts)
            low = source.randrange(len(other) + 1)
            text += other[low : low + source.randrange(90)] + source.choice(letters)
        texts.append(text * source.choice([1, 1, 1, 1, 4]))
    return texts


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
    options = {"method": "substring", "engine": ENGINES[-1]} | options
    stage("dedup", {"mem": mem}, inputs=paths, out=out, jobs=jobs, **options)
    return {row["id"]: row for row in pq.read_table(out).to_pylist()}


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_cut_is_what_a_suffix_array_says(tmp_path: Path, engine: str) -> None:
    source, cut = random.Random(2), 0
    for round_, letters in enumerate(("ab", "abcdefgh ", "açã日本👍 x", "abc\n日")):
        texts, span = make_texts(source, letters), (11, 16, 20, 25)[round_]
        expected = {f"d{i}": left for i, left in enumerate(oracle(texts, span)) if left.strip()}
        empty = {f"d{i}" for i, text in enumerate(texts) if not text.strip()}
        kept = run(write(tmp_path, texts, 3), tmp_path / f"{round_}.parquet", span=span,
                   engine=engine)  # fmt: skip
        assert {name: row["text"] for name, row in kept.items() if name not in empty} == expected
        cut += sum(map(len, texts)) - sum(map(len, expected.values()))
    assert cut > 3000


def test_removed_spans_name_the_copy_that_stays(tmp_path: Path) -> None:
    texts = make_texts(random.Random(3), "abcd ãé")
    kept = run(write(tmp_path, texts, 2), tmp_path / "o.parquet", span=14,
               removed=str(tmp_path / "r.parquet"))  # fmt: skip
    rows = pq.read_table(tmp_path / "r.parquet").to_pylist()
    whole = [row for row in rows if row["reason"] == "substring document"]
    spans = [row for row in rows if row["reason"] == "substring"]
    assert len(spans) > 20 and len(whole) + len(kept) == len(texts)
    raw = {f"d{i}": text.encode() for i, text in enumerate(texts)}
    for row in spans:
        text = raw[row["id"]][row["start"] : row["start"] + row["length"]]
        copy = raw[row["kept_id"]][row["kept_start"] :][: row["length"]]
        assert text == copy == row["text"].encode()
        assert (int(row["kept_id"][1:]), row["kept_start"]) < (int(row["id"][1:]), row["start"])
    for row in whole:
        assert row["text"] == texts[int(row["id"][1:])] and row["kept_id"] is None
    for name, row in kept.items():
        parts = sorted((s["start"], s["start"] + s["length"]) for s in spans if s["id"] == name)
        assert all(a[1] <= b[0] for a, b in pairwise(parts))
        ends = [0, *(edge for part in parts for edge in part), len(raw[name])]
        left = b"".join(raw[name][ends[i] : ends[i + 1]] for i in range(0, len(ends), 2))
        assert left.decode() == row["text"]


def test_the_answer_does_not_depend_on_workers_shards_engine_or_memory(tmp_path: Path) -> None:
    texts = make_texts(random.Random(4), "abcdef", 150)
    paths = write(tmp_path, texts, 4)
    first = run(paths, tmp_path / "a.parquet", span=12, removed=str(tmp_path / "ra.parquet"))
    gone = pq.read_table(tmp_path / "ra.parquet").to_pylist()
    (tmp_path / "one").mkdir()
    one = write(tmp_path / "one", texts)
    for number, (where, jobs, mem, engine) in enumerate(
        [(one, 1, 1, ENGINES[-1]), (paths, 2, 1 << 30, ENGINES[0]), (one, 7, 9999, ENGINES[-1])]
    ):
        out, removed = tmp_path / f"{number}.parquet", tmp_path / f"r{number}.parquet"
        assert first == run(where, out, jobs, span=12, mem=mem, engine=engine,
                            removed=str(removed))  # fmt: skip
        assert pq.read_table(removed).to_pylist() == gone


def test_little_memory_needs_few_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass takes memory too: a table is never split into parts under a MiB."""
    passes, find = [], substring_method.find_substring_repeats

    def counted(*given: Any) -> Any:
        passes.append(given[4])
        return find(*given)

    monkeypatch.setattr(substring_method, "find_substring_repeats", counted)
    texts = ["ab" * 100_000, "b" * 50_000]
    kept = run(write(tmp_path, texts), tmp_path / "o.parquet", span=20, mem=1, engine="numpy")
    assert [row["text"] for row in kept.values()] == ["ab" * 10, "b" * 20]
    assert 1 < max(passes) <= -(-200_000 * 64 // (1 << 20))


def test_first_occurrences_stay_in_periodic_text(tmp_path: Path) -> None:
    texts = ["a" * 500, "ab" * 300, "abc" * 5 + "z" * 20, "x" * 5, "", "y" * 100]
    kept = run(write(tmp_path, texts), tmp_path / "o.parquet", span=20)
    assert [row["text"] for row in kept.values()] == [
        "a" * 20, "ab" * 10, "abc" * 5 + "z" * 20, "x" * 5, "", "y" * 20,
    ]  # fmt: skip


def test_actions(tmp_path: Path) -> None:
    base = "".join(random.Random(1).choices("abcdefgh", k=100))
    paths = write(tmp_path, [base, base[:60] + "!" * 15, "?" * 35 + base[:30], base])
    ids = {
        (action, share): list(
            run(paths, tmp_path / f"{action}{share}.parquet", span=20, action=action, share=share)
        )
        for action, share in [("cut", None), ("cut", 0.7), ("drop", None), ("drop", 0.9)]
    }
    assert ids == {
        ("cut", None): ["d0", "d1", "d2"], ("cut", 0.7): ["d0", "d2"],
        ("drop", None): ["d0", "d2"], ("drop", 0.9): ["d0", "d1", "d2"],
    }  # fmt: skip
    marked = run(paths, tmp_path / "m.parquet", span=20, action="mark")
    assert [row["text"] for row in marked.values()] == pq.read_table(paths[0])["text"].to_pylist()
    spans = [row["duplicate_spans"] for row in marked.values()]
    assert spans[1] == [{"start": 0, "length": 60, "kept_id": "d0", "kept_start": 0}]
    assert spans[2] == [{"start": 35, "length": 30, "kept_id": "d0", "kept_start": 0}]
    shares = [dict(row["scores"])["duplicate_share"] for row in marked.values()]
    assert shares == pytest.approx([0, 60 / 75, 30 / 65, 1])
    for wrong in (
        {"action": "x"},
        {"share": "150%"},
        {"action": "mark", "share": 0.5},
        {"span": 1},
    ):
        with pytest.raises(UsageError):
            run(paths, tmp_path / "w.parquet", **wrong)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, str]:
    path = tmp_path_factory.mktemp("tokenizer")
    made = train_bpe([" ".join(f"word{i % 97} ação" for i in range(500))], 400)
    made.save(path)
    return made, str(path)


def test_spans_of_tokens(tmp_path: Path, tokenizer: tuple[Tokenizer, str]) -> None:
    """Windows of ids by dictionary; what is cut is what their tokens cover."""
    made, path = tokenizer
    source = random.Random(7)
    words = ["word1", "word22", "ação", "日本", "👍", "word5 ", "."]
    texts = [" ".join(source.choices(words, k=source.randrange(60))) for _ in range(30)]
    span, seen, base, expected = 12, {}, 0, {}
    for i, text in enumerate(texts):
        ids, offsets = made.encode_with_offsets(text)
        gone = np.zeros(len(ids) + 1, bool)
        for at in range(len(ids) - span + 1):
            first = seen.setdefault(tuple(ids[at : at + span]), base + at)
            if first + span <= base + at:
                gone[at : at + span] = True
        base += len(ids)
        needed = {c for t, (a, b) in enumerate(offsets) if not gone[t] for c in range(a, b)}
        expected[f"d{i}"] = "".join(c for at, c in enumerate(text) if at in needed)
    kept = run(write(tmp_path, texts, 2), tmp_path / "o.parquet", span=span, tokenizer=path)
    left = {name: text for name, text in expected.items() if text.strip()}
    assert {n: r["text"] for n, r in kept.items() if n in left} == left
    assert sum(map(len, left.values())) < 0.8 * sum(map(len, texts))


def test_no_rows_and_one_huge_row(tmp_path: Path) -> None:
    empty = pa.table({"id": pa.array([], pa.string()), "text": pa.array([], pa.string())})
    pq.write_table(empty, tmp_path / "none.parquet")
    removed = str(tmp_path / "r.parquet")
    assert run([str(tmp_path / "none.parquet")], tmp_path / "e.parquet", removed=removed) == {}
    assert pq.read_table(removed).num_rows == 0
    half = "".join(map(chr, np.random.default_rng(1).integers(97, 123, 1 << 20)))
    kept = run(write(tmp_path, [half + half + "é"]), tmp_path / "o.parquet", mem=1 << 20)
    assert kept["d0"]["text"] == half + "é"


def test_files_of_one_hash_are_never_parted_and_large_ones_are_spread_again() -> None:
    kind = np.dtype([("value", "u8"), ("start", "i8"), ("count", "i8")])
    records = np.zeros(20_000, kind)
    records["value"] = np.random.default_rng(0).integers(0, 300, len(records))  # all small numbers
    records["start"] = np.arange(len(records))
    files = HashPartitions(kind)
    for low in range(0, len(records), 3000):
        files.add(records[low : low + 3000])
    seen: dict[int, list[int]] = {}
    for part, bits in files.files(12_000):
        ordered, starts = group_by_value(part, bits)
        for low, high in pairwise(starts.tolist()):
            group = ordered[low:high]
            for value in np.unique(group["value"]).tolist():
                assert value not in seen
                seen[value] = group["start"][group["value"] == value].tolist()
    assert len(seen) == 300
    for value, starts in seen.items():
        assert starts == np.flatnonzero(records["value"] == value).tolist()


@pytest.mark.slow
def test_twenty_megabytes_are_cut_as_a_suffix_array_says(tmp_path: Path) -> None:
    """Python's own library and packages; windows ranked by doubling, as a suffix array is built."""
    texts, total, span = [], 0, 100
    folders = {Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")}
    files = sorted({file for folder in folders for file in folder.rglob("*.py")})
    random.Random(7).shuffle(files)
    for file in files:
        texts.append(file.read_bytes().decode(errors="ignore"))
        total += len(texts[-1].encode())
        if total >= 20_000_000:
            break
    units = np.frombuffer("".join(texts).encode(), np.uint8)
    starts = np.cumsum([0, *(len(text.encode()) for text in texts)])
    gone = covered_by_ranks(units, starts, span)
    lead = np.flatnonzero((units & 0xC0) != 0x80)
    whole = np.minimum.reduceat(gone, lead)
    gone = np.repeat(whole, np.diff(np.append(lead, len(units))))
    kept = run(write(tmp_path, texts, 3), tmp_path / "o.parquet", span=span, mem=64 << 20, jobs=2)
    for i, (low, high) in enumerate(pairwise(starts.tolist())):
        left = units[low:high][~gone[low:high]].tobytes().decode()
        assert kept[f"d{i}"]["text"] == left if left.strip() else f"d{i}" not in kept or low == high
    assert gone.mean() > 0.05


def covered_by_ranks(units: np.ndarray, starts: np.ndarray, span: int) -> np.ndarray:
    """`covered` for texts too large to compare neighbours unit by unit.

    Windows of 2w units have equal ranks where both halves of w have; `span` by two that overlap.
    """
    rank, width = units.astype(np.int64), 1
    while 2 * width <= span:
        rank, width = _ranks(rank[:-width], rank[width:]), 2 * width
    rest = span - width
    rank = _ranks(rank[: len(rank) - rest], rank[rest:]) if rest else rank
    places = np.arange(len(rank))
    inside = places[places + span <= starts[np.searchsorted(starts, places, side="right")]]
    first = np.full(int(rank.max()) + 1, len(units))
    np.minimum.at(first, rank[inside], inside)
    repeats = inside[first[rank[inside]] + span <= inside]
    steps = np.zeros(len(units) + 1, np.int64)
    steps[repeats] += 1
    steps[repeats + span] -= 1
    return np.cumsum(steps)[:-1] > 0


def _ranks(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    pairs = first * (int(second.max()) + 1) + second
    order = np.argsort(pairs)
    ordered = pairs[order]
    rank = np.empty(len(pairs), np.int64)
    rank[order] = np.cumsum(np.concatenate(([False], ordered[1:] != ordered[:-1])))
    return rank
