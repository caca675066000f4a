"""Count families that do not train here: one reader of the configuration per `model_type`.

A field that can change a count and that the reader does not know is an error that names the field,
so a count is either right or refused. In vision-language models only the language model
(`text_config`) is counted. A family that differs from one of core.spec only in what is not counted
is read as that family.
"""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from sabia.core.errors import UsageError
from sabia.core.plan.counting.architecture import Architecture
from sabia.core.spec import families

_DIALECTS = "sabia.core.plan.counting.dialects"
# module of dialects (imported on demand) → its readers whose names are the model_type
_NAMED = {
    "dense": (
        "apertus", "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "glm4", "granite",
        "hunyuan_v1_dense", "mimo", "ministral3", "olmo3", "seed_oss", "smollm3",
    ),
    "layer_normed": (
        "bloom", "falcon", "gpt2", "gpt_neox", "mpt", "nemotron", "opt", "phi", "phimoe",
        "stablelm", "starcoder2",
    ),
    "mixtures": (
        "dbrx", "deepseek_v2", "dots1", "ernie4_5_moe", "glm4_moe", "granitemoe",
        "hunyuan_v1_moe", "minimax_m2", "minimax_m3",
        "olmoe", "qwen2_moe",
    ),
    "hybrids": ("nemotron_h",),
    "recurrent": (
        "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "mamba2", "minimax",
    ),
}  # fmt: skip
# model_type → module of dialects and reader
READERS: Mapping[str, tuple[str, str]] = {
    name: (module, name) for module, names in _NAMED.items() for name in names
} | {
    "deepseek_v32": ("mixtures", "indexed"),
    "deepseek_v4": ("deepseek_v4", "read"),
    "gemma4_text": ("hybrids", "gemma4"),
    "glm_moe_dsa": ("mixtures", "indexed"),
    "llama4_text": ("mixtures", "llama4"),
    "mimo_v2_flash": ("mixtures", "mimo_v2"),
    "nemotron-nas": ("dense", "nemotron_nas"),
}
# model_type → the family of core.spec with the same tensors and FLOPs
ALIKE = {"kimi_k2": "deepseek_v3", "qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
# model_type of vision-language models → model_type of a text_config without one
WHOLE = {
    "gemma4": "gemma4_text",
    "kimi_k25": "kimi_k2",
    "llama4": "llama4_text",
    "minimax_m3_vl": "minimax_m3",
    "mistral3": "mistral",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}


def texts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the language model; `config` itself for a text-only model."""
    family = config.get("model_type")
    if family not in WHOLE:
        return config
    inner = config.get("text_config")
    if not isinstance(inner, dict):
        raise UsageError(f"config.json: text_config is missing (expected in a {family} model)")
    tied = config.get("tie_word_embeddings")
    outer = {} if tied is None else {"tie_word_embeddings": tied}
    return {"model_type": WHOLE[family], **outer, **inner}


def from_config(config: Mapping[str, Any]) -> Architecture:
    """The model of a configuration; UsageError naming a field that is not known."""
    family = str(config.get("model_type"))
    if family not in READERS:
        known = {*families(), *READERS, *ALIKE, *WHOLE}
        near = difflib.get_close_matches(family, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"config.json: model_type {family[:40]!r} is none of {len(known)} known families "
            f"(expected --params and --active instead of --model){hint}"
        )
    from sabia.core.plan.counting.dialects.reading import CountFields

    module, name = READERS[family]
    read = getattr(import_module(f"{_DIALECTS}.{module}"), name)
    fields = CountFields(config)
    architecture: Architecture = read(fields)
    fields.finish()
    return replace(architecture, counted_only=True)
