"""LoRA adapters in the files of the peft package: adapter_config.json, adapter_model.safetensors.

peft names the modules that an adapter changes either by their last name, in every layer, or by
their whole path; we write last names where they mean the same, so that other programs (vLLM, …)
read them as well. What an adapter may ask for beyond plain LoRA is refused by name.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core.errors import BadData, UsageError
from sabia.core.model.lora import LoraConfig, adaptable, lora_tensors, targeted
from sabia.core.model.safetensors_file import read_tensors, write_tensors
from sabia.core.shards.atomic import atomic_directory
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import FileName, Part, TensorSpec

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# settings of peft that change the maths → values with which they do not
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
    "kasa_config": (None,),
    "arrow_config": (None,),
}


def save_adapter(
    directory: str | Path,
    spec: ModelSpec,
    params: Mapping[str, np.ndarray],
    config: LoraConfig,
    base_model: str = "",
) -> None:
    """Write the adapters in `params` for peft; `base_model`: where the model itself lies."""
    tensors = lora_tensors(spec, config)
    fused = next((t for t in targeted(spec, config) if not isinstance(t.hf, str)), None)
    if fused is not None:
        raise UsageError(
            f"adapter: {fused.name} is part of a fused matrix in the {spec.family} family's files "
            "(expected a matrix of its own: merge the adapters instead)"
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
        write_tensors(temporary / WEIGHTS, arrays, {"format": "pt"})


def _modules(tensors: Iterable[TensorSpec]) -> set[str]:
    """The modules of the model's files that hold the tensors."""
    files = (_files(t.hf) for t in tensors)
    return {name.removesuffix(".weight") for names in files for name in names}


def _files(hf: FileName) -> tuple[str, ...]:
    if isinstance(hf, Part):
        return (hf.file,)
    return (hf,) if isinstance(hf, str) else hf


def _target_modules(spec: ModelSpec, config: LoraConfig) -> list[str]:
    """Last names where all modules of that name are meant, else whole paths."""
    wanted = _modules(targeted(spec, config))
    others = {name.rpartition(".")[2] for name in _modules(spec.tensors()) - wanted}
    last = {name.rpartition(".")[2] for name in wanted}
    return sorted(wanted if last & others else last)


def load_adapter(
    directory: str | Path, spec: ModelSpec
) -> tuple[LoraConfig, dict[str, np.ndarray]]:
    """(configuration, name → array) of an adapter that peft or `save_adapter` wrote.

    Rank-stabilised scales (alpha/sqrt(rank)) become the alpha that gives the same. Raises
    UsageError for adapters that are more than plain LoRA, BadData for what does not fit `spec`.
    """
    root = Path(directory)
    settings = _settings(root)
    rank = int(settings["r"])
    alpha = float(settings["lora_alpha"])
    if settings.get("use_rslora"):
        alpha *= math.sqrt(rank)
    arrays = read_tensors(root / WEIGHTS)
    modules = {name.rpartition(".lora_")[0].removeprefix(_PREFIX) for name in arrays}
    names = [t.name for t in adaptable(spec) if _modules([t]) <= modules]
    if not names:
        raise BadData(f"adapter: {root} fits no matrix of the {spec.family} model")
    config = LoraConfig(rank, alpha, _expression(spec, names))
    return config, _take(root, spec, config, arrays)


def _settings(root: Path) -> dict[str, Any]:
    try:
        settings = json.loads((root / CONFIG).read_text(encoding="utf-8"))
        kind, _, _ = settings["peft_type"], settings["r"], settings["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadData(f"adapter: {root / CONFIG} is not readable ({error})") from None
    if kind != "LORA":
        raise UsageError(f"adapter: {root} is {kind} (expected LORA)")
    for name, plain in _PLAIN.items():
        if name in settings and settings[name] not in plain:
            raise UsageError(
                f"adapter: {root} has {name} = {settings[name]!r} (expected {plain[-1]!r}: merge "
                "it with peft first)"
            )
    return settings


def _expression(spec: ModelSpec, names: list[str]) -> str:
    """A regular expression that targets exactly these matrices."""
    if len(names) == len(adaptable(spec)):
        return ""
    return "^(" + "|".join(re.escape(name) for name in names) + ")$"


def _take(
    root: Path, spec: ModelSpec, config: LoraConfig, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    tensors = lora_tensors(spec, config)
    odd = sorted({str(t.hf) for t in tensors} ^ set(arrays))
    if odd:
        raise BadData(f"adapter: {root}: tensor {odd[0]} is missing or unknown to the model")
    for tensor in tensors:
        found = arrays[str(tensor.hf)].shape
        if found != tensor.shape:
            raise BadData(f"adapter: {root}: {tensor.hf} is {found} (expected {tensor.shape})")
    return {t.name: arrays[str(t.hf)] for t in tensors}
