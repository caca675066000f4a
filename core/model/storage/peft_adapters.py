"""LoRA adapters in the format of the peft package: adapter_config.json, adapter_model.safetensors.

peft names the modules with an adapter by their last name, for all layers, or by their whole path;
we write last names if they are equivalent, because other programs (vLLM, …) read those as well.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core.errors import BadData, UsageError
from sabia.core.model.lora import A, B, LoraConfig, adaptable, lora_tensors, targeted
from sabia.core.model.storage.hub import read_part
from sabia.core.model.storage.safetensors_file import read_header, read_tensors, write_tensors
from sabia.core.shards.atomic import atomic_directory
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import FusedPart, TensorSpec

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_weights"  # in the metadata of WEIGHTS


def save_adapter(
    directory: str | Path,
    spec: ModelSpec,
    params: Mapping[str, np.ndarray],
    config: LoraConfig,
    base_model: str = "",
    base_fingerprint: str = "",
) -> None:
    """Write the adapters in `params` for peft; base_model: name or path of the model itself.

    base_fingerprint: of its weights, kept in the metadata of the file ('': not known).
    """
    tensors = lora_tensors(spec, config)
    fused_matrix = next((t for t in targeted(spec, config) if not isinstance(t.hf, str)), None)
    if fused_matrix is not None:
        raise UsageError(
            f"adapter: {fused_matrix.name} is part of a fused matrix in the files of the "
            f"{spec.family} family (expected a matrix of its own: merge the adapters instead)"
        )
    alpha = int(config.alpha) if float(config.alpha).is_integer() else config.alpha
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "target_modules": _target_modules(spec, config),
    }
    with atomic_directory(directory) as temporary:
        text = json.dumps(settings, indent=2) + "\n"
        (temporary / CONFIG).write_text(text, encoding="utf-8")
        arrays = {str(t.hf): np.asarray(params[t.name]) for t in tensors}
        known = {BASE: base_fingerprint} if base_fingerprint else {}
        write_tensors(temporary / WEIGHTS, arrays, {"format": "pt", **known})


def load_adapter(
    directory: str | Path, spec: ModelSpec
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(A[rank, in], alpha/rank · B[out, rank]), float32, by the name of their matrix.

    Adapters of this module, and LoRA of peft with any targets among `adaptable`, ranks and alphas
    of single modules, and rsLoRA. Raises UsageError for what is not LoRA of this model, BadData for
    damaged files.
    """
    pairs = _pairs(Path(directory), spec)
    return {name: (a, np.float32(scale) * b) for name, (a, b, scale) in pairs.items()}


def start_adapter(
    directory: str | Path, spec: ModelSpec
) -> tuple[LoraConfig, dict[str, np.ndarray]]:
    """(configuration, tensors by name) to go on training an adapter; raises as `load_adapter`.

    Raises UsageError besides where its modules have several ranks or scales.
    """
    pairs = _pairs(Path(directory), spec)
    kinds = {(len(a), scale) for a, _, scale in pairs.values()}
    if len(kinds) != 1:
        raise UsageError(
            f"adapter: {directory} has modules of {len(kinds)} ranks and scales (expected one: "
            "merge it instead)"
        )
    ((rank, scale),) = kinds
    tensors = {name + A: a for name, (a, *_) in pairs.items()}
    tensors |= {name + B: b for name, (_, b, _) in pairs.items()}
    last = sorted({name.split(".", 2)[-1] for name in pairs})
    for ends in (f"layers\\.\\d+\\.({'|'.join(map(re.escape, last))})$",
                 f"^({'|'.join(map(re.escape, pairs))})$"):  # fmt: skip
        config = LoraConfig(rank, scale * rank, ends)
        if {t.name for t in targeted(spec, config)} == pairs.keys():
            break
    return config, tensors


def base_fingerprint(directory: str | Path) -> str:
    """The fingerprint of the weights that an adapter was trained on; '' if it has none."""
    metadata = read_header(Path(directory) / WEIGHTS)[0].get("__metadata__") or {}
    return str(metadata.get(BASE, ""))


def _pairs(root: Path, spec: ModelSpec) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    """(A[rank, in], B[out, rank], scale) by the name of their matrix; see load_adapter."""
    settings = _settings(root)
    tensors = {
        re.sub(r"(^base_model\.model\.|\.weight$)", "", name): np.asarray(tensor, np.float32)
        for name, tensor in read_tensors(root / WEIGHTS).items()
    }
    pairs, used = {}, set[str]()
    for matrix in adaptable(spec):
        module = matrix.files[0].removesuffix(".weight")
        names = [f"{module}.lora_{part}" for part in "AB"]
        if not used.issuperset(names) and not tensors.keys() >= set(names):
            continue
        used |= {*names}
        a, b = (tensors[name] for name in names)
        if isinstance(matrix.hf, FusedPart):
            b = b[_rows(matrix.hf, matrix.shape[0])] if len(b) == matrix.hf.shape[0] else b[:0]
        if (len(b), a.shape[1], b.shape[1]) != (*matrix.shape, len(a)):
            raise UsageError(
                f"adapter: {root} is of another model: {names[0]} {list(a.shape)} (expected "
                f"{matrix.shape[1]} columns)"
            )
        pairs[matrix.name] = a, b, _scale(settings, module, len(a))
    if unknown := sorted(tensors.keys() - used):
        raise UsageError(
            f"adapter: {root}: {unknown[0]} changes no matrix of this model that can have an "
            f"adapter ({len(unknown)} of {len(tensors)} tensors; merge it instead)"
        )
    return pairs


def _settings(root: Path) -> dict[str, object]:
    """adapter_config.json; raises UsageError for what `load_adapter` does not compute."""
    if not (root / CONFIG).is_file() or not (root / WEIGHTS).is_file():
        raise UsageError(f"adapter: {root} has no {CONFIG} or {WEIGHTS} (expected both)")
    try:
        settings = json.loads((root / CONFIG).read_text(encoding="utf-8"))
        kind = settings["peft_type"]
    except (ValueError, KeyError, TypeError):
        raise BadData(
            f"adapter: {root / CONFIG} has no peft_type (expected JSON with one)"
        ) from None
    plain = {"use_dora": False, "bias": "none", "modules_to_save": None, "fan_in_fan_out": False}
    other = [key for key, value in plain.items() if (settings.get(key) or value) != value]
    if kind != "LORA" or other:
        unsupported = f"{other[0]} {settings[other[0]]}" if other else f"peft_type {kind}"
        raise UsageError(f"adapter: {root}: {unsupported} is not supported (expected plain LoRA)")
    return dict(settings)


def _scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / rank of a module, or alpha / √rank (rsLoRA, arXiv 2312.03732)."""
    alpha = settings.get("lora_alpha", 8)  # the default of peft
    for pattern, own in (settings.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = own
            break
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _rows(part: FusedPart, rows: int) -> np.ndarray:
    """The rows of the file's matrix that are those of a part of it."""
    columns = part.shape[-1]
    if part.view[-1] != columns or part.order[-1] != len(part.view) - 1:
        raise UsageError(f"adapter: {part.file} is not fused by rows (expected a merged model)")
    height = part.shape[0]
    narrow = replace(part, shape=(height, 1), view=(*part.view[:-1], 1),
                     cut=(*part.cut[:-1], (0, 1, 1)))  # fmt: skip
    return read_part(narrow, np.arange(height)[:, None], (rows, 1))[:, 0]


def _file_modules(tensors: Iterable[TensorSpec]) -> set[str]:
    """The modules of the model's files that hold the tensors."""
    return {name.removesuffix(".weight") for tensor in tensors for name in tensor.files}


def _target_modules(spec: ModelSpec, config: LoraConfig) -> list[str]:
    """Last names, if they select exactly the targeted modules, otherwise whole paths."""
    wanted = _file_modules(targeted(spec, config))
    others = {name.rpartition(".")[2] for name in _file_modules(spec.tensors()) - wanted}
    last = {name.rpartition(".")[2] for name in wanted}
    return sorted(wanted if last & others else last)
