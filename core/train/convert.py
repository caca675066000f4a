"""Checkpoints to Hugging Face directories, a tensor at a time.

A checkpoint of a model that no host can hold becomes a directory that transformers opens, with no
more in memory than the largest tensor of the output and one block: arrays are lazy
(core.model.storage.lazy_array), read from the disk and cast when a writer comes to them.
"""

from pathlib import Path
from typing import Any

import numpy as np

from sabia.core.errors import BadData
from sabia.core.model.lora import A, B, LoraConfig, targeted
from sabia.core.model.storage import hub
from sabia.core.model.storage.lazy_array import LazyArray
from sabia.core.model.storage.safetensors_file import numpy_dtype
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import TensorSpec
from sabia.core.train.checkpoint import Reader
from sabia.core.train.checkpoint.pieces import BLOCK_BYTES


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
) -> None:
    """Write the parameters of a checkpoint as a Hugging Face directory, atomically.

    tokenizer_from: a directory whose tokenizer files are copied along. lora: adapters that are
    merged into their matrices. kept_from: the model directory that the run began from, whose
    tensors without part in the maths are handed on. Raises BadData when the checkpoint is of
    another model.
    """
    kind = numpy_dtype(dtype)
    adapted = {t.name for t in targeted(spec, lora)} if lora else set()
    params: dict[str, Any] = {}
    for tensor in spec.tensors():
        found = _parameter(reader, tensor)
        if lora and tensor.name in adapted:
            found = _merged(reader, tensor.name, found, lora)
        params[tensor.name] = cast(found, kind)
    more: Any = {"kept_from": kept_from, "max_shard_bytes": max_shard_bytes}
    hub.save_model(out, spec, params, tokenizer_from, **more)


def _merged(reader: Reader, name: str, weight: LazyArray, lora: LoraConfig) -> LazyArray:
    """A matrix with its adapter: rows of W + scale · B A, in fp32."""
    a, b = np.asarray(reader[f"param/{name}{A}"]), reader[f"param/{name}{B}"]

    def fetch(start: int, stop: int) -> np.ndarray:
        rows = weight.fetch(start, stop).astype(np.float32)
        return rows + np.float32(lora.scale) * (b.fetch(start, stop) @ a)

    return LazyArray(weight.shape, np.dtype(np.float32), fetch)


def _parameter(reader: Reader, tensor: TensorSpec) -> LazyArray:
    key = f"param/{tensor.name}"
    if key not in reader or reader[key].shape != tensor.shape:
        found = reader[key].shape if key in reader else "missing"
        raise BadData(f"checkpoint: {key} is {found} (expected {tensor.shape})")
    return reader[key]


def cast(array: LazyArray, kind: np.dtype) -> LazyArray:
    """The same numbers in another dtype, cast a block at a time."""
    if array.dtype == kind:
        return array
    rows = array.shape[0] if array.shape else 1
    step = max(1, BLOCK_BYTES * rows // max(1, array.nbytes))

    def fetch(start: int, stop: int) -> np.ndarray:
        if not array.shape:
            return array.fetch(0, 1).astype(kind)
        result = np.empty((stop - start, *array.shape[1:]), kind)
        for at in range(start, stop, step):
            end = min(at + step, stop)
            result[at - start : end - start] = array.fetch(at, end)
        return result

    return LazyArray(array.shape, kind, fetch)
