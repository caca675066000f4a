"""The tokenize stage: documents → packed rows of token ids, shard by shard, or mixed by source.

Each document ends with the tokenizer's end-of-document token. Without a mix every shard is packed
on its own (a map: the rows depend neither on workers nor on slices). A mix needs the counts of all
shards, so it is made in one process: each source is packed into a spool of its own, then rows are
drawn by the plan of `mix_writer`. If a tokenizer must be trained, it is trained on the input first
and kept beside the rows; a repeated run finds it there and does not train again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import pyarrow as pa

from sabia.core import notes
from sabia.core.options.tokenize import TokenizeOptions
from sabia.core.shards import schemas
from sabia.core.shards.dry_run import NoRejects, Sample, estimate, planned, unmeasured
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.layout import name_shards
from sabia.core.shards.manifest import check_output, rows_finished
from sabia.core.shards.mapping import ShardContext, run_map
from sabia.core.shards.sources import Source, batches_of, bytes_of
from sabia.core.text.tokenize import mix_writer
from sabia.core.text.tokenize.document_encoding import ENCODED, Buckets, encode_shard, pack_shard
from sabia.core.text.tokenize.encoders import DeferredEncoder, Encoder, choose_encoder, probe_texts
from sabia.core.text.tokenize.mix_writer import parse_mix
from sabia.core.text.tokenize.token_counts import report_bytes_per_token
from sabia.core.text.tokenize.token_files import ArrowSink, MegatronSink
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer
from sabia.core.text.tokenize.tokenizer_source import obtain_tokenizer, with_end


def run(job: Job, options: TokenizeOptions) -> None:
    """Tokenize the job's documents; raises what the shards and the tokenizer raise."""
    buckets = Buckets.parse(options.by)
    if options.mix:
        parse_mix(options.mix)  # a mistake in it is reported before any work
    several = (options.mix, options.report, options.compare, not options.tokenizer)
    sources = open_inputs(job, "document", once=not any(several))
    check_output(job, sources, ending=".parquet" if options.format == "rows" else ".json")
    tokenizer, path = obtain_tokenizer(job, options, sources)
    if options.format == "rows":
        name_shards(job)
    recorded = replace(job, options=_recorded(options, tokenizer, path))
    encoder: Encoder | None = None
    salt = "untrained"
    if tokenizer is not None:  # it is None in a dry run of a training
        salt = tokenizer.fingerprint
        whole = not options.mix and options.format == "rows" and not options.report
        if whole and rows_finished(recorded, "tokens", sources, salt) is not None:
            encoder = DeferredEncoder(tokenizer, options.encoder)  # no text need be read
        else:
            encoder = _encoder(tokenizer, options, sources)
    if options.report and encoder and not job.dry_run:
        _report(options, encoder, sources, path)
    pack = partial(
        pack_shard,
        encoder=encoder,  # type: ignore[arg-type]  # None in a dry run, where nothing is packed
        length=options.length,
        packing=options.packing,
        buckets=buckets,
    )
    if options.mix and (encoder is None or job.dry_run):
        _show_mix(job, options, sources, None if encoder is None else pack)
        return
    if options.mix and encoder is not None:
        summary = mix_writer.write(recorded, options, encoder, sources, salt)
    else:
        sampled = unmeasured if encoder is None else None
        run_format = partial(run_map, recorded, sources=sources, salt=salt, sampled=sampled)
        if options.format == "rows":
            summary = run_format(pack, kind_out="tokens")
        elif options.format == "arrow":
            tokens = schemas.KINDS["tokens"]
            summary = run_format(pack, kind_out="arrow", schema=tokens, sink=ArrowSink(job))
        else:
            encode = partial(encode_shard, encoder=encoder)  # type: ignore[arg-type]  # as above
            sink = MegatronSink(job, tokenizer.vocab_size if tokenizer else 0)
            summary = run_format(encode, kind_out="megatron", schema=ENCODED, sink=sink)
    if not job.dry_run:
        report_bytes_per_token(job, summary)


def _show_mix(
    job: Job,
    options: TokenizeOptions,
    sources: Sequence[Source],
    pack: Callable[..., Iterator[pa.RecordBatch]] | None,
) -> None:
    """Show the plan of a mix, with estimates by packing a sample where there is a tokenizer."""
    plan = planned(job, sources, figures={"mix": options.mix})
    if pack is not None:
        row_bytes = 4 * options.length

        def packed(sample: Sample) -> Iterator[pa.RecordBatch]:
            return pack(sample.batches(), ShardContext(0, sample.name, NoRejects("")))

        def size(batches: Sequence[pa.RecordBatch]) -> int:
            return sum(batch.num_rows for batch in batches) * row_bytes

        estimate(plan, sources, packed, job.jobs, size)
        if options.tokens is not None:
            plan.bytes_written = options.tokens // options.length * row_bytes
    plan.show(job)


def _encoder(tokenizer: Tokenizer, options: TokenizeOptions, sources: Sequence[Source]) -> Encoder:
    if any(source.stream is not None for source in sources):
        return DeferredEncoder(tokenizer, options.encoder)
    texts = probe_texts(batch for _, batch in batches_of(sources, ["text"]))
    choice = choose_encoder(tokenizer, texts, options.encoder, partial(bytes_of, sources))
    notes.note(f"encoder {choice.reason}")
    return choice.encoder


def _report(
    options: TokenizeOptions, encoder: Encoder, sources: Sequence[Source], path: str
) -> None:
    """Write the metrics of the tokenizer, and of that of --compare, on the same documents."""
    from sabia.core.text.tokenize.vocabulary_report import measure, write_report

    encoders = {path: encoder}
    if options.compare:
        other = with_end(load_tokenizer(options.compare, "--compare"))
        encoders[options.compare] = _encoder(other, options, sources)
    metrics = measure(list(encoders.values()), sources)
    write_report(options.report, dict(zip(encoders, metrics, strict=True)))


def _recorded(
    options: TokenizeOptions, tokenizer: Tokenizer | None, path: str
) -> dict[str, object]:
    """The options and tokenizer properties that decide the rows, for the output's metadata."""
    recorded: dict[str, object] = {k: v for k, v in options.recorded().items() if v != ""}
    # Megatron files have no rows, but earlier versions recorded length and packing for them too
    recorded |= {"tokenizer": path, "length": options.length, "packing": options.packing}
    if tokenizer is not None:
        recorded |= {"vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}
        recorded |= {"eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
    return recorded
