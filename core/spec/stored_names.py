"""The tensor names of a model directory, for families whose files have one of two layouts.

Experts, for instance, are stored one by one or all of a layer in one tensor, and config.json does
not tell which. The names are read from the index, or from the header of a single file.
"""

import json
from dataclasses import replace
from pathlib import Path

from sabia.core.errors import BadData
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import FusedPart


def with_stored_names(spec: ModelSpec, directory: Path) -> ModelSpec:
    """`spec` with the layout of names in the directory; unchanged if it has no such files."""
    if not spec.other_names:
        return spec
    stored = file_names(directory)
    templates = [n.file if isinstance(n, FusedPart) else n for n in spec.other_names.values()]
    # a quantized matrix has no tensor M.weight but several of its module M
    modules = {name.rpartition(".")[0] for name in stored if name.endswith(".weight_scale")}
    stored |= {f"{module}.weight" for module in modules}
    layers = range(len(spec.layers))
    names = (name.format(layer=layer, expert=0) for name in templates for layer in layers)
    if not any(name in stored for name in names):
        return spec
    return replace(spec, names={**spec.names, **spec.other_names}, other_names=spec.names)


def file_names(directory: Path) -> frozenset[str]:
    """Names of the tensors in a model directory; empty if it has no safetensors file."""
    index, single = (directory / f"model.safetensors{end}" for end in (".index.json", ""))
    try:
        if index.is_file():
            return frozenset(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        if not single.is_file():
            return frozenset()
        with single.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return frozenset(json.loads(file.read(min(size, single.stat().st_size))))
    except (ValueError, KeyError, TypeError):
        raise BadData(f"model: {directory} has no readable list of tensors") from None
