"""The safetensors format with NumPy: memory-mapped reading, and writing, without conversion.

A file is a little-endian u64 header length, a JSON header (name → dtype, shape, byte range), and
the tensors' bytes (https://github.com/huggingface/safetensors, "Format"). Reading maps the file, so
a tensor needs memory only when it is read. bfloat16 and fp8 are NumPy dtypes of ml_dtypes; neither
torch nor jax is needed.
"""

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core.errors import BadData
from sabia.core.numerics.floats import numpy_dtype

# names in the file → names of NumPy dtypes (the last four are of ml_dtypes)
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
_NAMES = {ours: theirs for theirs, ours in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """(name → {dtype, shape, data_offsets} and `__metadata__`, position of the first byte).

    Raises BadData if the file is not a safetensors file or is truncated.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(_LENGTH.size)
        length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else size
        if length > min(size - _LENGTH.size, _MAX_HEADER_BYTES):
            raise BadData(f"safetensors: {path} has no whole header (expected {length} bytes)")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise BadData(f"safetensors: {path} header is not JSON ({error})") from None
    return header, _LENGTH.size + length


def _view(path: Path, data: np.ndarray, name: str, entry: Mapping[str, Any]) -> np.ndarray:
    if entry["dtype"] not in _DTYPES:
        raise BadData(f"safetensors: {path}: {name} has dtype {entry['dtype']} (expected known)")
    dtype, shape = numpy_dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if end > data.size or end - begin != math.prod(shape) * dtype.itemsize:
        raise BadData(f"safetensors: {path}: {name} is cut short ({data.size} data bytes)")
    return data[begin:end].view(dtype).reshape(shape)


def read_tensors(path: str | Path) -> dict[str, np.ndarray]:
    """All tensors of a file as read-only memory-mapped arrays."""
    file = Path(path)
    header, start = read_header(file)
    header.pop("__metadata__", None)
    if file.stat().st_size == start:
        data = np.empty(0, np.uint8)
    else:
        data = np.memmap(file, mode="r", dtype=np.uint8, offset=start).view(np.ndarray)
    return {name: _view(file, data, name, entry) for name, entry in header.items()}


def release_pages(array: np.ndarray) -> None:
    """Free the memory of a memory-mapped array, which is read from the file again at its next use.

    Only whole pages of contiguous read-only arrays are freed; for other arrays nothing happens.
    """
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if not isinstance(owner, mmap.mmap) or array.flags.writeable or not array.flags.c_contiguous:
        return
    start = array.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    first, end = -(-start // mmap.PAGESIZE), (start + array.nbytes) // mmap.PAGESIZE
    if end > first:
        owner.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE)


def encode_header(arrays: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """The header of a file with these arrays (anything with dtype and shape) in this order.

    Padded so that data begin at a multiple of 8; with the widest dtypes first all are aligned.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, array in arrays.items():
        end = position + math.prod(array.shape) * array.dtype.itemsize
        kind, shape = _NAMES[array.dtype.name], list(array.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def write_tensors(
    path: str | Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file and sync it to disk, widest dtypes first, so that every tensor is aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    with open(path, "wb") as file:
        file.write(encode_header({name: tensors[name] for name in order}, metadata))
        for name in order:
            file.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
