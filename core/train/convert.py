"""Convert checkpoints to Hugging Face directories, one tensor at a time.

The model may be larger than the host's memory: at most the largest tensor of the output and one
block are in memory, because arrays are lazy (core.model.storage.lazy_array), read from disk and
cast when they are written.
"""

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core.errors import BadData
from sabia.core.model.lora import A, B, LoraConfig, base_names, targeted
from sabia.core.model.storage import hub
from sabia.core.model.storage.lazy_array import LazyArray
from sabia.core.numerics.floats import numpy_dtype
from sabia.core.spec.model import ModelSpec
from sabia.core.train.checkpoint.pieces import BLOCK_BYTES
from sabia.core.train.checkpoint.reader import Reader


def export_checkpoint(
    reader: Reader,
    spec: ModelSpec,
    out: str | Path,
    dtype: str = "bfloat16",
    tokenizer_from: str | Path | None = None,
    *,
    lora: LoraConfig | None = None,
    kept_from: str | Path | None = None,
    max_shard_bytes: int = hub.MAX_SHARD_BYTES,
    trained_for: str = "",
) -> None:
    """Write the parameters of a checkpoint as a Hugging Face directory, atomically.

    tokenizer_from: a directory whose tokenizer files are copied. lora: adapters to merge into their
    matrices; matrices in the format of its base, which no checkpoint has, are those of `kept_from`
    in this format. kept_from: the model directory that the run started from, whose tensors that
    the computation does not use are copied. trained_for: see hub.save_model. Raises BadData if the
    checkpoint is of another model.
    """
    numpy_type = numpy_dtype(dtype)
    adapted = {t.name for t in targeted(spec, lora)} if lora else set()
    base = base_names(spec, lora)
    started: dict[str, Any] = {}
    if lora and base and kept_from:
        from sabia.core.model.storage.stored_weights import load_base

        started = load_base(kept_from, base, lora.base)

    @lru_cache(1)
    def decoded(name: str) -> np.ndarray:
        from sabia.core.numerics.frozen_base import stored_base

        assert lora is not None, "there is a base"
        return stored_base(started[name], lora.base).decoded()

    def rows(name: str, start: int, stop: int) -> np.ndarray:
        return decoded(name)[start:stop]

    params: dict[str, Any] = {}
    for tensor in spec.tensors():
        key = f"param/{tensor.name}"
        if tensor.name in base:
            weight = LazyArray(tensor.shape, np.dtype(np.float32), partial(rows, tensor.name))
        elif key not in reader or reader[key].shape != tensor.shape:
            shape = reader[key].shape if key in reader else "missing"
            raise BadData(f"checkpoint: {key} is {shape} (expected {tensor.shape})")
        else:
            weight = reader[key]
        if lora and tensor.name in adapted:
            weight = _merged(reader, tensor.name, weight, lora)
        params[tensor.name] = cast(weight, numpy_type)
    more: Any = {"kept_from": kept_from, "max_shard_bytes": max_shard_bytes}
    more |= {"trained_for": trained_for}
    hub.save_model(out, spec, params, tokenizer_from, **more)


def _merged(reader: Reader, name: str, weight: LazyArray, lora: LoraConfig) -> LazyArray:
    """A matrix with its adapter: rows of W + scale · B A, in fp32."""
    a, b = np.asarray(reader[f"param/{name}{A}"]), reader[f"param/{name}{B}"]

    def fetch(start: int, stop: int) -> np.ndarray:
        rows = weight.fetch(start, stop).astype(np.float32)
        # W + alpha/rank · B A, for a block of rows
        return rows + np.float32(lora.scale) * (b.fetch(start, stop) @ a)

    return LazyArray(weight.shape, np.dtype(np.float32), fetch)


def cast(array: LazyArray, numpy_type: np.dtype) -> LazyArray:
    """The array in another dtype, cast one block at a time."""
    if array.dtype == numpy_type:
        return array
    rows = array.shape[0] if array.shape else 1
    # rows per block
    step = max(1, BLOCK_BYTES * rows // max(1, array.nbytes))

    def fetch(start: int, stop: int) -> np.ndarray:
        if not array.shape:
            return array.fetch(0, 1).astype(numpy_type)
        result = np.empty((stop - start, *array.shape[1:]), numpy_type)
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            result[begin - start : end - start] = array.fetch(begin, end)
        return result

    return LazyArray(array.shape, numpy_type, fetch)
