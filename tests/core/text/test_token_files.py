"""Megatron files, read back by a parser written from the format alone."""

import numpy as np
import pytest
from token_files_read import read_megatron

from sabia.core.text.tokenize.token_files import MegatronWriter


@pytest.mark.parametrize(("vocab", "kind"), [(65_499, "<u2"), (65_500, "<i4"), (200_000, "<i4")])
def test_documents_come_back(tmp_path, vocab, kind):
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 40, 57)
    tokens = draw.integers(0, vocab, lengths.sum()).astype(np.int32)
    with open(tmp_path / "a.bin", "wb") as file:
        writer = MegatronWriter(file, vocab)
        for part in np.split(np.arange(57), [20, 20, 50]):
            ends = np.cumsum(lengths)
            low, high = (ends[part[0]] - lengths[part[0]], ends[part[-1]]) if len(part) else (0, 0)
            writer.add(tokens[low:high], lengths[part])
        writer.write_index(tmp_path / "a.idx")
    dtype, rows = read_megatron(tmp_path / "a")
    assert dtype == np.dtype(kind) and writer.documents == 57
    assert rows == [row.tolist() for row in np.split(tokens, np.cumsum(lengths)[:-1])]


def test_no_document_is_an_empty_file(tmp_path):
    with open(tmp_path / "a.bin", "wb") as file:
        MegatronWriter(file, 10).write_index(tmp_path / "a.idx")
    assert read_megatron(tmp_path / "a")[1] == []
