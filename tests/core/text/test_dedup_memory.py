"""The comparison of dedup in small pieces: the same decisions, and few bytes for each document."""

import random
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import stage
from planted import make_texts, write

from sabia.core.options.dedup import DedupOptions
from sabia.core.text.dedup import clusters, lsh, signature_files
from sabia.core.text.dedup.signature_files import Corpus, SegmentWriter
from sabia.kernels.minhash.definitions import Sketches


@pytest.mark.parametrize(
    "options", [{}, {"keep": "first"}, {"verify": False}, {"method": "exact"}, {"threshold": 0.4}],
    ids=str,
)  # fmt: skip
def test_pieces_change_no_decision(
    options: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in", make_texts(random.Random(8), 60, 80)[0], parts=3)
    decided, removed = [], []
    for rows, part_bytes in ((1 << 16, 1 << 25), (7, 2560)):
        monkeypatch.setattr(signature_files, "CHUNK_ROWS", rows)
        monkeypatch.setattr(clusters, "CHUNK_ROWS", rows)
        monkeypatch.setattr(clusters, "PART_BYTES", part_bytes)
        monkeypatch.setattr(clusters, "PART_SHARE", 0)
        monkeypatch.setattr(lsh, "_HALVED", rows)
        out, gone = tmp_path / f"{rows}.parquet", tmp_path / f"{rows}r.parquet"
        stage("dedup", inputs=[str(tmp_path / "in")], out=out, removed=gone, engine="numpy",
              **options)  # fmt: skip
        decided.append(pq.read_table(out))
        removed.append(pq.read_table(gone))
    assert len(removed[0]) > 0 and all(table.equals(removed[0]) for table in removed)
    assert all(table.equals(decided[0]) for table in decided)


def corpus(rows: int) -> Corpus:
    """Sketches without n-grams: a tenth of the rows repeat another, a tenth share a band."""
    writer, draw = SegmentWriter(4, False), np.random.default_rng(rows)
    for first in range(0, rows, 10_000):
        digests = draw.integers(0, 1 << 63, (10_000, 4)).astype(np.uint64)
        exact = draw.integers(0, 1 << 63, (10_000, 2)).astype(np.uint64)
        digests[:1000], exact[:1000] = digests[5000:6000], exact[5000:6000]
        digests[2000:3000, 1] = digests[7000:8000, 1]
        ones, none = np.ones(10_000, np.int64), np.empty(0, np.uint32)
        ids = pa.array([f"d{i}" for i in range(first, first + 10_000)])
        writer.add(Sketches(digests, exact, ones, ones, none, ones), draw.random(10_000), ids)
    return Corpus([writer.close()], np.array([0, rows]))


def test_bytes_of_memory_for_each_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "PART_BYTES", 1 << 20)
    sizes = (100_000, 400_000)
    sorted_bytes, all_bytes = list[int](), list[int]()
    for rows in sizes:
        made = corpus(rows)
        tracemalloc.start()
        first = clusters._first_of_equal_rows(made, 1e9)
        sorted_bytes.append(tracemalloc.get_traced_memory()[1])
        assert len(np.unique(first)) == rows * 9 // 10
        del first
        tracemalloc.reset_peak()
        found = clusters.find_clusters(made, DedupOptions(verify=False), "numpy")
        all_bytes.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(found.kept_row) == rows // 5
    for peaks, most in ((sorted_bytes, 8.5), (all_bytes, 9)):
        assert (peaks[1] - peaks[0]) / (sizes[1] - sizes[0]) < most
