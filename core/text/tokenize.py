"""The tokenize stage: documents → packed rows of token ids, shard by shard, or mixed by source.

Each document ends with the tokenizer's end-of-document token. Without a mix every shard is packed
on its own (a map: the rows depend neither on workers nor on slices). A mix needs the counts of all
shards, so it is made in one process: each source is packed apart into a spool, then rows are drawn
by the plan of `mixing`. The tokenizer is trained on the input first where that is asked for, and is
kept beside the rows; a re-run finds it there and does not train again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from sabia.core import notes, stop
from sabia.core.errors import UsageError
from sabia.core.text.encoding import ENGINES, Encoder, choose_encoder, probe_texts
from sabia.core.text.mixing import parse_mix
from sabia.core.text.packing import PACKINGS, make_packer, to_batch
from sabia.core.text.source_buckets import Buckets
from sabia.core.text.token_counts import Tally, coded, report_bytes_per_token
from sabia.core.text.token_files import FORMATS, Plan
from sabia.core.text.tokenizer import Tokenizer, load_tokenizer
from sabia.core.text.tokenizer_source import obtain_tokenizer, with_end
from sabia.core.text.tokenizer_training import TrainingConfig

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from sabia.core.shards.job import Job
    from sabia.core.shards.mapping import ShardContext
    from sabia.core.shards.sources import Source


@dataclass(frozen=True)
class TokenizeConfig:
    """The stage's own options; `tokenizer` names a directory, or is empty when one is trained."""

    tokenizer: str = ""
    train_tokenizer: bool = False
    extend: str = ""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    save_tokenizer: str = ""
    train_bytes: int = 1_000_000_000
    length: int = 2048
    packing: str = "sequential"
    encoder: str = "auto"
    format: str = "rows"
    report: str = ""
    compare: str = ""
    by: str = ""
    mix: str = ""
    tokens: int | None = None
    max_repeat: float = 4.0

    def __post_init__(self) -> None:
        if self.tokenizer and (self.train_tokenizer or self.extend):
            other = "--extend DIR" if self.extend else "--train-tokenizer"
            raise UsageError(f"give either --tokenizer DIR or {other}, not both")
        if self.compare and not self.report:
            raise UsageError("--compare DIR is for a report; give --report FILE too")
        self._check_training()
        if self.mix and self.format != "rows":
            raise UsageError(f"--format {self.format}: a mix is written as rows")
        for name, value, choices in (
            ("packing", self.packing, PACKINGS),
            ("encoder", self.encoder, ENGINES),
            ("format", self.format, FORMATS),
        ):
            if value not in choices:
                raise UsageError(f"--{name}: {value!r} (expected {' or '.join(choices)})")
        if self.length < 2:
            raise UsageError(f"--length: {self.length} (expected at least 2)")
        if self.tokens is not None and not self.mix:
            raise UsageError("--tokens is the budget of a mix; give --mix SOURCE=WEIGHT,… too")
        if self.by and self.format == "megatron":
            raise UsageError("--by: Megatron files have no sources (expected --format rows)")
        if self.mix:
            parse_mix(self.mix)

    def _check_training(self) -> None:
        """Raise UsageError for options of a training that a tokenizer that exists does not take."""
        taken = ("vocab_size", "min_frequency", "multiple") if self.extend else ()
        odd = self.training.changed(*taken)
        if self.tokenizer and self.train_bytes != TokenizeConfig.train_bytes:
            odd = odd or "--train-bytes"
        if odd and self.tokenizer:
            raise UsageError(f"{odd} is for training; --tokenizer DIR has its own: leave one out")
        if odd and self.extend:
            raise UsageError(f"{odd}: the tokenizer of --extend has its own; leave that option out")

    @property
    def buckets(self) -> Buckets | None:
        """How sources are split by a score, if they are."""
        return Buckets.parse(self.by) if self.by else None


def run(job: Job, config: TokenizeConfig) -> None:
    """Tokenizes the job's documents; raises what the shards and the tokenizer raise."""
    from sabia.core.shards import open_inputs, run_map
    from sabia.core.shards.layout import name_shards
    from sabia.core.text import mixed_rows, token_files

    sources = open_inputs(job, "document")
    tokenizer, place = obtain_tokenizer(job, config, sources)
    if config.format == "rows":
        name_shards(job)
    said = replace(job, options=_recorded(config, tokenizer, place))
    encoder, salt = None, "untrained"
    if tokenizer is not None:  # it is None in a dry run of a training
        encoder, salt = _encoder(tokenizer, config, sources), tokenizer.fingerprint
    if config.report and encoder and not job.dry_run:
        _report(config, encoder, sources, place)
    if config.mix:
        if encoder is None or job.dry_run:
            print(f"write {job.out or 'stdout'}: {config.mix} of {len(sources)} shards")
            return
        mixed_rows.write(said, config, encoder, sources, salt)
        return
    transform = partial(
        pack_shard,
        encoder=encoder,
        length=config.length,
        packing=config.packing,
        buckets=config.buckets,
    )
    if config.format == "rows":
        summary = run_map(said, transform, "document", "tokens", sources=sources, salt=salt)
    else:
        summary = token_files.write(Plan(said, config.format, transform, salt), sources)
    if not job.dry_run:
        report_bytes_per_token(job, summary)


def pack_shard(
    batches: Iterator[pa.RecordBatch],
    context: ShardContext,
    encoder: Encoder,
    length: int,
    packing: str,
    buckets: Buckets | None = None,
) -> Iterator[pa.RecordBatch]:
    """The transform: documents of one shard → token rows."""
    tally, names = Tally(), list[str | None]()
    packer = make_packer(packing, length, encoder.tokenizer.pad_id)
    for batch in batches:
        kept = usable(batch, context, buckets)
        tokens, lengths = encode_documents(encoder, kept, tally)
        for rows in packer.add(tokens, lengths, source_codes(kept, names)):
            yield to_batch(rows, names)
    for rows in packer.flush():
        yield to_batch(rows, names)
    for name, n in tally.counters().items():
        context.count(name, n)


def usable(
    batch: pa.RecordBatch, context: ShardContext, buckets: Buckets | None = None
) -> pa.RecordBatch:
    """The batch without documents that have no text, which are rejected; sources are split."""
    import pyarrow.compute as pc

    empty = pc.equal(pc.binary_length(batch.column("text")), 0)
    if pc.any(empty).as_py():
        context.reject(batch.filter(empty), "empty text")
        batch = batch.filter(pc.invert(empty))
    return buckets.split(batch) if buckets else batch


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


def _encoder(tokenizer: Tokenizer, config: TokenizeConfig, sources: Sequence[Source]) -> Encoder:
    choice = choose_encoder(tokenizer, probe_texts(_text_batches(sources)), config.encoder)
    notes.note(f"encoder {choice.reason}")
    return choice.encoder


def _text_batches(sources: Sequence[Source]) -> Iterator[pa.RecordBatch]:
    for source in sources:
        for batch in source.batches(columns=["text"]):
            stop.check()
            yield batch


def _report(
    config: TokenizeConfig, encoder: Encoder, sources: Sequence[Source], place: str
) -> None:
    """The figures of the tokenizer, and of the one to compare it with, on the same documents."""
    from sabia.core.text.vocabulary_report import measure, write_report

    encoders = {place: encoder}
    if config.compare:
        other = with_end(load_tokenizer(config.compare))
        encoders[config.compare] = _encoder(other, config, sources)
    figures = measure(list(encoders.values()), sources)
    write_report(config.report, dict(zip(encoders, figures, strict=True)))


def _recorded(config: TokenizeConfig, tokenizer: Tokenizer | None, place: str) -> dict[str, object]:
    """What the output's metadata says of how it was made: what decides the rows, no more."""
    said: dict[str, object] = {
        "tokenizer": place,
        "length": config.length,
        "packing": config.packing,
        "format": config.format,
    }
    if tokenizer is not None:
        said |= {"vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}
        said |= {"eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
    if config.mix:
        said |= {"mix": config.mix, "tokens": config.tokens, "max_repeat": config.max_repeat}
    return said
