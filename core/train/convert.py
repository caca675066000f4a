"""Checkpoints to and from Hugging Face directories, a tensor at a time.

A checkpoint of a model that no host can hold becomes a directory that transformers opens, or the
other way round, with no more in memory than the largest tensor of the output and one block: arrays
are lazy (core.train.checkpoint.pieces), read from the disk and cast when a writer comes to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from sabia.core.errors import BadData, UsageError
from sabia.core.model import hub
from sabia.core.model.file_parts import read_part, write_parts
from sabia.core.model.lora import A, B, LoraConfig, targeted
from sabia.core.model.safetensors_file import numpy_dtype
from sabia.core.spec.families import load_spec
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import Part, TensorSpec
from sabia.core.train.checkpoint import LazyArray, Piece, Reader
from sabia.core.train.checkpoint.pieces import BLOCK_BYTES
from sabia.core.train.optimizer import COUNT

Arrays = Mapping[str, np.ndarray]


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
    params = {}
    for tensor in spec.tensors():
        found = _parameter(reader, tensor)
        if lora and tensor.name in adapted:
            found = _merged(reader, tensor.name, found, lora)
        params[tensor.name] = cast(found, kind)
    config = {key: value for key, value in spec.config.items() if key != "quantization_config"}
    hub.write_checkpoint(
        out,
        config,
        dict(_file_tensors(spec, params))  # type: ignore[arg-type]  # arrays that are read late
        | (hub.kept_tensors(spec, kept_from) if kept_from else {}),
        tokenizer_from=tokenizer_from,
        max_shard_bytes=max_shard_bytes,
    )


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


def _file_tensors(
    spec: ModelSpec, params: Mapping[str, LazyArray]
) -> Iterator[tuple[str, LazyArray]]:
    """What `hub.to_hf` makes of whole arrays, in its order, of lazy ones."""
    fused: dict[str, list[tuple[Part, LazyArray]]] = {}
    for tensor in spec.tensors():
        array = params[tensor.name]
        if isinstance(tensor.hf, Part):
            fused.setdefault(tensor.hf.file, []).append((tensor.hf, array))
        elif isinstance(tensor.hf, str):
            yield tensor.hf, array
        else:
            yield from zip(tensor.hf, array, strict=True)
    for file, parts in fused.items():
        yield file, LazyArray(parts[0][0].shape, parts[0][1].dtype, partial(_fuse, parts))


def _fuse(parts: list[tuple[Part, LazyArray]], start: int, stop: int) -> np.ndarray:
    return write_parts((part, np.asarray(array)) for part, array in parts)[start:stop]


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


def model_pieces(
    directory: str | Path, parts: tuple[str, ...] = ("m", "v"), dtype: str = "float32"
) -> tuple[ModelSpec, Iterator[Piece]]:
    """(spec, pieces of a checkpoint before its first step) of a Hugging Face directory.

    Parameters are cast to `dtype`; the optimizer's `parts` are zeros of their shapes. Raises
    BadData as `hub.load_model` does; a quantized directory is refused (it has to be decoded).
    """
    spec = load_spec(directory)
    if spec.config.get("quantization_config") is not None:
        raise UsageError(f"model: {directory} is quantized (expected full weights to train on)")
    tensors = hub.read_checkpoint(directory)
    _check_names(spec, tensors)
    kind = numpy_dtype(dtype)
    lazy = {t.name: cast(_from_files(t, tensors), kind) for t in spec.tensors()}
    return spec, _state(lazy, parts, kind)


def _state(
    params: Mapping[str, LazyArray], parts: tuple[str, ...], kind: np.dtype
) -> Iterator[Piece]:
    for name, array in params.items():
        yield Piece(f"param/{name}", array)
    for part in parts:
        for name, array in params.items():
            zeros = partial(_zeros, array.shape[1:], kind)
            yield Piece(f"{part}/{name}", LazyArray(array.shape, kind, zeros))
    yield Piece(COUNT, np.array(0, np.int64))


def _zeros(row: tuple[int, ...], kind: np.dtype, start: int, stop: int) -> np.ndarray:
    return np.zeros((stop - start, *row), kind)


def _names(tensor: TensorSpec) -> tuple[str, ...]:
    if isinstance(tensor.hf, Part):
        return (tensor.hf.file,)
    return (tensor.hf,) if isinstance(tensor.hf, str) else tuple(tensor.hf)


def _check_names(spec: ModelSpec, tensors: Arrays) -> None:
    wanted = {name for tensor in spec.tensors() for name in _names(tensor)}
    missing = sorted(wanted - set(tensors))
    if missing:
        raise BadData(f"model: tensor {missing[0]} is missing ({len(missing)} such)")
    patterns = [*spec.ignored, *spec.kept, *([re.escape(str(spec.names["head"]))] * spec.tied)]
    left = sorted(set(tensors) - wanted)
    unknown = [name for name in left if not any(re.fullmatch(p, name) for p in patterns)]
    if unknown:
        raise BadData(f"model: tensor {unknown[0]} is unknown to the {spec.family} family")


def _from_files(tensor: TensorSpec, tensors: Arrays) -> LazyArray:
    """A parameter of the mapped tensors of the files; nothing is read before its rows are."""
    arrays = [tensors[name] for name in _names(tensor)]
    kind = arrays[0].dtype
    if isinstance(tensor.hf, tuple):
        shape: tuple[int, ...] = (len(arrays), *arrays[0].shape)
        lazy = LazyArray(shape, kind, lambda start, stop: np.stack(arrays[start:stop]))
    else:
        whole = arrays[0]
        if isinstance(tensor.hf, Part):
            whole = read_part(tensor.hf, whole, tensor.shape)
        lazy = LazyArray(whole.shape, kind, lambda start, stop: whole[start:stop])
    if lazy.shape != tensor.shape:
        raise BadData(f"model: {tensor.name} has shape {lazy.shape} (expected {tensor.shape})")
    return lazy
