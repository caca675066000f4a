"""Models that see images too: the language model is read, all else is kept as it is.

A text's positions are the same for the language model alone, so what is computed is exact for
texts; tensors of the other parts are handed on unchanged to what is exported.
"""

from collections.abc import Callable
from dataclasses import replace

from sabia.core.spec.fields import Fields
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import Part


def language_model(
    fields: Fields,
    read: Callable[[Fields], ModelSpec],
    file_name: Callable[[str], str],
    kept: tuple[str, ...],
) -> ModelSpec:
    """The model of `text_config`, read by `read`; its files' names as `file_name` changes them."""
    text = fields.take("text_config", dict)
    fields.take("vision_config", dict, {})
    tied = fields.take("tie_word_embeddings", bool, None)
    inner = Fields(text if tied is None else {"tie_word_embeddings": tied} | text)
    spec = read(inner)
    inner.finish()

    def renamed(name: str | Part) -> str | Part:
        if isinstance(name, Part):
            return replace(name, file=file_name(name.file))
        return file_name(name)

    names, others = (
        {ours: renamed(name) for ours, name in table.items()}
        for table in (spec.names, spec.other_names)
    )
    kept = spec.kept + kept
    return replace(spec, family=fields.family, names=names, other_names=others, kept=kept)
