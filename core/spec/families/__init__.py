"""The families: one file each, one entry each in the table below.

A family's file offers `read(Fields) -> ModelSpec`: it takes every configuration field that
changes the maths and composes the parts of `core/spec/layers.py`. Nothing else is needed for
initialisation, loading, export, counting, sharding or either backend.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from sabia.core.errors import BadData, UsageError
from sabia.core.spec.fields import Fields
from sabia.core.spec.heads import Classifier, is_classifier, label_names
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.stored import as_stored

# model_type → module and its reader, imported where such a model is read
_FAMILIES: Mapping[str, tuple[str, str]] = {
    "llama": ("llama", "read"),
    "qwen3": ("qwen3", "read"),
    "mistral": ("mistral", "read"),
    "gemma2": ("gemma2", "read"),
    "gemma3": ("gemma3", "read_whole"),
    "gemma3_text": ("gemma3", "read"),
    "olmo2": ("olmo2", "read"),
    "mixtral": ("mixtral", "read"),
    "deepseek_v3": ("deepseek_v3", "read"),
    "gpt_oss": ("gpt_oss", "read"),
    "qwen3_moe": ("qwen3_moe", "read"),
    "qwen3_next": ("qwen3_next", "read"),
    "qwen3_5": ("qwen3_5", "read_whole"),
    "qwen3_5_text": ("qwen3_5", "read"),
    "qwen3_5_moe": ("qwen3_5", "read_whole"),
    "qwen3_5_moe_text": ("qwen3_5", "read"),
    "modernbert": ("modernbert", "read"),
}


def families() -> tuple[str, ...]:
    """Names (`model_type`) of the families that can be read."""
    return tuple(_FAMILIES)


def from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a Hugging Face configuration describes.

    Raises UsageError naming the field that is missing, wrong or not computed here.
    """
    family = str(config.get("model_type"))
    if family not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise UsageError(f"config.json: model_type is {family!r} (expected one of {known})")
    fields = Fields(config)
    spec = _reader(family)(fields)
    fields.finish()
    spec = replace(spec, config=dict(config))
    return with_classifier(spec, config) if is_classifier(config) else spec


def _reader(family: str) -> Callable[[Fields], ModelSpec]:
    module, name = _FAMILIES[family]
    found: Callable[[Fields], ModelSpec] = getattr(import_module(f"{__name__}.{module}"), name)
    return found


def with_classifier(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """The model with the head that the `...ForSequenceClassification` of `config` has.

    A decoder's scores are a matrix's, of the last token; an encoder says how it pools.
    """
    names = {"classifier": "score.weight", **spec.names}
    if "text_config" in config:
        raise UsageError(
            f"config.json: a {spec.family} classifier (expected a model of texts alone)"
        )
    pooling: Any = "last" if spec.causal else config.get("classifier_pooling") or "cls"
    head = Classifier(len(label_names(config)), pooling, bias=not spec.causal)
    changes: dict[str, Any] = {"classifier": head, "names": names, "config": dict(config)}
    return replace(spec, **changes, tied=False, head_bias=False, kept=())


def read_config(path: str | Path) -> dict[str, Any]:
    """The configuration in a directory's config.json, or in that file."""
    file = _config_file(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"model: {file} does not exist (expected a model directory)") from None
    except ValueError as error:
        raise BadData(f"model: {file} is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise BadData(f"model: {file} is not a JSON object (expected a configuration)")
    return config


def load_spec(path: str | Path) -> ModelSpec:
    """The model described by a directory's config.json, or by that file."""
    return as_stored(from_config(read_config(path)), _config_file(path).parent)


def _config_file(path: str | Path) -> Path:
    file = Path(path)
    return file / "config.json" if file.is_dir() else file
