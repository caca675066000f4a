"""Where a trainer's model and tokenizer come from, and their fingerprints for a run's identity.

A tokenizer is taken as given, else from the model directory, else from where `tokenize` recorded
it in the rows' metadata; rows may have moved with their tokenizer beside them. For one that
extends the model's own see recipes.grown_model.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sabia.core import notes
from sabia.core.errors import UsageError
from sabia.core.model.init import init_tensor
from sabia.core.model.storage import hub
from sabia.core.options.pretrain import PretrainOptions
from sabia.core.recipes.training_config import initial_stds
from sabia.core.shards.layout import FORMER_TOKENIZER, TOKENIZER
from sabia.core.shards.outputs import METADATA_KEY
from sabia.core.shards.sources import Source
from sabia.core.spec import ModelSpec, from_config, load_spec, new_config, parse_shape
from sabia.core.text.tokenize.tokenizer import load_tokenizer
from sabia.core.text.tokenize.vocabulary_extension import extension_of
from sabia.core.train.stepper import LazyState

Params = Mapping[str, np.ndarray]


def load_arrays(directory: str) -> Params:
    """The parameters of a model directory, mapped, in the dtypes of its files."""
    return hub.load_model(directory)[1]


def load_fp32(directory: str) -> Params:
    """The parameters of a model directory as fp32 arrays in memory."""
    return {name: np.asarray(x, np.float32) for name, x in load_arrays(directory).items()}


def fresh_model(
    options: PretrainOptions, tokenizer: str, row_length: int, seed: int
) -> tuple[ModelSpec, Callable[[], Params]]:
    """(spec, its initial parameters) of a new model, by `--shape` or `--config-json`.

    Each tensor is made when it is asked for: processes that keep shards hold no more of the whole
    model than one.
    """
    path = options.config_json
    spec = load_spec(path) if path else _shaped(options.shape, tokenizer, row_length)

    def load() -> Params:
        stds, table = initial_stds(options, spec), {t.name: t for t in spec.tensors()}
        return LazyState([*table], lambda name: init_tensor(table[name], seed, stds.get(name)))

    return spec, load


def _shaped(shape: str, tokenizer: str, row_length: int) -> ModelSpec:
    given = parse_shape(shape)
    for key in ("hidden", "layers"):
        if key not in given:
            raise UsageError(f"--shape: {shape!r} (expected at least d=… and layers=…)")
    if tokenizer:
        made = load_tokenizer(tokenizer)
        ids = {"bos_token_id": made.bos_id, "eos_token_id": made.eos_id}
        given = {"vocab": made.vocab_size, "pad_token_id": made.pad_id, **ids} | given
    if "vocab" not in given:
        raise UsageError("the rows name no tokenizer; give --tokenizer DIR, or vocab=N in --shape")
    given["context"] = max(row_length, given.get("context", 2048))
    return from_config(new_config(**given))


def find_tokenizer(given: str, model: str, sources: Sequence[Source]) -> str:
    """The path of the tokenizer: given, the model's, or the one the rows record; '' if none.

    Rows by an extension of the model's tokenizer have that one. Raises UsageError when the rows
    were made by several; warns when by another than that given.
    """
    recorded = [_recorded(source) for source in sources]
    prints = {said.get("fingerprint") for said in recorded if said.get("fingerprint")}
    if len(prints) > 1:
        raise UsageError("the token rows were made by different tokenizers (expected one)")
    named = zip((source.name for source in sources), recorded, strict=True)
    if not given and not own_tokenizer(model):
        return _found(named)
    place = given or model
    tokenizer = load_tokenizer(place, "--tokenizer" if given else "--model")
    if prints - {tokenizer.fingerprint}:
        found = "" if given else _found(named)
        if found and extension_of(load_tokenizer(found), found, tokenizer):
            return found
        notes.warn(f"{place} is not the tokenizer that made the rows (ids may differ)")
    return place


def own_tokenizer(model: str) -> bool:
    """Whether a model directory has a tokenizer."""
    return bool(model) and (Path(model) / "tokenizer.json").is_file()


def _found(recorded: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """The tokenizer that (name of a shard, its record) say; '' if it is nowhere."""
    for name, said in recorded:
        for place in _candidates(name, str(said.get("tokenizer") or "")):
            if _is_that(place, said.get("fingerprint")):
                return str(place)
    return ""


def _candidates(name: str, recorded: str) -> list[Path]:
    """Where `tokenize` keeps a tokenizer: where it said, or beside the rows if they were moved."""
    path = Path(name)
    folders = [path.parent / TOKENIZER, path.parent / FORMER_TOKENIZER]
    beside = [*folders, path.with_suffix(".tokenizer")]
    return ([Path(recorded)] if recorded else []) + beside


def _is_that(place: Path, fingerprint: str | None) -> bool:
    if not (place.is_file() or (place / "tokenizer.json").is_file()):
        return False
    return fingerprint is None or load_tokenizer(place).fingerprint == fingerprint


def _recorded(source: Source) -> dict[str, Any]:
    """What `tokenize` wrote into the rows' metadata, {} where there is none."""
    if source.form == "jsonl":
        return {}
    with source.open() as file:
        schema = (
            pq.read_schema(file) if source.form == "parquet" else pa.ipc.open_stream(file).schema
        )
    said = json.loads((schema.metadata or {}).get(METADATA_KEY, b"{}"))
    options = said.get("options")
    return options if isinstance(options, dict) else {}
