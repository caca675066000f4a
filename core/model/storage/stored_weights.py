"""Model directories that `sabia quantize` writes, for running them on their stored weights."""

from pathlib import Path
from typing import Any

import numpy as np

from sabia.core.errors import BadData
from sabia.core.model.lora import APART
from sabia.core.model.storage.hub import (
    decoded,
    from_hf,
    load_model,
    read_checkpoint,
    with_input_scales,
)
from sabia.core.numerics.stored import Stored, StoredStack, is_nf4, part_names, stored_matrix
from sabia.core.spec.families import load_spec
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import TensorSpec


def load_stored(directory: str | Path) -> tuple[ModelSpec, dict[str, np.ndarray | Stored]]:
    """As `hub.load_model`, but the matrices of layers that are quantized in compressed-tensors or
    NF4 stay as they are stored, for `Ops.to_device`.

    Matrices that are part of a fused one in the files, or that are used apart from products, are
    decoded.
    """
    spec, tensors = load_spec(directory), read_checkpoint(directory)
    config = spec.config.get("quantization_config") or {}
    if config.get("quant_method") not in ("compressed-tensors", "bitsandbytes"):
        return spec, dict(from_hf(spec, decoded(spec, tensors)))
    spec = with_input_scales(spec, tensors)
    kept: dict[str, np.ndarray | Stored] = {}
    for tensor in spec.tensors():
        if (stored := _stored(tensor, tensors, config)) is not None:
            kept[tensor.name] = stored
            for name in tensor.files:  # of which none is left to be decoded
                for part in part_names(name, config):
                    tensors.pop(part, None)
    return spec, dict(from_hf(spec, decoded(spec, tensors), kept))


def load_base(directory: str | Path, base: frozenset[str], form: str) -> dict[str, Any]:
    """The parameters as `hub.load_model` gives them; for the form nf4 of core.numerics.frozen_base
    those of `base` that the directory has in NF4 stay as they are stored."""
    if form != "nf4":
        return {**load_model(directory)[1]}
    _, params = load_stored(directory)
    return {
        name: x.decoded() if isinstance(x, Stored) and not (name in base and is_nf4(x)) else x
        for name, x in params.items()
    }


def _stored(
    tensor: TensorSpec, tensors: dict[str, np.ndarray], config: dict[str, object]
) -> Stored | None:
    """A quantized matrix of the layers; None if it is not one, or is needed as an array."""
    usable = tensor.linear and tensor.name.startswith("layers.")
    if not usable or tensor.name.endswith(APART) or not isinstance(tensor.hf, str | tuple):
        return None
    rows, columns = tensor.shape[-2:]
    try:
        parts = [stored_matrix(name, tensors, config, (rows, columns)) for name in tensor.files]
    except (KeyError, ValueError, BadData) as error:
        raise BadData(f"model: {tensor.name} cannot be decoded ({error})") from error
    matrices = [one for one in parts if one is not None]
    if not matrices or len(matrices) < len(parts):
        return None
    return matrices[0] if isinstance(tensor.hf, str) else StoredStack(matrices)
