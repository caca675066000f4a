"""The tokenize stage: documents → packed rows of token ids, shard by shard, or mixed by source.

Each document ends with the tokenizer's end-of-document token. Without a mix every shard is packed
on its own (a map: the rows depend neither on workers nor on slices). A mix needs the counts of all
shards, so it is made in one process: each source is packed apart into a spool, then rows are drawn
by the plan of `mixing`. The tokenizer is trained on the input first where that is asked for, and is
kept beside the rows; a re-run finds it there and does not train again.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from sabia.core import notes
from sabia.core.options.tokenize import TokenizeOptions
from sabia.core.shards.dry_run import planned, unmeasured
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.layout import name_shards
from sabia.core.shards.mapping import run_map
from sabia.core.shards.sources import Source, batches_of
from sabia.core.text.tokenize import mix_writer, token_files
from sabia.core.text.tokenize.document_encoding import pack_shard, show_dry_run
from sabia.core.text.tokenize.encoders import Encoder, choose_encoder, probe_texts
from sabia.core.text.tokenize.mix_plan import parse_mix
from sabia.core.text.tokenize.source_buckets import Buckets
from sabia.core.text.tokenize.token_counts import report_bytes_per_token
from sabia.core.text.tokenize.tokenizer import Tokenizer, load_tokenizer
from sabia.core.text.tokenize.tokenizer_source import obtain_tokenizer, with_end


def run(job: Job, options: TokenizeOptions) -> None:
    """Tokenizes the job's documents; raises what the shards and the tokenizer raise."""
    buckets, weights = Buckets.parse(options.by), parse_mix(options.mix) if options.mix else {}
    sources = open_inputs(job, "document")
    tokenizer, place = obtain_tokenizer(job, options, sources)
    if options.format == "rows":
        name_shards(job)
    said = replace(job, options=_recorded(options, tokenizer, place))
    encoder, salt = None, "untrained"
    if tokenizer is not None:  # it is None in a dry run of a training
        encoder, salt = _encoder(tokenizer, options, sources), tokenizer.fingerprint
    if options.report and encoder and not job.dry_run:
        _report(options, encoder, sources, place)
    transform = partial(
        pack_shard,
        encoder=encoder,  # type: ignore[arg-type]  # None in a dry run, where nothing is packed
        length=options.length,
        packing=options.packing,
        buckets=buckets,
    )
    if weights:
        if encoder is None or job.dry_run:
            shown = planned(job, sources, figures={"mix": options.mix})
            show_dry_run(shown, job, sources, transform, tokens=options.tokens)
        else:
            mix_writer.write(said, options, encoder, sources, salt)
        return
    if options.format == "rows":
        sampled = unmeasured if encoder is None else None
        summary = run_map(
            said, transform, "document", "tokens", sources=sources, salt=salt, sampled=sampled
        )
    else:
        summary = token_files.write(
            token_files.PartSettings(said, options.format, transform, salt), sources
        )
    if not job.dry_run:
        report_bytes_per_token(job, summary)


def _encoder(tokenizer: Tokenizer, options: TokenizeOptions, sources: Sequence[Source]) -> Encoder:
    texts = probe_texts(batch for _, batch in batches_of(sources, ["text"]))
    choice = choose_encoder(tokenizer, texts, options.encoder)
    notes.note(f"encoder {choice.reason}")
    return choice.encoder


def _report(
    options: TokenizeOptions, encoder: Encoder, sources: Sequence[Source], place: str
) -> None:
    """The figures of the tokenizer, and of the one to compare it with, on the same documents."""
    from sabia.core.text.tokenize.vocabulary_report import measure, write_report

    encoders = {place: encoder}
    if options.compare:
        other = with_end(load_tokenizer(options.compare, "--compare"))
        encoders[options.compare] = _encoder(other, options, sources)
    figures = measure(list(encoders.values()), sources)
    write_report(options.report, dict(zip(encoders, figures, strict=True)))


def _recorded(
    options: TokenizeOptions, tokenizer: Tokenizer | None, place: str
) -> dict[str, object]:
    """What the output's metadata says of how it was made: what decides the rows, no more."""
    said: dict[str, object] = {k: v for k, v in options.recorded().items() if v != ""}
    # Megatron files have no rows, but earlier versions recorded these two for them as well
    said |= {"tokenizer": place, "length": options.length, "packing": options.packing}
    if tokenizer is not None:
        said |= {"vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint}
        said |= {"eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id}
    return said
