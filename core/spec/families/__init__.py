"""The model families: one file and one entry in the table below for each.

The file of a family has a function `read(Fields) -> ModelSpec`, which reads every configuration
field that changes the result and composes the parts of `core/spec/layers.py`. Initialization,
loading, export, counting, sharding and both backends need nothing else.

The files of some families have one of two layouts: experts, for instance, are stored one by one or
all of a layer in one tensor, and config.json does not tell which. The names of the tensors are read
from the index, or from the header of a single file.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from sabia.core.errors import BadData, UsageError
from sabia.core.spec.fields import Fields
from sabia.core.spec.model import ClassifierHead, ModelSpec, is_classifier, label_names
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


# model_type → module and function that reads it, imported at its first use
_FAMILIES: Mapping[str, tuple[str, str]] = {
    "llama": ("llama", "read"),
    "qwen3": ("qwen3", "read"),
    "mistral": ("mistral", "read"),
    "qwen2": ("qwen2", "read"),
    "gemma": ("gemma", "read"),
    "gemma2": ("gemma2", "read"),
    "gemma3": ("gemma3", "read_whole"),
    "gemma3_text": ("gemma3", "read"),
    "olmo2": ("olmo2", "read"),
    "mixtral": ("mixtral", "read"),
    "deepseek_v3": ("deepseek_v3", "read"),
    "minicpm": ("minicpm", "read"),
    "minicpm3": ("minicpm", "read_latent"),
    "gpt_oss": ("gpt_oss", "read"),
    "qwen3_moe": ("qwen3_moe", "read"),
    "qwen3_next": ("qwen3_next", "read"),
    "qwen3_5": ("qwen3_5", "read_whole"),
    "qwen3_5_text": ("qwen3_5", "read"),
    "qwen3_5_moe": ("qwen3_5", "read_whole"),
    "qwen3_5_moe_text": ("qwen3_5", "read"),
    "phi3": ("phi3", "read"),
    "modernbert": ("modernbert", "read"),
}
# key of the format that quantization-aware training has simulated: {"precision": "qat-int4"}
TRAINED_FOR = "quantization_aware_training"
# methods whose files core.model.storage.hub decodes
QUANTIZATIONS = ("mxfp4", "fp8", "compressed-tensors", "bitsandbytes")


def families() -> tuple[str, ...]:
    """Names (`model_type`) of the families that can be read."""
    return tuple(_FAMILIES)


def from_config(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a Hugging Face configuration describes.

    Raises UsageError with the field that is missing, wrong or not supported.
    """
    family = str(config.get("model_type"))
    if family not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise UsageError(f"config.json: model_type is {family!r} (expected one of {known})")
    fields = Fields(config)
    module, name = _FAMILIES[family]
    read: Callable[[Fields], ModelSpec] = getattr(import_module(f"{__name__}.{module}"), name)
    quantization = fields.take("quantization_config", dict, None)
    if quantization is not None:
        _check_quantization(quantization)
    fields.take(TRAINED_FOR, dict, None)
    spec = read(fields)
    fields.finish()
    spec = replace(spec, config=dict(config))
    return with_classifier(spec, config) if is_classifier(config) else spec


def _check_quantization(config: Mapping[str, Any]) -> None:
    """Raise UsageError unless the stored weights alone define the model, and can be decoded."""
    method = config.get("quant_method")
    if method not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        raise UsageError(f"config.json: quant_method is {method!r} (expected one of {known})")
    if config.get("transform_config"):
        raise UsageError(
            "config.json: quantization_config has a transform_config (expected weights without "
            "rotations at run time; give the model before it was quantized)"
        )


def with_classifier(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """The model with the head that the `...ForSequenceClassification` of `config` has.

    A decoder scores the last token; an encoder pools as its configuration says.
    """
    names = {"classifier": "score.weight", **spec.names}
    if "text_config" in config:
        raise UsageError(f"config.json: a {spec.family} classifier (expected a text-only model)")
    pooling: Any = "last" if spec.causal else config.get("classifier_pooling") or "cls"
    head = ClassifierHead(len(label_names(config)), pooling, bias=not spec.causal)
    changes: dict[str, Any] = {"classifier": head, "names": names, "config": dict(config)}
    return replace(spec, **changes, tied=False, head_bias=False, kept=())


MOST_LETTERS = 16 << 20  # of a config.json


def read_config(path: str | Path) -> dict[str, Any]:
    """The configuration in a directory's config.json, or in that file."""
    file = _config_file(path)
    try:
        with open(file, encoding="utf-8") as stream:
            text = stream.read(MOST_LETTERS + 1)
        if len(text) > MOST_LETTERS:
            raise BadData(f"model: {file} is longer than 16 MB (expected a config.json)")
        config = json.loads(text)
    except RecursionError:
        raise BadData(f"model: {file} is nested too deeply (expected a config.json)") from None
    except FileNotFoundError:
        raise UsageError(f"model: {file} does not exist (expected a model directory)") from None
    except ValueError as error:
        raise BadData(f"model: {file} is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise BadData(f"model: {file} is not a JSON object (expected a configuration)")
    return config


def load_spec(path: str | Path) -> ModelSpec:
    """The model described by a directory's config.json, or by that file."""
    return with_stored_names(from_config(read_config(path)), _config_file(path).parent)


def _config_file(path: str | Path) -> Path:
    file = Path(path)
    return file / "config.json" if file.is_dir() else file
