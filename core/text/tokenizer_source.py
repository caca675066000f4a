"""Where the tokenizer of a run comes from: loaded, trained on its input, or extended by it.

What was made is kept beside the rows with a record of what it was made from, so that a run again
finds it there. A slice of the input never makes one, as each would make another.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sabia.core import notes
from sabia.core.errors import UsageError
from sabia.core.text.tokenizer import Tokenizer, load_tokenizer, train
from sabia.core.text.training_sample import sampled_texts
from sabia.core.text.vocabulary_extension import (
    EXTENSION_FILE,
    Extension,
    extend,
    load_extension,
)

if TYPE_CHECKING:
    from sabia.core.shards.job import Job
    from sabia.core.shards.sources import Source
    from sabia.core.text.tokenize import TokenizeConfig

RECORD = "training.json"


def obtain_tokenizer(
    job: Job, config: TokenizeConfig, sources: Sequence[Source]
) -> tuple[Tokenizer | None, str]:
    """(tokenizer, its directory): loaded, found from an earlier run, or made and saved.

    None on a dry run that would make one. Raises UsageError where there is nowhere to save it, or
    where a slice of the input would make it.
    """
    from sabia.core.shards.layout import adopt_tokenizer, check_outside

    beside = _beside(job)
    check_outside(job, config.save_tokenizer, "--save-tokenizer")
    if config.tokenizer:
        tokenizer, extension = load_tokenizer(config.tokenizer), load_extension(config.tokenizer)
        adopt_tokenizer(job)
        place = config.save_tokenizer or (beside if job.to_directory else "")
        if place and not job.dry_run:
            _keep(tokenizer, place, extension)
        return with_end(tokenizer), place or config.tokenizer
    adopt_tokenizer(job)
    place = config.save_tokenizer or beside
    if not place:
        raise UsageError("nowhere to keep the trained tokenizer; give --save-tokenizer DIR")
    record = _record(config, sources)
    if not job.force and (found := _made_before(place, record)) is not None:
        notes.note(f"tokenizer {place}: already trained on this input")
        return found, place
    if job.dry_run:
        print(f"train {place}: {config.training.target} tokens")
        return None, place
    return _make(job, config, sources, place, record), place


def with_end(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer; raises UsageError where it names no end-of-document token."""
    if tokenizer.eos_id is None:
        raise UsageError("the tokenizer names no eos_token (expected in tokenizer_config.json)")
    return tokenizer


def _make(
    job: Job, config: TokenizeConfig, sources: Sequence[Source], place: str, record: str
) -> Tokenizer:
    from sabia.core.shards.atomic import write_atomic
    from sabia.core.shards.slices import slurm_slice

    if job.shard or slurm_slice():
        raise UsageError(
            "a slice cannot train the tokenizer of all; train it first in one job and pass "
            "--tokenizer DIR"
        )
    start = time.monotonic()
    texts = sampled_texts(sources, config.train_bytes)
    if config.extend:
        tokenizer = _extended(config, texts, place)
    else:
        tokenizer = train(texts, config.training)
        _keep(tokenizer, place, None)
    write_atomic(Path(place) / RECORD, record)
    took = time.monotonic() - start
    notes.note(f"trained {tokenizer.vocab_size:,} tokens in {took:.1f} s → {place}")
    if tokenizer.vocab_size < config.training.target:
        notes.warn(
            f"the input has pairs for {tokenizer.vocab_size:,} tokens only, "
            f"{config.training.target:,} were asked for"
        )
    return tokenizer


def _extended(config: TokenizeConfig, texts, place: str) -> Tokenizer:  # type: ignore[no-untyped-def]
    base = with_end(load_tokenizer(config.extend))
    least = config.training.min_frequency
    tokenizer, extension = extend(base, texts, config.training.target, least)
    _keep(tokenizer, place, replace(extension, multiple=config.training.multiple))
    return load_tokenizer(place)


def _keep(tokenizer: Tokenizer, place: str, extension: Extension | None) -> None:
    """Save a tokenizer with the record of its extension, and none that another left there."""
    tokenizer.save(place)
    if extension is None:
        (Path(place) / EXTENSION_FILE).unlink(missing_ok=True)
    else:
        extension.save(place)


def _made_before(place: str, record: str) -> Tokenizer | None:
    kept = Path(place) / RECORD
    if not kept.is_file() or kept.read_text("utf-8") != record:
        return None
    return load_tokenizer(place)


def _record(config: TokenizeConfig, sources: Sequence[Source]) -> str:
    """What a trained tokenizer depends on, as JSON."""
    from dataclasses import asdict
    from importlib.metadata import version

    made_from = {
        "inputs": [source.fingerprint() for source in sources],
        "training": asdict(config.training),
        "train_bytes": config.train_bytes,
        "extend": load_tokenizer(config.extend).fingerprint if config.extend else None,
        "versions": {name: version(name) for name in ("sabia", "tokenizers")},
    }
    return json.dumps(made_from, indent=1) + "\n"


def _beside(job: Job) -> str:
    """Where the tokenizer of an output is kept: OUT/_tokenizer, or FILE.tokenizer for FILE.parquet;
    empty for stdout and for URLs."""
    from sabia.core.shards.layout import FORMER_TOKENIZER, TOKENIZER

    if job.to_stdout or "://" in str(job.out):
        return ""
    out = str(job.out).rstrip("/")
    if job.to_file:
        return f"{out.removesuffix('.parquet')}.tokenizer"
    places = [f"{out}/{name}" for name in (TOKENIZER, FORMER_TOKENIZER)]
    not_moved = job.dry_run and not Path(places[0]).exists() and Path(places[1]).exists()
    return places[not_moved]
