"""Quantization of a model directory into another: one layer is in memory, whatever the depth.

A layer is read from the files, rounded, and kept next to the output (`finished`) with the states of
the tokens after it; a run that was killed goes on after the last finished layer. At the end the
layers are written as one directory, which is read again: it must have the very values that were
measured.
"""

import errno
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_128_hexdigest

from sabia.core import notes, stop
from sabia.core.errors import BadData, Failed
from sabia.core.model.storage import hub
from sabia.core.model.storage.layered_files import LayeredFiles
from sabia.core.notes import progress
from sabia.core.ops.base import Ops
from sabia.core.quant.divergence import Comparison
from sabia.core.quant.export import as_published, export_config, published_tensors, stored_tensors
from sabia.core.quant.finished import FinishedLayers
from sabia.core.quant.hessians import Batch
from sabia.core.quant.quantize import Part, Rounding, check_finite
from sabia.core.quant.recipe import Recipe, plan, stored_form
from sabia.core.spec import ModelSpec
from sabia.core.spec.families import TRAINED_FOR
from sabia.core.text.tokenize.tokenizer import load_tokenizer


@dataclass(frozen=True)
class QuantizedDirectory:
    """config: config.json as it is written. rows: the errors of each quantized matrix. divergence:
    the entries of a Divergence, or None."""

    config: dict[str, Any]
    rows: list[dict[str, Any]]
    divergence: dict[str, Any] | None
    size_bytes: int


def quantize_directory(
    files: LayeredFiles,
    out: Path,
    recipe: Recipe,
    ops: Ops,
    finished: FinishedLayers,
    calibration: Sequence[Batch] = (),
    held_out: Sequence[Batch] = (),
    sources: Sequence[str] = (),
    tokenizer_from: str | None = None,
) -> QuantizedDirectory:
    """Quantize `files` to the directory `out`, in the recipe's form of files (container): `dense`
    has all values in float32, as those of a model that is not quantized.

    sources: of each held-out row. tokenizer_from: the directory with the tokenizer.

    Raises what `quantize` raises, before any layer is computed, and Failed where the written model
    is not the measured one. After errors of the data or the disk no finished layer is left.
    """
    with _removed_after_errors(finished):
        spec = files.spec
        parts: list[int | None] = [*range(len(spec.layers)), None]
        linears = plan(stored_form(spec, recipe), recipe)
        comparison = Comparison(spec, linears, held_out, sources) if held_out else None
        work = Rounding(spec, files.read, recipe, ops, calibration, comparison)
        done = len(finished.records)
        if done == 0:
            for layer in parts:
                stop.check()
                for name, array in files.read(layer).items():
                    check_finite(name, array)
            work.begin()
        elif done < len(parts):
            _restore(work, finished.states(), ops)
        if done:
            notes.note(f"{done} of {len(parts)} parts are finished in {finished.folder}; going on")
        with progress(len(parts), "quantize", "layers") as bar, _collected_quickly():
            bar.advance(done)
            for layer in parts[done:]:
                stop.check()
                _keep(work, work.part(layer), finished)
                gc.collect()  # operations are in cycles, which hold states and Hessians of a layer
                bar.advance(layer=layer)
        tensors = _in_order(work, finished)
        config = {key: value for key, value in spec.config.items() if key != TRAINED_FOR}
        if recipe.container == "gguf":
            from sabia.core.quant import gguf_file

            tokenizer = load_tokenizer(tokenizer_from) if tokenizer_from else None
            gguf_file.write_gguf(out, work.form, recipe, tensors, tokenizer)
            _check_gguf(out / gguf_file.FILE, work.form, finished)
        else:
            if recipe.container != "dense":
                config = export_config(work.form, work.linears)
            hub.write_checkpoint(out, config, tensors, tokenizer_from=tokenizer_from)
            _check_written(out, parts, finished)
        rows = [row for record in finished.records for row in record["rows"]]
        size = sum(array.nbytes for array in tensors.values())
        return QuantizedDirectory(config, rows, finished.records[-1]["divergence"], size)


@contextmanager
def _removed_after_errors(finished: FinishedLayers) -> Iterator[None]:
    """After errors of the data or the disk no finished layer is left."""
    try:
        yield
    except (BadData, Failed, OSError) as error:
        if not isinstance(error, OSError) or error.errno != errno.EINTR:
            finished.remove()
        raise


@contextmanager
def _collected_quickly() -> Iterator[None]:
    """The collector of cycles leaves out what there is at the beginning (modules, above all)."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _keep(work: Rounding, part: Part, finished: FinishedLayers) -> None:
    dense = work.recipe.container == "dense"
    published = work.recipe.container == "compressed-tensors" and as_published(
        work.spec, work.linears
    )
    spec = work.spec if dense or published else work.form
    table = [tensor for tensor in spec.tensors() if tensor.layer == part.layer]
    if dense:
        tensors = hub.file_tensors(table, part.values)
    elif published:
        tensors = published_tensors(table, part.stored, part.values)
    elif work.recipe.container == "gguf":
        from sabia.core.quant.gguf_file import plain_dtype

        tensors = stored_tensors(table, work.linears, part.stored, part.values, plain_dtype)
    else:
        tensors = stored_tensors(table, work.linears, part.stored, part.values)
    last = part.layer is None
    states = {} if last else {name: x.cpu().numpy() for name, x in _states(work)}
    result = work.comparison.result if work.comparison is not None else None
    values = {name: _digest(array) for name, array in part.values.items()}
    record = {
        "rows": part.rows,
        "values": values,
        "divergence": None if result is None else asdict(result),
    }
    finished.add(tensors, states, record)


def _states(work: Rounding) -> list[tuple[str, Any]]:
    kinds = [("calibration", work.states)]
    if work.comparison is not None:
        kinds += zip(("original", "quantized"), work.comparison.states, strict=True)
    return [(f"{kind}.{n}", x) for kind, states in kinds for n, x in enumerate(states)]


def _restore(work: Rounding, states: dict[str, np.ndarray], ops: Ops) -> None:
    arrays = ops.to_device(states, "float32")

    def of(kind: str, count: int) -> list[Any]:
        return [arrays[f"{kind}.{number}"] for number in range(count)]

    work.states = of("calibration", len(work.calibration))
    if work.comparison is not None:
        for kind, own in zip(("original", "quantized"), work.comparison.states, strict=True):
            own[:] = of(kind, len(work.comparison.batches))


def _in_order(work: Rounding, finished: FinishedLayers) -> dict[str, Any]:
    """All tensors in the order of the model."""
    tensors = finished.tensors()
    modules = {x.tensor.name: x.module for x in work.linears if x.index is None}
    first = next(i for i, t in enumerate(work.form.tensors()) if t.layer is not None)
    begin = {name for t in work.form.tensors()[:first] for name in (*t.files, modules.get(t.name))}
    return {name: tensors[name] for name in sorted(tensors, key=lambda name: name not in begin)}


def _check_written(out: Path, parts: Sequence[int | None], finished: FinishedLayers) -> None:
    written = LayeredFiles(out)
    for layer, record in zip(parts, finished.records, strict=True):
        for name, array in written.read(layer).items():
            _check_value(out, name, array, record)


def _check_gguf(path: Path, spec: ModelSpec, finished: FinishedLayers) -> None:
    from sabia.core.quant.gguf_file import read_gguf

    for tensor, array in read_gguf(path, spec):
        record = finished.records[-1 if tensor.layer is None else tensor.layer]
        _check_value(path, tensor.name, array, record)


def _check_value(path: Path, name: str, array: np.ndarray, record: dict[str, Any]) -> None:
    if _digest(array) != record["values"][name]:
        raise Failed(f"{path}: {name} does not load back as it was written (is the disk full?)")


def _digest(array: np.ndarray) -> str:
    return str(xxh3_128_hexdigest(np.ascontiguousarray(array, np.float32).data))
