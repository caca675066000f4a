"""LoRA adapters in the format of the peft package: adapter_config.json, adapter_model.safetensors.

peft names the modules with an adapter by their last name, for all layers, or by their whole path;
we write last names if they are equivalent, because other programs (vLLM, …) read those as well.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from sabia.core.errors import UsageError
from sabia.core.model.lora import LoraConfig, lora_tensors, targeted
from sabia.core.model.storage.safetensors_file import write_tensors
from sabia.core.shards.atomic import atomic_directory
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import FileName, FusedPart, TensorSpec

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def save_adapter(
    directory: str | Path,
    spec: ModelSpec,
    params: Mapping[str, np.ndarray],
    config: LoraConfig,
    base_model: str = "",
) -> None:
    """Write the adapters in `params` for peft; base_model: name or path of the model itself."""
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
        write_tensors(temporary / WEIGHTS, arrays, {"format": "pt"})


def _file_modules(tensors: Iterable[TensorSpec]) -> set[str]:
    """The modules of the model's files that hold the tensors."""
    files = (_files(t.hf) for t in tensors)
    return {name.removesuffix(".weight") for names in files for name in names}


def _files(hf: FileName) -> tuple[str, ...]:
    if isinstance(hf, FusedPart):
        return (hf.file,)
    return (hf,) if isinstance(hf, str) else hf


def _target_modules(spec: ModelSpec, config: LoraConfig) -> list[str]:
    """Last names, if they select exactly the targeted modules, otherwise whole paths."""
    wanted = _file_modules(targeted(spec, config))
    others = {name.rpartition(".")[2] for name in _file_modules(spec.tensors()) - wanted}
    last = {name.rpartition(".")[2] for name in wanted}
    return sorted(wanted if last & others else last)
