"""A quantized model as a Hugging Face directory in the compressed-tensors format.

GPT-OSS with experts in MXFP4 and all else in BF16 is written as its authors publish it, which
transformers and servers read; they read no experts of it in compressed-tensors. NF4 is
written as transformers writes what bitsandbytes has quantized.

Every quantized matrix is stored as several tensors of its module, all else in BF16;
`quantization_config` in config.json lists the modules of each format. Inference servers and
transformers read the directory, and `hub.load_model` returns exactly the values that were measured.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sabia.core.model.storage import hub
from sabia.core.numerics.floats import numpy_dtype
from sabia.core.numerics.published import BLOCKS, SCALES
from sabia.core.numerics.schemes import (
    SCHEMES,
    Scheme,
    bitsandbytes_config,
    quantization_config,
)
from sabia.core.quant.hessians import Key
from sabia.core.quant.quantize import QuantizedModel
from sabia.core.quant.recipe import Linear
from sabia.core.quant.rounding import Stored
from sabia.core.spec import ModelSpec
from sabia.core.spec.families import TRAINED_FOR
from sabia.core.spec.tensors import FusedPart, TensorSpec


def export(
    directory: str | Path,
    quantized: QuantizedModel,
    tokenizer_from: str | Path | None,
) -> int:
    """Write the model directory; returns the bytes of its tensors."""
    spec, linears = quantized.spec, quantized.linears
    stored, params = quantized.stored, quantized.params
    if as_published(spec, linears):
        table = replace(spec, names=spec.other_names).tensors()
        tensors = published_tensors(table, stored, params)
    else:
        tensors = stored_tensors(spec.tensors(), linears, stored, params)
    config = export_config(spec, linears)
    hub.write_checkpoint(directory, config, tensors, tokenizer_from=tokenizer_from)
    return sum(array.nbytes for array in tensors.values())


def export_config(spec: ModelSpec, linears: Sequence[Linear]) -> dict[str, object]:
    """config.json with its quantization_config; dtype is that of the other tensors."""
    groups, ignore = _groups(linears)
    if spec.tied and "lm_head" not in ignore:
        ignore = ["lm_head", *ignore]
    config = {
        key: value for key, value in spec.config.items() if key not in ("torch_dtype", TRAINED_FOR)
    }
    if any(scheme.bitsandbytes for scheme in groups):
        quantization = bitsandbytes_config(groups, _skipped(spec, linears))
    else:
        quantization = quantization_config(groups, ignore)
    if as_published(spec, linears):
        quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ignore}
    return config | {"dtype": "bfloat16", "quantization_config": quantization}


def as_published(spec: ModelSpec, linears: Sequence[Linear]) -> bool:
    """Whether the model has the formats of published GPT-OSS models."""
    formats = {(x.index is not None, x.scheme) for x in linears if x.scheme.quantizes}
    return spec.family == "gpt_oss" and formats == {(True, SCHEMES["mxfp4a16"])}


def published_tensors(
    table: Sequence[TensorSpec], stored: Mapping[Key, Stored], values: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The tensors of the files (see core.numerics.published) that hold the parameters of `table`,
    of the model as it was read."""
    experts = [t for t in table if t.stacked and t.linear]
    tensors = stored_tensors([t for t in table if t not in experts], (), {}, values)
    for tensor in experts:
        part = tensor.hf
        assert isinstance(part, FusedPart)
        for name, suffix, shape in (("packed", BLOCKS, (-1, 16)), ("scale", SCALES, (-1,))):
            codes = [stored[tensor.name, n].parts[f"weight_{name}"] for n in range(part.shape[0])]
            own = np.stack(codes)  # [E, O, …]: rows are the columns of the file's tensor
            own = own.reshape(*own.shape[:2], *shape)
            whole = (part.shape[0], part.shape[-1], *own.shape[2:])
            made = tensors.setdefault(part.file + suffix, np.empty(whole, np.uint8))
            made[:, slice(*part.cut[-1])] = own
    return tensors


def stored_tensors(
    table: Sequence[TensorSpec],
    linears: Sequence[Linear],
    stored: Mapping[Key, Stored],
    values: Mapping[str, np.ndarray],
    plain_dtype: Callable[[TensorSpec], str] = lambda _: "bfloat16",
) -> dict[str, np.ndarray]:
    """The tensors of the files, by name, that hold the parameters of `table`, in its order.

    plain_dtype: of those that are not quantized.
    """
    parts: dict[str, dict[str, np.ndarray]] = {}
    rounded: set[str] = set()
    for linear in linears:
        if linear.key in stored:
            rounded |= {tensor.name for tensor in linear.tensors}
            for name, array in stored[linear.key].parts.items():
                parts.setdefault(linear.tensor.name, {})[f"{linear.module}.{name}"] = array
    others = [tensor for tensor in table if tensor.name not in rounded]
    dtypes = {t.name: numpy_dtype(plain_dtype(t)) for t in others}
    plain = hub.file_tensors(others, {n: values[n].astype(dtype) for n, dtype in dtypes.items()})
    tensors: dict[str, np.ndarray] = {}
    for tensor in table:
        tensors |= parts.get(tensor.name, {})
        if tensor.name not in rounded:
            tensors |= {name: plain[name] for name in tensor.files}
    return tensors


def _groups(linears: Sequence[Linear]) -> tuple[dict[Scheme, list[str]], list[str]]:
    """(module names by scheme, names of modules that stay BF16).

    Modules that differ only in numbers (layers, experts) and have one scheme become one pattern.
    """
    by_pattern: dict[str, list[Linear]] = {}
    for linear in linears:
        by_pattern.setdefault(_pattern(linear.module), []).append(linear)
    groups: dict[Scheme, list[str]] = {}
    ignore: list[str] = []
    for pattern, members in by_pattern.items():
        schemes = dict.fromkeys(member.scheme for member in members)
        for scheme in schemes:
            names = [m.module for m in members if m.scheme == scheme]
            targets = [pattern] if len(schemes) == 1 and len(names) > 1 else names
            (groups.setdefault(scheme, []) if scheme.quantizes else ignore).extend(targets)
    return groups, ignore


def _skipped(spec: ModelSpec, linears: Sequence[Linear]) -> list[str]:
    """The modules of matrices that stay BF16, by their names: all that may be Linear modules."""
    rounded = {linear.module for linear in linears if linear.scheme.quantizes}
    names = ["lm_head"] if spec.tied else []
    for tensor in spec.tensors():
        if len(tensor.shape) - tensor.stacked > 1 and tensor.component != "embedding":
            names += [n.removesuffix(".weight") for n in tensor.files if n.endswith(".weight")]
    names = [name for name in names if name not in rounded]
    some = set(map(_whole, rounded))
    return [*dict.fromkeys(n if _whole(n) in some else _whole(n) for n in names)]


def _whole(name: str) -> str:
    """The module of all experts of a layer for that of one, which stands for those in it."""
    before, mark, _ = name.partition(".experts.")
    return before + mark.removesuffix(".")


def _pattern(module: str) -> str:
    # layers.3.mlp.up_proj → re:layers\.\d+\.mlp\.up_proj$
    parts = (r"\d+" if part.isdecimal() else re.escape(part) for part in module.split("."))
    return "re:" + r"\.".join(parts) + "$"
