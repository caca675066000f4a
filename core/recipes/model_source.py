"""The model and tokenizer of a trainer: new or from a directory, and the rows' own tokenizer.

The tokenizer is the one given, else that of the model directory, else the one that `tokenize`
recorded in the rows' metadata; rows may have been moved together with their tokenizer. For one that
extends the model's own see recipes.embedding_extension.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sabia.core import notes
from sabia.core.errors import UsageError
from sabia.core.model.init import LazyParams, init_tensor
from sabia.core.model.lora import LoraConfig, base_names
from sabia.core.model.storage import hub
from sabia.core.options.pretrain import PretrainOptions
from sabia.core.recipes.training_config import initial_stds
from sabia.core.shards.job import without_ending
from sabia.core.shards.layout import FORMER_TOKENIZER, TOKENIZER
from sabia.core.shards.outputs import METADATA_KEY
from sabia.core.shards.sources import Source
from sabia.core.shards.stores.objects import is_there, is_url
from sabia.core.spec import ModelSpec, from_config, load_spec, new_config, parse_shape
from sabia.core.text.tokenize.tokenizer import load_tokenizer

Params = Mapping[str, np.ndarray]


def load_arrays(directory: str, lora: LoraConfig | None = None) -> Params:
    """The parameters of a model directory, mapped, in the dtypes of its files; where matrices are
    held in NF4 beside adapters, those that the directory has in NF4 stay as they are."""
    base = base_names(load_spec(directory), lora)
    if not base or lora is None:
        return hub.load_model(directory)[1]
    from sabia.core.model.storage.stored_weights import Stored, load_base

    params = load_base(directory, base, lora.base)
    if any(isinstance(x, Stored) for x in params.values()):
        notes.note(f"--lora-base: {directory} is in NF4 already; its codes are kept")
    return params


def load_fp32(directory: str) -> Params:
    """The parameters of a model directory as fp32 arrays in memory."""
    return {name: np.asarray(x, np.float32) for name, x in load_arrays(directory).items()}


def fresh_model(
    options: PretrainOptions, tokenizer: str, row_length: int, seed: int
) -> tuple[ModelSpec, Callable[[], Params]]:
    """(spec, its initial parameters) of a new model, by `--shape` or `--config-json`.

    Each tensor is made when it is read: processes that keep shards hold at most one whole tensor.
    """
    path = options.config_json
    spec = load_spec(path) if path else _shaped(options.shape, tokenizer, row_length)

    def load() -> Params:
        stds, table = initial_stds(options, spec), {t.name: t for t in spec.tensors()}
        return LazyParams([*table], lambda name: init_tensor(table[name], seed, stds.get(name)))

    return spec, load


def _shaped(shape: str, tokenizer: str, row_length: int) -> ModelSpec:
    sizes = parse_shape(shape)
    for key in ("hidden", "layers"):
        if key not in sizes:
            raise UsageError(f"--shape: {shape!r} (expected at least d=… and layers=…)")
    if tokenizer:
        loaded = load_tokenizer(tokenizer)
        ids = {"bos_token_id": loaded.bos_id, "eos_token_id": loaded.eos_id}
        sizes = {"vocab": loaded.vocab_size, "pad_token_id": loaded.pad_id, **ids} | sizes
    if "vocab" not in sizes:
        raise UsageError("the rows name no tokenizer; give --tokenizer DIR, or vocab=N in --shape")
    sizes["context"] = max(row_length, sizes.get("context", 2048))
    return from_config(new_config(**sizes))


def find_tokenizer(given: str, model: str, sources: Sequence[Source]) -> str:
    """The path of the tokenizer: given, the model's, or the one that the rows record; '' if none.

    If an extension of the model's tokenizer made the rows, it is that one. Raises UsageError when
    several tokenizers made the rows; warns when another one than that given did.
    """
    records = [_recorded_options(source) for source in sources]
    fingerprints = {record["fingerprint"] for record in records if record.get("fingerprint")}
    if len(fingerprints) > 1:
        raise UsageError("the token rows were made by different tokenizers (expected one)")
    by_shard = zip((source.name for source in sources), records, strict=True)
    if not given and not own_tokenizer(model):
        return _recorded_tokenizer(by_shard)
    path = given or model
    tokenizer = load_tokenizer(path, "--tokenizer" if given else "--model")
    if fingerprints - {tokenizer.fingerprint}:
        from sabia.core.text.tokenize.vocabulary_extension import extension_of

        recorded = "" if given else _recorded_tokenizer(by_shard)
        if recorded and extension_of(load_tokenizer(recorded), recorded, tokenizer):
            return recorded
        notes.warn(f"{path} is not the tokenizer that made the rows (ids may differ)")
    return path


def own_tokenizer(model: str) -> bool:
    """Whether a model directory has a tokenizer."""
    return bool(model) and (Path(model) / "tokenizer.json").is_file()


def _recorded_tokenizer(records: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """The tokenizer that the records of shards (name, record) name; '' if none of them exists."""
    for name, record in records:
        expected = record.get("fingerprint")
        for path in _tokenizers_of(name, str(record.get("tokenizer") or "")):
            if expected is None or load_tokenizer(path).fingerprint == expected:
                return path
    return ""


def _tokenizers_of(shard: str, recorded: str) -> Iterator[str]:
    """The tokenizers where `tokenize` wrote that of a shard, and beside the rows, where they were
    moved with it; of those at URLs local copies."""
    if is_url(shard):
        folder = f"{shard.rpartition('/')[0]}/{TOKENIZER}"
        for url in (recorded, folder, f"{without_ending(shard)}.tokenizer"):
            if is_url(url) and is_there(f"{url}/tokenizer.json"):
                from sabia.core.shards.stores.mirrors import fetched

                yield fetched(url)
    beside = [Path(shard).parent / name for name in (TOKENIZER, FORMER_TOKENIZER)]
    beside.append(Path(shard).with_suffix(".tokenizer"))
    for path in [Path(recorded), *beside] if recorded else beside:
        if path.is_file() or (path / "tokenizer.json").is_file():
            yield str(path)


def _recorded_options(source: Source) -> dict[str, object]:
    """The options that `tokenize` wrote into the rows' metadata, {} if it did not."""
    if source.form == "jsonl":
        return {}
    metadata = json.loads((source.stored_schema().metadata or {}).get(METADATA_KEY, b"{}"))
    options = metadata.get("options")
    return options if isinstance(options, dict) else {}
