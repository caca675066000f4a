"""Merging models of one shape, or the checkpoints of a run, tensor by tensor.

  linear  Σ w_i W_i (arXiv 2203.05482)
  slerp   the point between two models on the arc that joins a tensor's values as directions
  ties    W_base + Σ w_i v_i / Σ w_i over the models i whose v_i has the elected sign: v_i is
          W_i - W_base without its smallest values, the elected sign that of Σ w_i v_i (TIES, arXiv
          2306.01708, section 3)
Weights are divided by their sum. Values are computed in fp32, a block of rows at a time, and
written in the number format of the first model.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core import notes
from sabia.core.errors import BadData, UsageError
from sabia.core.model.storage import hub
from sabia.core.model.storage.lazy_array import LazyArray
from sabia.core.numerics.floats import numpy_dtype
from sabia.core.options.sft import MergeOptions
from sabia.core.recipes.model_source import own_tokenizer
from sabia.core.shards.job import Job
from sabia.core.spec import from_config, load_spec
from sabia.core.spec.families import read_config
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.train.checkpoint import local
from sabia.core.train.checkpoint.reader import Reader
from sabia.core.train.convert import cast
from sabia.core.train.run_directory import RunDirectory

Array = Any  # an array, or one that is read when it is used
Blocks = Callable[[int, int], np.ndarray]
PARALLEL = 1e-6  # radians between directions, below which slerp is linear
LORA = ".lora_"


def run(job: Job, options: MergeOptions) -> None:
    """Write the merged model; raises UsageError, BadData."""
    out = Path(str(job.out))
    if job.to_stdout or "://" in str(job.out):
        raise UsageError(f"-o: {job.out} (expected a directory for the model)")
    if out.exists() and not job.force:
        raise UsageError(f"-o: {out} exists (expected a new directory; --force replaces it)")
    if options.checkpoints:
        count = _average_checkpoints(job, options, out)
        what = f"{count} checkpoints of {job.inputs[0]}"
    else:
        count = _merge_models(job, options, out)
        what = f"{len(job.inputs)} models"
    if not job.dry_run:
        line = f"{what}, {count:,} tensors, {options.method} → {out}; try: sabia eval --model {out}"
        notes.summarize(line, {"final": str(out), "tensors": count})


# -- models


def _merge_models(job: Job, options: MergeOptions, out: Path) -> int:
    paths = list(job.inputs)
    if len(paths) < 2:
        raise UsageError(f"INPUT: {len(paths)} models (expected two or more, or --checkpoints N)")
    if options.method == "slerp" and len(paths) != 2:
        raise UsageError(f"--method: slerp of {len(paths)} models (expected two)")
    weights = Weights(options, len(paths))
    models = [*paths, *([options.base] if options.base else [])]
    first = _checked(models)
    tensors = [hub.read_checkpoint(path) for path in models]
    for path, held in zip(models[1:], tensors[1:], strict=True):
        _same_tensors(first, tensors[0], path, held)
    unused = [text for text in weights.patterns if not any(re.search(text, n) for n in tensors[0])]
    if unused:
        raise UsageError(f"--for: {unused[0]!r} matches no tensor (such as {min(tensors[0])})")
    if job.dry_run:
        for name in sorted(tensors[0]):
            print(f"{name}: {', '.join(f'{w:.3g}' for w in weights.of(name))}")
        return len(tensors[0])
    merged: dict[str, Any] = {
        name: _merged([held[name] for held in tensors], weights.of(name), options)
        for name in tensors[0]
    }
    config = read_config(first)
    hub.write_checkpoint(
        out, config, merged, tokenizer_from=first if own_tokenizer(first) else None
    )
    return len(merged)


def _checked(models: Sequence[str]) -> str:
    """The first model; raises UsageError unless the specifications and tokenizers are equal."""
    first, tokenizers = models[0], []
    for path in models:
        if "quantization_config" in read_config(path):
            raise UsageError(f"{path}: is quantized (expected the model before it)")
        if replace(load_spec(path), config={}) != replace(load_spec(first), config={}):
            raise UsageError(f"{path}: is not of the shape of {first} (expected equal models)")
        if own_tokenizer(path):
            tokenizers.append((path, load_tokenizer(path).fingerprint))
    for path, fingerprint in tokenizers:
        if fingerprint != tokenizers[0][1]:
            raise UsageError(f"{path}: has another tokenizer than {tokenizers[0][0]}")
    return first


def _same_tensors(
    first: str, tensors: Mapping[str, Any], path: str, held: Mapping[str, Any]
) -> None:
    for name in tensors.keys() | held.keys():
        shapes = [tuple(t[name].shape) if name in t else "missing" for t in (tensors, held)]
        if shapes[0] != shapes[1]:
            raise BadData(f"{path}: {name} is {shapes[1]} (expected {shapes[0]}, as in {first})")


class Weights:
    """The weights of `count` models, by the name of a tensor."""

    def __init__(self, options: MergeOptions, count: int) -> None:
        """Raises UsageError for weights that do not fit."""
        self.count = count
        self.others = self._read("--weights", options.weights or ",".join(["1"] * count))
        self.patterns: dict[str, tuple[float, ...]] = {}
        for text in options.for_:
            pattern, equals, numbers = text.rpartition("=")
            if not equals or not pattern:
                raise UsageError(f"--for: {text!r} (expected PATTERN=W,W,…)")
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(f"--for: {pattern!r} is no regular expression ({error})") from None
            self.patterns[pattern] = self._read("--for", numbers)

    def _read(self, flag: str, text: str) -> tuple[float, ...]:
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            raise UsageError(f"{flag}: {text!r} (expected numbers such as 0.3,0.7)") from None
        if len(numbers) != self.count or min(numbers) < 0 or not sum(numbers) > 0:
            raise UsageError(
                f"{flag}: {text!r} (expected {self.count} numbers of at least 0, one a model)"
            )
        return tuple(number / sum(numbers) for number in numbers)

    def of(self, name: str) -> tuple[float, ...]:
        """The weights of a tensor: of the first pattern that matches."""
        matching = (w for pattern, w in self.patterns.items() if re.search(pattern, name))
        return next(matching, self.others)


def _merged(arrays: Sequence[Array], weights: Sequence[float], options: MergeOptions) -> LazyArray:
    """The merged tensor; `ties` has the base as the last of the arrays."""
    first = arrays[0]
    if options.method == "ties":
        fetch = _ties(arrays[:-1], arrays[-1], weights, options.density, options.scale)
    else:
        fetch = {"linear": _linear, "slerp": _slerp}[options.method](arrays, weights)
    dtype = np.dtype(first.dtype)
    return cast(LazyArray(tuple(first.shape), np.dtype(np.float32), fetch), dtype)


def _rows(array: Array, start: int, stop: int) -> np.ndarray:
    """Rows in fp32, of which a lazy array reads no others; of an array without axes the array."""
    if isinstance(array, LazyArray):
        part = array.fetch(start, stop)
    else:
        part = array[start:stop] if array.shape else array
    return np.asarray(part).astype(np.float32)


def _linear(arrays: Sequence[Array], weights: Sequence[float]) -> Blocks:
    def fetch(start: int, stop: int) -> np.ndarray:
        total = np.float32(weights[0]) * _rows(arrays[0], start, stop)
        for array, weight in zip(arrays[1:], weights[1:], strict=True):
            total += np.float32(weight) * _rows(array, start, stop)
        return np.asarray(total)

    return fetch


def _slerp(arrays: Sequence[Array], weights: Sequence[float]) -> Blocks:
    """sin((1 - t) Ω) / sin Ω · W_0 + sin(t Ω) / sin Ω · W_1, Ω the angle between the tensors."""

    @cache
    def both() -> tuple[float, float]:
        a, b = (_rows(array, 0, len(array) if array.shape else 1).ravel() for array in arrays)
        product, norms = float(a @ b), float(np.linalg.norm(a)) * float(np.linalg.norm(b))
        angle = float(np.arccos(np.clip(product / norms, -1, 1))) if norms else 0.0
        if np.sin(angle) < PARALLEL:
            return weights[0], weights[1]
        return tuple(float(np.sin(w * angle) / np.sin(angle)) for w in weights)  # type: ignore

    return lambda start, stop: _linear(arrays, both())(start, stop)


def _ties(
    arrays: Sequence[Array], base: Array, weights: Sequence[float], density: float, scale: float
) -> Blocks:
    @cache
    def least() -> tuple[float, ...]:
        """The magnitude from which on a model's differences are kept."""
        bounds = []
        for array in arrays:
            size = (0, len(array) if array.shape else 1)
            magnitudes = np.abs(_rows(array, *size) - _rows(base, *size)).ravel()
            kept = max(1, round(density * magnitudes.size))
            bounds.append(float(np.partition(magnitudes, -kept)[-kept]))
        return tuple(bounds)

    def fetch(start: int, stop: int) -> np.ndarray:
        origin = _rows(base, start, stop)
        differences = np.stack([_rows(array, start, stop) - origin for array in arrays])
        column = (-1, *[1] * origin.ndim)
        bounds = np.array(least(), np.float32).reshape(column)
        share = np.array(weights, np.float32).reshape(column)
        differences = np.where(np.abs(differences) >= bounds, differences, 0)
        elected = np.sign((share * differences).sum(0))
        agree = share * ((np.sign(differences) == elected) & (elected != 0))
        total = agree.sum(0)
        mean = (agree * differences).sum(0) / np.where(total > 0, total, 1)
        return np.asarray(origin + np.float32(scale) * mean)

    return fetch


# -- checkpoints


def _average_checkpoints(job: Job, options: MergeOptions, out: Path) -> int:
    """Average the last checkpoints of a run; the number of them."""
    if len(job.inputs) != 1:
        raise UsageError(f"--checkpoints: of {len(job.inputs)} runs (expected one run directory)")
    directory = RunDirectory(Path(job.inputs[0]))
    steps = sorted(local.steps(directory.checkpoints))[-options.checkpoints :]
    if len(steps) < options.checkpoints:
        raise UsageError(
            f"--checkpoints: {directory.path} has {len(steps)} (train it with --keep-checkpoints "
            f"{options.checkpoints})"
        )
    weights = Weights(options, len(steps))
    checkpoints = [local.verify(local.path_of(directory.checkpoints, step)) for step in steps]
    notes.note(f"checkpoints of steps {', '.join(f'{step:,}' for step in steps)}")
    spec = from_config(checkpoints[-1].manifest["config"])
    readers = [Reader(one) for one in checkpoints]
    if any(LORA in name for name in readers[-1]):
        raise UsageError(f"--checkpoints: {directory.path} trained adapters (expected the model)")
    numpy_type, params = numpy_dtype(options.export_dtype), dict[str, Any]()
    for tensor in spec.tensors():
        arrays = [reader[f"param/{tensor.name}"] for reader in readers]
        fetch = _linear(arrays, weights.of(tensor.name))
        whole = LazyArray(tensor.shape, np.dtype(np.float32), fetch)
        params[tensor.name] = cast(whole, numpy_type)
    if job.dry_run:
        print(json.dumps({"steps": steps}))
        return len(steps)
    final = directory.final if own_tokenizer(str(directory.final)) else None
    hub.save_model(out, spec, params, final)
    return len(steps)
