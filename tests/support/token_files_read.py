"""Readers of token files written from their formats alone, as independent judges of ours."""

import json
import struct
from itertools import chain, pairwise

import numpy as np
import pyarrow as pa

TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


def read_megatron(stem):
    """Documents of `stem`.bin by `stem`.idx; asserts what the format asks for."""
    index = stem.with_suffix(".idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, bounds = struct.unpack_from("<QBQQ", index, 9)
    assert version == 1 and bounds >= 1
    at = 9 + struct.calcsize("<QBQQ")
    sizes = np.frombuffer(index, "<i4", sequences, at)
    pointers = np.frombuffer(index, "<i8", sequences, at + 4 * sequences)
    documents = np.frombuffer(index, "<i8", bounds, at + 12 * sequences)
    assert at + 12 * sequences + 8 * bounds == len(index)
    kind = np.dtype(TYPES[code])
    raw = stem.with_suffix(".bin").read_bytes()
    assert sum(sizes) * kind.itemsize == len(raw)
    assert documents[0] == 0 and documents[-1] == sequences
    rows = [
        np.frombuffer(raw, kind, size, place).tolist()
        for size, place in zip(sizes.tolist(), pointers.tolist(), strict=True)
    ]
    return kind, [list(chain(*rows[a:b])) for a, b in pairwise(documents)]


def read_arrow(folder):
    """Rows of a directory as `datasets.load_from_disk` finds them."""
    state = json.loads((folder / "state.json").read_text())
    features = json.loads((folder / "dataset_info.json").read_text())["features"]
    files = [folder / entry["filename"] for entry in state["_data_files"]]
    table = pa.concat_tables(pa.ipc.open_stream(path.read_bytes()).read_all() for path in files)
    assert list(features) == table.column_names
    return table
