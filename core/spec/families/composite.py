"""Vision-language models: the language model is read, all other tensors are kept unchanged.

The positions of a text are the same for the language model alone, so its results on texts are
exact; the tensors of the other parts are copied unchanged into the exported model.
"""

from collections.abc import Callable
from dataclasses import replace

from sabia.core.spec.fields import Fields
from sabia.core.spec.model import ModelSpec
from sabia.core.spec.tensors import FileTemplate, FusedPart


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

    def renamed(name: FileTemplate) -> FileTemplate:
        if isinstance(name, FusedPart):
            return replace(name, file=file_name(name.file))
        return file_name(name)

    names, others = (
        {ours: renamed(name) for ours, name in table.items()}
        for table in (spec.names, spec.other_names)
    )
    kept = spec.kept + kept
    return replace(spec, family=fields.family, names=names, other_names=others, kept=kept)
