"""Where the tokenizer of a run comes from: loaded, trained on its input, or extended by it.

What was made is kept beside the rows with a record of what it was made from, so that a run again
finds it there. A slice of the input never makes one, as each would make another.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sabia.core import notes
from sabia.core.errors import UsageError
from sabia.core.options.tokenize import TokenizeOptions, TokenizerTraining
from sabia.core.shards.atomic import write_atomic
from sabia.core.shards.job import Job
from sabia.core.shards.layout import FORMER_TOKENIZER, TOKENIZER, adopt_tokenizer, check_outside
from sabia.core.shards.slices import slurm_slice
from sabia.core.shards.sources import Source
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer
from sabia.core.text.tokenize.tokenizer_training import added_tokens, target, train
from sabia.core.text.tokenize.training_sample import sampled_texts
from sabia.core.text.tokenize.vocabulary_extension import (
    EXTENSION_FILE,
    Extension,
    extend,
    load_extension,
)

RECORD = "training.json"


def obtain_tokenizer(
    job: Job, options: TokenizeOptions, sources: Sequence[Source]
) -> tuple[Tokenizer | None, str]:
    """(tokenizer, its directory): loaded, found from an earlier run, or made and saved.

    None on a dry run that would make one. Raises UsageError where there is nowhere to save it, or
    where a slice of the input would make it.
    """
    beside = _beside(job)
    check_outside(job, options.save_tokenizer, "--save-tokenizer")
    if options.tokenizer:
        tokenizer = load_tokenizer(options.tokenizer, "--tokenizer")
        extension = load_extension(options.tokenizer)
        adopt_tokenizer(job)
        place = options.save_tokenizer or (beside if job.to_directory else "")
        if place and not job.dry_run:
            _keep(tokenizer, place, extension)
        return with_end(tokenizer), place or options.tokenizer
    adopt_tokenizer(job)
    place, wanted = options.save_tokenizer or beside, target(options)
    if not place:
        raise UsageError("nowhere to keep the trained tokenizer; give --save-tokenizer DIR")
    record = _record(options, sources)
    if not job.force and (found := _made_before(place, record)) is not None:
        notes.note(f"tokenizer {place}: already trained on this input")
        return found, place
    if job.dry_run:
        notes.note(f"a tokenizer of {wanted} tokens would be trained into {place}")
        return None, place
    return _make(job, options, sources, place, record), place


def with_end(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer; raises UsageError where it names no end-of-document token."""
    if tokenizer.eos_id is None:
        raise UsageError("the tokenizer names no eos_token (expected in tokenizer_config.json)")
    return tokenizer


def _make(
    job: Job,
    options: TokenizeOptions,
    sources: Sequence[Source],
    place: str,
    record: dict[str, Any],
) -> Tokenizer:
    if job.shard or slurm_slice():
        raise UsageError(
            "a slice cannot train the tokenizer of all; train it first in one job and pass "
            "--tokenizer DIR"
        )
    start = time.monotonic()
    texts = sampled_texts(sources, options.train_bytes)
    if options.extend:
        tokenizer = _extended(options, texts, place)
    else:
        tokenizer = train(texts, options)
        _keep(tokenizer, place, None)
    write_atomic(Path(place) / RECORD, json.dumps(record, indent=1) + "\n")
    took, wanted = time.monotonic() - start, target(options)
    notes.note(f"trained {tokenizer.vocab_size:,} tokens in {took:.1f} s → {place}")
    if tokenizer.vocab_size < wanted:
        notes.warn(
            f"the input has pairs for {tokenizer.vocab_size:,} tokens only, "
            f"{wanted:,} were asked for"
        )
    return tokenizer


def _extended(options: TokenizeOptions, texts: Iterable[str], place: str) -> Tokenizer:
    base = with_end(load_tokenizer(options.extend))
    tokenizer, extension = extend(base, texts, target(options), options.min_frequency)
    _keep(tokenizer, place, replace(extension, multiple=options.vocab_multiple))
    return load_tokenizer(place)


def _keep(tokenizer: Tokenizer, place: str, extension: Extension | None) -> None:
    """Save a tokenizer with the record of its extension, and none that another left there."""
    tokenizer.save(place)
    if extension is None:
        (Path(place) / EXTENSION_FILE).unlink(missing_ok=True)
    else:
        extension.save(place)


def _made_before(place: str, record: dict[str, Any]) -> Tokenizer | None:
    try:
        kept = json.loads((Path(place) / RECORD).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return load_tokenizer(place) if kept == record else None


def _record(options: TokenizeOptions, sources: Sequence[Source]) -> dict[str, Any]:
    """What a trained tokenizer depends on."""
    base = load_tokenizer(options.extend, "--extend").fingerprint if options.extend else None
    training: dict[str, Any] = {name: getattr(options, name) for name in TokenizerTraining.table}
    training["multiple"] = training.pop("vocab_multiple")
    training["special_tokens"] = list(added_tokens(options))
    return {
        "inputs": [source.fingerprint() for source in sources],
        "training": training,
        "train_bytes": options.train_bytes,
        "extend": base,
        "versions": {name: version(name) for name in ("sabia", "tokenizers")},
    }


def _beside(job: Job) -> str:
    """Where the tokenizer of an output is kept: OUT/_tokenizer, or FILE.tokenizer for FILE.parquet;
    empty for stdout and for URLs."""
    if job.to_stdout or "://" in str(job.out):
        return ""
    out = str(job.out).rstrip("/")
    if job.to_file:
        return f"{out.removesuffix('.parquet')}.tokenizer"
    places = [f"{out}/{name}" for name in (TOKENIZER, FORMER_TOKENIZER)]
    not_moved = job.dry_run and not Path(places[0]).exists() and Path(places[1]).exists()
    return places[not_moved]
