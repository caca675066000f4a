"""Read and write model directories of the Hugging Face hub: config.json and safetensors.

Loading maps files and renames tensors by the spec's table; nothing is cast, so bf16 stays bf16 and
unchanged tensors are written back byte for byte (experts are stacked when read, unstacked when
written). A directory with a `quantization_config` is decoded by `sabia.core.numerics.compressed`.
Saving is atomic; transformers opens the directory with no missing or unexpected tensor.

Tensors that the files fuse into one are split when read, fused when written: a `FusedPart`
(core.spec.tensors) is a strided block of a view of the file's tensor. Reading all parts of a file
tensor and writing them back gives the same bytes, because every element belongs to one part.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from sabia.core.errors import BadData, UsageError
from sabia.core.model.init import init_params
from sabia.core.model.storage.lazy_array import LazyArray, batches_by_size
from sabia.core.model.storage.safetensors_file import read_tensors, write_tensors
from sabia.core.ops.base import Params
from sabia.core.shards.atomic import atomic_directory
from sabia.core.spec.families import TRAINED_FOR, load_spec
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import FusedPart, TensorSpec


def _slices(part: FusedPart) -> tuple[slice, ...]:
    return tuple(slice(*cut) for cut in part.cut)


def read_part(part: FusedPart, fused: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor of `shape` that `part` selects in the file's tensor; a view if possible."""
    if fused.shape != part.shape:
        raise BadData(f"model: {part.file} has shape {fused.shape} (expected {part.shape})")
    return fused.reshape(part.view)[_slices(part)].transpose(part.order).reshape(shape)


def write_parts(parts: Iterable[tuple[FusedPart, np.ndarray]]) -> np.ndarray:
    """The file's tensor, assembled from the arrays of all its parts."""
    fused = np.zeros(0)
    for number, (part, array) in enumerate(parts):
        if not number:
            fused = np.empty(part.shape, array.dtype)
        block = fused.reshape(part.view)[_slices(part)]
        permuted = block.transpose(part.order)
        permuted[...] = array.reshape(permuted.shape)
    return fused


__all__ = ["from_hf", "init_params", "load_model", "read_checkpoint", "save_model", "to_hf"]

Arrays = Mapping[str, np.ndarray]
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)


def load_model(directory: str | Path) -> tuple[ModelSpec, dict[str, np.ndarray]]:
    """(spec, name → array in the file's dtype) of a model directory.

    Arrays are read-only and memory-mapped; a quantized checkpoint is decoded to full matrices.
    Raises UsageError for an unsupported configuration, BadData for missing or unknown tensors and
    for wrong shapes.
    """
    spec, tensors = load_spec(directory), read_checkpoint(directory)
    return with_input_scales(spec, tensors), dict(from_hf(spec, decoded(spec, tensors)))


def with_input_scales(spec: ModelSpec, tensors: Arrays) -> ModelSpec:
    """The spec with the static scales of inputs (compressed-tensors) in its configuration."""
    quantization = spec.config.get("quantization_config")
    if not quantization or quantization.get("quant_method") != "compressed-tensors":
        return spec
    from sabia.core.numerics.compressed import STATIC_SCALES, input_scales

    made = quantization | {STATIC_SCALES: input_scales(tensors)}
    return replace(spec, config={**spec.config, "quantization_config": made})


def decoded(spec: ModelSpec, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors by file name, quantized ones decoded to full matrices."""
    quantization = spec.config.get("quantization_config")
    if quantization is None:
        return tensors
    if quantization.get("quant_method") in ("mxfp4", "fp8", "bitsandbytes"):
        from sabia.core.numerics.published import dequantize
    else:
        from sabia.core.numerics.compressed import dequantize
    return dequantize(tensors, quantization)


def read_checkpoint(directory: str | Path) -> dict[str, np.ndarray]:
    """All tensors of a directory's safetensors files by the files' own names."""
    root = Path(directory)
    tensors: dict[str, np.ndarray] = {}
    for file in _files(root):
        if not file.is_file():
            raise BadData(f"model: {file} is missing (expected by {INDEX})")
        tensors |= read_tensors(file)
    return tensors


def unused_tensors(spec: ModelSpec, directory: str | Path) -> dict[str, np.ndarray]:
    """Tensors of a directory that the computation does not use, to be copied (`spec.kept`).

    Memory-mapped, byte for byte; those of a quantized directory are decoded.
    """
    if not spec.kept:
        return {}
    tensors = read_checkpoint(directory)
    selected = {k: v for k, v in tensors.items() if any(re.fullmatch(p, k) for p in spec.kept)}
    return decoded(load_spec(directory), selected)


def _files(root: Path) -> list[Path]:
    index = root / INDEX
    if index.is_file():
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (ValueError, KeyError, AttributeError):
            raise BadData(f"model: {index} has no weight_map (expected JSON with one)") from None
        return [root / name for name in sorted(set(names))]
    files = [root / "model.safetensors"]
    if not files[0].is_file():
        files = sorted(root.glob("[!.]*.safetensors"))
    if not files:
        raise UsageError(f"model: {root} has no safetensors file (expected model.safetensors)")
    return files


def from_hf(spec: ModelSpec, tensors: Arrays, kept: Params = MappingProxyType({})) -> Params:
    """Tensors by file name → parameters by our names, those of `kept` as they are; raises BadData
    unless all names match."""
    remaining = dict(tensors)
    params = {
        tensor.name: kept[tensor.name] if tensor.name in kept else take(tensor, remaining)
        for tensor in spec.tensors()
    }
    for fused in {t.hf.file for t in spec.tensors() if isinstance(t.hf, FusedPart)}:
        del remaining[fused]
    check_names(spec, remaining)
    return params


def check_names(spec: ModelSpec, remaining: Iterable[str]) -> None:
    """Raise BadData if a tensor of the files, beside the spec's own, is unknown to the family."""
    unknown = unknown_names(spec, remaining)
    if unknown:
        raise BadData(
            f"model: tensor {unknown[0]} is unknown to the {spec.family} family "
            f"({len(unknown)} unknown tensors; expected those of config.json)"
        )


def unknown_names(spec: ModelSpec, remaining: Iterable[str]) -> list[str]:
    """The names of tensors of the files, beside the spec's own, that the family does not ignore."""
    expected = spec.ignored + spec.kept
    if spec.tied:  # some files store the head too, although it is the embedding
        expected += (re.escape(str(spec.names["head"])),)
    return [n for n in remaining if not any(re.fullmatch(p, n) for p in expected)]


def take(tensor: TensorSpec, remaining: dict[str, np.ndarray]) -> np.ndarray:
    """A parameter of tensors by file name, which are removed unless other parameters share them.

    Raises BadData for a missing tensor or a wrong shape.
    """
    if isinstance(tensor.hf, FusedPart):
        if tensor.hf.file not in remaining:
            raise BadData(f"model: tensor {tensor.hf.file} is missing")
        return read_part(tensor.hf, remaining[tensor.hf.file], tensor.shape)
    names = tensor.files
    missing = next((name for name in names if name not in remaining), None)
    if missing is not None:
        raise BadData(f"model: tensor {missing} is missing (expected shape {tensor.shape})")
    parts = [remaining.pop(name) for name in names]
    array = parts[0] if isinstance(tensor.hf, str) else np.stack(parts)
    if array.shape != tensor.shape:
        raise BadData(f"model: {names[0]} has shape {array.shape} (expected {tensor.shape})")
    return array


def to_hf(spec: ModelSpec, params: Arrays) -> dict[str, Any]:
    """Parameters by our names → tensors by file name; the inverse of `from_hf`.

    Lazy arrays stay lazy; fused tensors of files are assembled when they are read.
    """
    table = {tensor.name: tensor for tensor in spec.tensors()}
    unmatched = set(params) ^ set(table)
    if unmatched:
        first = min(unmatched)
        raise UsageError(f"model: parameters do not match the spec at {first} (expected its table)")
    return file_tensors(spec.tensors(), params)


def file_tensors(table: Iterable[TensorSpec], params: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of the files, by name, that hold the parameters of `table`."""
    named: dict[str, Any] = {}
    fused: dict[str, list[tuple[FusedPart, Any]]] = {}
    for tensor in table:
        array = params[tensor.name]
        if array.shape != tensor.shape:
            raise UsageError(f"model: {tensor.name} is {array.shape} (expected {tensor.shape})")
        if isinstance(tensor.hf, FusedPart):
            fused.setdefault(tensor.hf.file, []).append((tensor.hf, array))
            continue
        parts = array if isinstance(tensor.hf, tuple) else (array,)
        named |= zip(tensor.files, parts, strict=True)
    for file, parts in fused.items():
        part, array = parts[0]
        named[file] = LazyArray(part.shape, array.dtype, partial(_fused, parts))
    return named


def _fused(parts: Sequence[tuple[FusedPart, Any]], start: int, stop: int) -> np.ndarray:
    return write_parts((part, np.asarray(array)) for part, array in parts)[start:stop]


def save_model(
    directory: str | Path,
    spec: ModelSpec,
    params: Arrays,
    tokenizer_from: str | Path | None = None,
    *,
    kept_from: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    trained_for: str = "",
) -> None:
    """Write config.json and safetensors, each tensor in its array's dtype.

    tokenizer_from: a directory whose tokenizer files are copied. kept_from: the directory that the
    model was loaded from, whose tensors that the computation does not use are copied. trained_for:
    the precision of quantization-aware training, which config.json records.
    """
    left_out = ("quantization_config", TRAINED_FOR)
    config = {key: value for key, value in spec.config.items() if key not in left_out}
    config |= {TRAINED_FOR: {"precision": trained_for}} if trained_for else {}
    tensors = to_hf(spec, params) | (unused_tensors(spec, kept_from) if kept_from else {})
    more: Any = {"tokenizer_from": tokenizer_from, "max_shard_bytes": max_shard_bytes}
    write_checkpoint(directory, config, tensors, **more)


def write_checkpoint(
    directory: str | Path,
    config: Mapping[str, Any],
    tensors: Arrays,
    *,
    tokenizer_from: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model directory from a configuration and tensors by file name, atomically."""
    with atomic_directory(directory) as temporary:
        text = json.dumps(_with_dtype(config, tensors), indent=2) + "\n"
        (temporary / "config.json").write_text(text, encoding="utf-8")
        _write_shards(temporary, tensors, max_shard_bytes)
        if tokenizer_from is not None:
            _copy_tokenizer(Path(tokenizer_from), temporary)


def _with_dtype(config: Mapping[str, Any], tensors: Arrays) -> dict[str, object]:
    """The configuration with the dtype of the largest tensor, if that is a float."""
    result = dict(config)
    largest = max(tensors.values(), key=lambda array: array.size).dtype.name
    if largest in ("float32", "bfloat16", "float16"):
        keys = [key for key in ("dtype", "torch_dtype") if key in result] or ["dtype"]
        result |= dict.fromkeys(keys, largest)
    return result


def _write_shards(root: Path, tensors: Arrays, max_shard_bytes: int) -> None:
    groups = batches_by_size(tensors, lambda name: tensors[name].nbytes, max_shard_bytes)
    shards = [{name: tensors[name] for name in names} for names in groups]
    metadata = {"format": "pt"}  # required by transformers
    if len(shards) == 1:
        write_tensors(root / "model.safetensors", shards[0], metadata)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(root / file, shard, metadata)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (root / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _copy_tokenizer(source: Path, target: Path) -> None:
    files = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not files:
        raise UsageError(f"tokenizer: {source} has no tokenizer files (expected tokenizer.json)")
    for name in files:
        shutil.copyfile(source / name, target / name)
