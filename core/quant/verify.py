"""A quantized directory, from any program, compared with its original model.

Both are read layer by layer. The directory is decoded by `core.numerics.compressed`; the names of
its tensors are compared with the parts that the format of each module has. GPT-OSS in the published
form (`export`) is read by `core.numerics.published`, 4 bits of bitsandbytes by `core.numerics.nf4`.
Where transformers and what it reads the form
with are installed, its logits are compared with ours.
"""

import contextlib
import importlib.util
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sabia.core import stop
from sabia.core.errors import UsageError
from sabia.core.model import forward
from sabia.core.model.storage import hub
from sabia.core.model.storage.layered_files import LayeredFiles
from sabia.core.notes import progress
from sabia.core.numerics import compressed, nf4
from sabia.core.numerics.floats import round_bfloat16
from sabia.core.numerics.published import BLOCKS, SCALES
from sabia.core.numerics.schemes import BITSANDBYTES, SCHEMES, Scheme, group_of, read_scheme
from sabia.core.ops.served_inputs import input_formats
from sabia.core.parallel.build_ops import load_ops, ops_as_served
from sabia.core.quant.divergence import Comparison
from sabia.core.quant.hessians import Batch
from sabia.core.quant.quantize import finite
from sabia.core.quant.recipe import component_of
from sabia.core.quant.rounding import weight_errors
from sabia.core.spec.tensors import FusedPart, TensorSpec

Arrays = dict[str, np.ndarray]
# the package with which transformers reads a form, by `quant_method`
READS = {"compressed-tensors": "compressed_tensors", "mxfp4": "accelerate"}
READS["bitsandbytes"] = "bitsandbytes"


@dataclass(frozen=True)
class Verified:
    """rows: the errors of each quantized matrix, and of other tensors that differ by more than
    rounding to BF16. unused: tensors that no module takes; missing: those that a module lacks.
    divergence: the entries of a Divergence, or None."""

    rows: list[dict[str, Any]]
    unused: list[str]
    missing: list[str]
    divergence: dict[str, Any] | None


@dataclass(frozen=True)
class Peer:
    """What transformers does with a directory.

    error: why it does not load it. difference: max |its logits - ours| / max |ours|, with weights
    in BF16 and arithmetic in float32. unused, missing: tensors by its own account.
    """

    error: str = ""
    difference: float | None = None
    unused: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def verify_directory(
    original: LayeredFiles,
    made: LayeredFiles,
    batches: Sequence[Batch] = (),
    sources: Sequence[str] = (),
) -> Verified:
    """Compare `made` with `original`; batches: tokens to compare the models on, and their sources.

    Raises UsageError for models of other shapes, BadData for a matrix that cannot be decoded or
    has NaN or infinite values.
    """
    spec = made.spec
    shapes = [{t.name: t.shape for t in files.spec.tensors()} for files in (original, made)]
    if shapes[0] != shapes[1]:
        raise UsageError("--verify: the models have different shapes (expected one architecture)")
    schemes = dict(_schemes(made))
    expected = {
        module + end for module, scheme in schemes.items() for end in _endings(made, scheme)
    }
    plain = {n for t in spec.tensors() for n in t.files if n.removesuffix(".weight") not in schemes}
    optional = {f"{module}.weight_g_idx" for module in schemes}
    unused = hub.unknown_names(spec, made.tensors.keys() - expected - plain - optional)
    missing = sorted(name for name in expected | plain if name not in made.tensors)
    if missing:
        return Verified([], sorted(unused), missing, None)
    comparison = Comparison(spec, (), batches, sources) if batches else None
    ops, rows = load_ops("torch"), list[dict[str, Any]]()

    def arrays(files: LayeredFiles, layer: int | None) -> Arrays:
        of = "--model" if files is original else "--verify"
        return finite(files.read(layer), f" of {of}")

    parts: list[int | None] = [*range(len(spec.layers)), None]
    with torch.inference_mode(), progress(len(parts), "verify", "layers") as bar:
        if comparison is not None:
            comparison.formats.update(input_formats(hub.with_input_scales(spec, made.tensors)))
            pair = (ops.to_device(arrays(files, None), "float32") for files in (original, made))
            comparison.begin(*pair)
        for layer in parts:
            stop.check()
            before, after = arrays(original, layer), arrays(made, layer)
            for tensor in spec.tensors():
                if tensor.layer == layer:
                    rows += _rows(tensor, before[tensor.name], after[tensor.name], schemes, made)
            if comparison is not None:
                comparison.advance(
                    layer, ops.to_device(before, "float32"), ops.to_device(after, "float32")
                )
            bar.advance(layer=layer)
    result = comparison.result if comparison is not None else None
    return Verified(rows, sorted(unused), [], None if result is None else asdict(result))


def _schemes(made: LayeredFiles) -> Iterator[tuple[str, Scheme]]:
    """The format of each module that the configuration quantizes."""
    config = made.spec.config["quantization_config"]
    four_bits = set(nf4.matrices(made.tensors))
    for tensor in made.spec.tensors():
        for name in tensor.files if tensor.linear else ():
            module = name.removesuffix(".weight")
            if config["quant_method"] == "mxfp4":  # all experts, and nothing else
                if tensor.stacked:
                    yield module, SCHEMES["mxfp4a16"]
                continue
            if config["quant_method"] == "bitsandbytes":
                if name in four_bits:
                    double = f"{name}.nested_absmax" in made.tensors
                    scheme = BITSANDBYTES["nf4-double" if double else "nf4"]
                    fp4 = f"{name}{nf4.STATE}fp4" in made.tensors
                    yield module, replace(scheme, element="fp4") if fp4 else scheme
                continue
            group = group_of(config, module)
            if group is not None and group.get("weights") is not None:
                yield module, read_scheme(group, str(config.get("format")))


def _endings(made: LayeredFiles, scheme: Scheme) -> Iterable[str]:
    """What follows the name of a quantized module in the names of its tensors."""
    if made.spec.config["quantization_config"]["quant_method"] == "mxfp4":
        return BLOCKS, SCALES
    if scheme.bitsandbytes:
        nested = scheme.scale == "u8"
        parts = (part for part in nf4.PARTS[:-2] if nested or "nested" not in part)
        return (f".weight{part}" for part in (*parts, nf4.STATE + scheme.element))
    return (f".{part}" for part in compressed.layout(scheme, 1, scheme.group or 1))


def _rows(
    tensor: TensorSpec,
    before: np.ndarray,
    after: np.ndarray,
    schemes: dict[str, Scheme],
    made: LayeredFiles,
) -> Iterator[dict[str, Any]]:
    """The rows of a tensor, one for each expert that the files hold by itself."""
    alone = isinstance(tensor.hf, tuple)
    for index, name in enumerate(tensor.files):
        module = name.removesuffix(".weight")
        scheme, old, new = schemes.get(module), before, after
        if alone:
            old, new = before[index], after[index]
        if scheme is None and np.array_equal(round_bfloat16(old), round_bfloat16(new)):
            continue
        size = sum(made.tensors[key].nbytes for key in made.modules.get(module, ()))
        if isinstance(tensor.hf, FusedPart):  # its share
            size = size * tensor.size // math.prod(tensor.hf.shape)
        yield {
            "layer": tensor.layer,
            "component": component_of(tensor),
            "module": module,
            "scheme": "bf16" if scheme is None else _label(scheme),
            "bits": 16 if scheme is None else scheme.bits,
            "size_bytes": size or None,
            **weight_errors(old, new),
        }


def _label(scheme: Scheme) -> str:
    if scheme.bitsandbytes:
        return scheme.name.replace("nf4", scheme.element)
    return f"{scheme.element} by {scheme.strategy}"


def with_transformers(directory: str | Path, ids: np.ndarray) -> Peer | None:
    """Load the directory by transformers and compare logits for ids[B, T]; None where transformers
    or the package of READS is not installed."""
    spec, params = hub.load_model(directory)
    package = READS[spec.config["quantization_config"]["quant_method"]]
    if not all(map(importlib.util.find_spec, ("transformers", package))):
        return None
    with contextlib.redirect_stderr(io.StringIO()):  # its progress and its table of names
        try:
            theirs, info = _their_logits(directory, ids)
        except Exception as error:  # whatever it does not load, for any reason
            lines = str(error).strip().splitlines() or [""]
            return Peer(error=f"{type(error).__name__}: {lines[0]}")
    ops = ops_as_served("torch", spec)
    # it holds decoded matrices in BF16, and decodes those of bitsandbytes for each product
    narrow = round_bfloat16 if package != READS["bitsandbytes"] else np.ascontiguousarray
    rounded = {name: narrow(np.array(x, np.float32)) for name, x in params.items()}
    with torch.inference_mode():
        weights = ops.to_device(rounded, "float32")
        hidden = forward.hidden(spec, weights, ids, ops)
        ours = forward.logits(spec, weights, hidden, ops).cpu().numpy()
    return Peer(
        "",
        float(np.abs(theirs - ours).max() / np.abs(ours).max()),
        sorted(info["unexpected_keys"]),
        sorted(info["missing_keys"]),
    )


def _their_logits(directory: str | Path, ids: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(str(directory), dtype=torch.bfloat16, output_loading_info=True)
    for module in model.modules():
        if hasattr(module, "compute_dtype"):  # of bitsandbytes
            module.compute_dtype, module.support_avx512bf16_for_cpu = torch.float32, False
    tokens = torch.from_numpy(ids)
    with torch.inference_mode():
        model(tokens)  # the first pass decodes the weights
        return torch.nn.Module.float(model)(tokens).logits.numpy(), info
