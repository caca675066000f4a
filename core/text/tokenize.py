"""The tokenize stage: documents → packed rows of token ids, shard by shard, or mixed by source.

Each document ends with the tokenizer's end-of-document token. Without a mix every shard is packed
on its own (a map: the rows depend neither on workers nor on slices). A mix needs the counts of all
shards, so it is made in one process: each source is packed apart into a spool, then rows are drawn
by the plan of `mixing`. The tokenizer is trained on the input first where that is asked for, and is
kept beside the rows; a re-run finds it there and does not train again.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sabia.core import notes, stop
from sabia.core.errors import UsageError
from sabia.core.text.encoding import ENGINES, Encoder, choose_encoder, probe_texts
from sabia.core.text.mixing import parse_mix
from sabia.core.text.packing import PACKINGS, make_packer, to_batch
from sabia.core.text.token_counts import Tally, coded, report_bytes_per_token
from sabia.core.text.tokenizer import Tokenizer, load_tokenizer, train_bpe

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from sabia.core.shards.job import Job
    from sabia.core.shards.mapping import ShardContext
    from sabia.core.shards.sources import Source

TRAINING_RECORD = "training.json"


@dataclass(frozen=True)
class TokenizeConfig:
    """The stage's own options; `tokenizer` names a directory, or is empty when one is trained."""

    tokenizer: str = ""
    train_tokenizer: bool = False
    vocab_size: int = 32_000
    save_tokenizer: str = ""
    train_bytes: int = 1_000_000_000
    length: int = 2048
    packing: str = "sequential"
    encoder: str = "auto"
    mix: str = ""
    tokens: int | None = None
    max_repeat: float = 4.0

    def __post_init__(self) -> None:
        if self.tokenizer and self.train_tokenizer:
            raise UsageError("give either --tokenizer DIR or --train-tokenizer, not both")
        for name, value, choices in (
            ("packing", self.packing, PACKINGS),
            ("encoder", self.encoder, ENGINES),
        ):
            if value not in choices:
                raise UsageError(f"--{name}: {value!r} (expected {' or '.join(choices)})")
        if self.length < 2:
            raise UsageError(f"--length: {self.length} (expected at least 2)")
        if self.tokens is not None and not self.mix:
            raise UsageError("--tokens is the budget of a mix; give --mix SOURCE=WEIGHT,… too")
        if self.mix:
            parse_mix(self.mix)


def run(job: Job, config: TokenizeConfig) -> None:
    """Tokenizes the job's documents; raises what the shards and the tokenizer raise."""
    from sabia.core.shards import open_inputs, run_map
    from sabia.core.text import mixed_rows

    sources = open_inputs(job, "document")
    tokenizer, place = obtain_tokenizer(job, config, sources)
    if tokenizer is None:  # a dry run of a training
        tokenizer_print, encoder = "untrained", None
    else:
        tokenizer_print = tokenizer.fingerprint
        encoder = _encoder(tokenizer, config, sources)
    salt = tokenizer_print
    said = replace(job, options=_recorded(config, tokenizer, place))
    if config.mix:
        if encoder is None or job.dry_run:
            print(f"write {job.out or 'stdout'}: {config.mix} of {len(sources)} shards")
            return
        mixed_rows.write(said, config, encoder, sources, salt)
        return
    transform = partial(pack_shard, encoder=encoder, length=config.length, packing=config.packing)
    summary = run_map(said, transform, "document", "tokens", sources=sources, salt=salt)
    if not job.dry_run:
        report_bytes_per_token(job, summary)


def pack_shard(
    batches: Iterator[pa.RecordBatch],
    context: ShardContext,
    encoder: Encoder,
    length: int,
    packing: str,
) -> Iterator[pa.RecordBatch]:
    """The transform: documents of one shard → token rows."""
    tally, names = Tally(), list[str | None]()
    packer = make_packer(packing, length, encoder.tokenizer.pad_id)
    for batch in batches:
        kept = usable(batch, context)
        tokens, lengths = encode_documents(encoder, kept, tally)
        for rows in packer.add(tokens, lengths, source_codes(kept, names)):
            yield to_batch(rows, names)
    for rows in packer.flush():
        yield to_batch(rows, names)
    for name, n in tally.counters().items():
        context.count(name, n)


def usable(batch: pa.RecordBatch, context: ShardContext) -> pa.RecordBatch:
    """The batch without documents whose text is empty or not UTF-8, which are rejected."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        batch.column("text").validate(full=True)
    except pa.ArrowInvalid:
        batch = _without_broken(batch, context)
    empty = pc.equal(pc.binary_length(batch.column("text")), 0)
    if pc.any(empty).as_py():
        context.reject(batch.filter(empty), "empty text")
        return batch.filter(pc.invert(empty))
    return batch


def _without_broken(batch: pa.RecordBatch, context: ShardContext) -> pa.RecordBatch:
    """The batch without texts that are not UTF-8; they are rejected with U+FFFD for what is not."""
    import pyarrow as pa

    place = batch.schema.get_field_index("text")
    texts = batch.column(place).cast(pa.binary()).to_pylist()
    mended = [text.decode("utf-8", "replace") for text in texts]
    whole = [mend.encode() == text for mend, text in zip(mended, texts, strict=True)]
    fixed = batch.set_column(place, batch.schema.field(place), pa.array(mended, pa.string()))
    context.reject(fixed.filter(pa.array([not one for one in whole])), "text is not UTF-8")
    return fixed.filter(pa.array(whole))


def source_codes(batch: pa.RecordBatch, names: list[str | None]) -> np.ndarray:
    """int64[documents]: the place in `names` of each document's source; new ones are appended."""
    import numpy as np

    found, codes = coded(batch.column("source"))
    names += [name for name in found if name not in names]
    return np.array([names.index(name) for name in found], np.int64)[codes]


def encode_documents(
    encoder: Encoder, batch: pa.RecordBatch, tally: Tally
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int32[Σ n], lengths int64[documents]) with the end-of-document token after each."""
    end = encoder.tokenizer.eos_id
    tokens, lengths = encoder.encode(batch.column("text"), -1 if end is None else end)
    tally.add(batch, lengths - 1)
    return tokens, lengths


def obtain_tokenizer(
    job: Job, config: TokenizeConfig, sources: Sequence[Source]
) -> tuple[Tokenizer | None, str]:
    """(tokenizer, its directory): loaded, found from an earlier run, or trained and saved.

    None on a dry run that would train. Raises UsageError where there is nowhere to save it, or
    where a slice of the input would train on all of it.
    """
    beside = _beside(job)
    if config.tokenizer:
        tokenizer = load_tokenizer(config.tokenizer)
        place = config.save_tokenizer or (beside if job.to_directory else "")
        if place and not job.dry_run:
            tokenizer.save(place)
        return _with_end(tokenizer), place or config.tokenizer
    place = config.save_tokenizer or beside
    if not place:
        raise UsageError("nowhere to keep the trained tokenizer; give --save-tokenizer DIR")
    record = _training_record(config, sources)
    if not job.force and (found := _trained_before(place, record)) is not None:
        notes.note(f"tokenizer {place}: already trained on this input")
        return found, place
    if job.dry_run:
        print(f"train {place}: {config.vocab_size} tokens")
        return None, place
    return _train(job, config, sources, place, record), place


def _train(
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
    tokenizer = train_bpe(training_texts(sources, config.train_bytes), config.vocab_size)
    tokenizer.save(place)
    write_atomic(Path(place) / TRAINING_RECORD, record)
    took = time.monotonic() - start
    notes.note(f"trained {tokenizer.vocab_size:,} tokens in {took:.1f} s → {place}")
    if tokenizer.vocab_size < config.vocab_size:
        notes.warn(
            f"the input has pairs for {tokenizer.vocab_size:,} tokens only, "
            f"{config.vocab_size:,} were asked for"
        )
    return tokenizer


def training_texts(sources: Sequence[Source], most_bytes: int) -> Iterator[str]:
    """All texts, or every n-th one where they are more than `most_bytes`; in order."""
    import pyarrow.compute as pc

    total = 0
    for batch in _text_batches(sources):
        total += pc.sum(pc.binary_length(batch.column("text"))).as_py() or 0
    step = max(1, -(-total // max(most_bytes, 1)))
    texts = (text for b in _text_batches(sources) for text in b.column("text").to_pylist())
    if step > 1:
        notes.note(f"training on every {step}. document ({total / 1e6:,.0f} MB in all)")
    return itertools.islice(texts, 0, None, step)


def _text_batches(sources: Sequence[Source]) -> Iterator[pa.RecordBatch]:
    for source in sources:
        for batch in source.batches(columns=["text"]):
            stop.check()
            yield batch


def _trained_before(place: str, record: str) -> Tokenizer | None:
    kept = Path(place) / TRAINING_RECORD
    if not kept.is_file() or kept.read_text("utf-8") != record:
        return None
    return load_tokenizer(place)


def _training_record(config: TokenizeConfig, sources: Sequence[Source]) -> str:
    """What a trained tokenizer depends on, as JSON."""
    from importlib.metadata import version

    made_from = {
        "inputs": [source.fingerprint() for source in sources],
        "vocab_size": config.vocab_size,
        "train_bytes": config.train_bytes,
        "versions": {name: version(name) for name in ("sabia", "tokenizers")},
    }
    return json.dumps(made_from, indent=1) + "\n"


def _beside(job: Job) -> str:
    """Where the tokenizer of an output is kept: OUT/tokenizer, or FILE.tokenizer for FILE.parquet;
    empty for stdout and for URLs."""
    if job.to_stdout or "://" in str(job.out):
        return ""
    out = str(job.out).rstrip("/")
    return f"{out.removesuffix('.parquet')}.tokenizer" if job.to_file else f"{out}/tokenizer"


def _encoder(tokenizer: Tokenizer, config: TokenizeConfig, sources: Sequence[Source]) -> Encoder:
    choice = choose_encoder(tokenizer, probe_texts(_text_batches(sources)), config.encoder)
    notes.note(f"encoder {choice.reason}")
    return choice.encoder


def _with_end(tokenizer: Tokenizer) -> Tokenizer:
    if tokenizer.eos_id is None:
        raise UsageError("the tokenizer names no eos_token (expected in tokenizer_config.json)")
    return tokenizer


def _recorded(config: TokenizeConfig, tokenizer: Tokenizer | None, place: str) -> dict[str, object]:
    """What the output's metadata says of how it was made: what decides the rows, no more."""
    said: dict[str, object] = {
        "tokenizer": place,
        "length": config.length,
        "packing": config.packing,
    }
    if tokenizer is not None:
        said |= {"vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}
        said |= {"eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
    if config.mix:
        said |= {"mix": config.mix, "tokens": config.tokens, "max_repeat": config.max_repeat}
    return said
