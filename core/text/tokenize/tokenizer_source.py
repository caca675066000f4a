"""Load the tokenizer of a run, train it on the input, or extend another one by the input.

A new tokenizer is saved beside the rows with a record of its inputs and options, so that the next
run loads it. A slice of the input never trains one, as each slice would train another.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sabia.core import notes
from sabia.core.errors import UsageError
from sabia.core.options.tokenize import TokenizeOptions, TokenizerTraining
from sabia.core.results import code_identity
from sabia.core.shards.atomic import file_digest, read_json, write_json
from sabia.core.shards.job import Job, without_ending
from sabia.core.shards.layout import FORMER_TOKENIZER, TOKENIZER, adopt_tokenizer, check_outside
from sabia.core.shards.sources import Source
from sabia.core.shards.stores.mirrors import folder
from sabia.core.shards.stores.objects import is_url
from sabia.core.text.tokenize.tokenizer import FILES, Tokenizer, load_tokenizer
from sabia.core.text.tokenize.tokenizer_training import added_tokens, target, train
from sabia.core.text.tokenize.training_sample import sampled_texts
from sabia.core.text.tokenize.vocabulary_extension import (
    EXTENSION_FILE,
    Extension,
    extend,
    load_extension,
)

DIGEST = "tokenizer.json"  # in the record: the digest of this file
RECORD = "training.json"


def obtain_tokenizer(
    job: Job, options: TokenizeOptions, sources: Sequence[Source]
) -> tuple[Tokenizer | None, str]:
    """(tokenizer, its directory): loaded, kept from an earlier run, or trained and saved.

    None on a dry run that would train one. Raises UsageError where there is no directory to save it
    in, or where a slice of the input would train it.
    """
    beside = _beside(job)
    check_outside(job, options.save_tokenizer, "--save-tokenizer")
    name = options.save_tokenizer or (beside if job.to_directory or not options.tokenizer else "")
    with folder(name, keep=not job.dry_run) as directory:
        if not options.tokenizer:
            return _trained(job, options, sources, directory, name), name
        tokenizer = load_tokenizer(options.tokenizer, "--tokenizer")
        extension = load_extension(options.tokenizer)
        adopt_tokenizer(job)
        if directory and not job.dry_run:
            _check_same(job, tokenizer, directory)
            _save(tokenizer, directory, extension)
        return with_end(tokenizer), name or options.tokenizer


def _trained(
    job: Job, options: TokenizeOptions, sources: Sequence[Source], directory: str, name: str
) -> Tokenizer | None:
    """The tokenizer in a directory, whose place is `name`: kept or trained; None on a dry run."""
    adopt_tokenizer(job)
    if not directory:
        raise UsageError("the trained tokenizer needs a directory; give --save-tokenizer DIR")
    record = _record(options, sources)
    if not job.force and _is_record(Path(directory) / RECORD, record):
        notes.note(f"tokenizer {name}: already trained on this input")
        return load_tokenizer(directory)
    if job.dry_run:
        notes.note(f"a tokenizer of {target(options)} tokens would be trained into {name}")
        return None
    if job.shard:
        raise UsageError(
            "a slice cannot train the tokenizer of all slices; train it first in one job and give "
            "--tokenizer DIR, or give --shard all if the inputs are those of this task alone"
        )
    start = time.monotonic()
    texts = sampled_texts(sources, options.train_bytes)
    vocab_size = target(options)
    if options.extend:
        base = with_end(load_tokenizer(options.extend))
        tokenizer, extension = extend(base, texts, vocab_size, options.min_frequency)
        _save(tokenizer, directory, replace(extension, multiple=options.vocab_multiple))
        tokenizer = load_tokenizer(directory)
    else:
        tokenizer = train(texts, options)
        _save(tokenizer, directory, None)
    definition = file_digest(Path(directory) / FILES[0])
    write_json(Path(directory) / RECORD, record | {DIGEST: definition})
    seconds = time.monotonic() - start
    notes.note(f"trained {tokenizer.vocab_size:,} tokens in {seconds:.1f} s → {name}")
    if tokenizer.vocab_size < vocab_size:
        notes.warn(
            f"the input has pairs for {tokenizer.vocab_size:,} tokens only "
            f"({vocab_size:,} requested)"
        )
    return tokenizer


def _check_same(job: Job, tokenizer: Tokenizer, directory: str) -> None:
    """Rows are added only to rows of the same tokenizer. Raises UsageError."""
    there = job.append and (Path(directory) / "tokenizer.json").exists()
    if there and load_tokenizer(directory).fingerprint != tokenizer.fingerprint:
        raise UsageError(f"--append: {directory} is another tokenizer (expected the same one)")


def with_end(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer; raises UsageError where it has no end-of-document token."""
    if tokenizer.eos_id is None:
        raise UsageError("the tokenizer has no eos_token (expected in tokenizer_config.json)")
    return tokenizer


def _save(tokenizer: Tokenizer, directory: str, extension: Extension | None) -> None:
    """Save a tokenizer with the record of its extension; remove such a record of another one."""
    tokenizer.save(directory)
    if extension is None:
        (Path(directory) / EXTENSION_FILE).unlink(missing_ok=True)
    else:
        extension.save(directory)


def _is_record(path: Path, record: dict[str, Any]) -> bool:
    """Whether the file holds this record, and the definition beside it is as it was written."""
    try:
        stored = read_json(path)
        digest = stored.pop(DIGEST, None)
        intact = digest is None or digest == file_digest(path.parent / FILES[0])
        return intact and stored == record
    except (OSError, ValueError):
        return False


def _record(options: TokenizeOptions, sources: Sequence[Source]) -> dict[str, object]:
    """Everything that a trained tokenizer depends on."""
    base = load_tokenizer(options.extend, "--extend").fingerprint if options.extend else None
    training: dict[str, Any] = {name: getattr(options, name) for name in TokenizerTraining.table}
    training["multiple"] = training.pop("vocab_multiple")
    training["special_tokens"] = list(added_tokens(options))
    return {
        "inputs": [source.fingerprint() for source in sources],
        "training": training,
        "train_bytes": options.train_bytes,
        "extend": base,
        "versions": {"sabia": code_identity("tokenize"), "tokenizers": version("tokenizers")},
    }


def _beside(job: Job) -> str:
    """The directory for the tokenizer of an output: OUT/_tokenizer, or FILE.tokenizer for
    FILE.parquet; empty for stdout."""
    if job.to_stdout:
        return ""
    out = str(job.out).rstrip("/")
    if job.to_file:
        return f"{without_ending(out)}.tokenizer"
    current, former = f"{out}/{TOKENIZER}", f"{out}/{FORMER_TOKENIZER}"
    if is_url(out):
        return current
    not_moved = job.dry_run and not Path(current).exists() and Path(former).exists()
    return former if not_moved else current
