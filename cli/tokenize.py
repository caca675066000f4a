"""`sabia tokenize`: documents into packed rows of token ids."""

from typing import Annotated

from sabia.cli.grammar import command, count, length, option, size
from sabia.core.shards.job import Job


@command(
    kind="map",
    examples="""
    sabia tokenize docs/ --tokenizer model/ --length 2k -o tokens/
    sabia dedup docs.parquet | sabia tokenize --train-tokenizer --vocab-size 4096 -o tokens/
    sabia tokenize docs/ --tokenizer model/ --format megatron --report fit.json -o megatron/
    sabia tokenize web/ edu/ --tokenizer model/ --mix web=0.6,edu=0.4 --tokens 10M -o mixed/
    """,
)
def tokenize(
    job: Job,
    tokenizer: Annotated[
        str, option("tokenizer.json, or a directory with one; else one is trained.", metavar="DIR")
    ] = "",
    train_tokenizer: Annotated[
        bool, option("Train one on the input (default).", "--train-tokenizer")
    ] = False,
    extend: Annotated[
        str, option("Extend this tokenizer on the input, old ids kept.", metavar="DIR")
    ] = "",
    vocab_size: Annotated[float, count("Tokens to train, special ones counted.")] = "32k",  # type: ignore[assignment]
    vocab_multiple: Annotated[int, option("Round the vocabulary up.", metavar="N")] = 1,
    model: Annotated[str, option("bpe, bpe-fallback or unigram (varies).", metavar="NAME")] = "bpe",
    pattern: Annotated[
        str, option("How bpe splits: cl100k, o200k, gpt2 or deepseek.", metavar="NAME")
    ] = "cl100k",
    digits: Annotated[str, option("Digits a token: single or three.", metavar="NAME")] = "single",
    normalize: Annotated[str, option("none, nfc or nfkc.", metavar="NAME")] = "none",
    special_tokens: Annotated[str, option("More special tokens.", metavar="TOKEN,…")] = "",
    reserved: Annotated[int, option("Spare special tokens.", metavar="N")] = 12,
    min_frequency: Annotated[int, option("Least count of a merge.", metavar="N")] = 2,
    train_bytes: Annotated[float, size("Train on at most so much text.")] = "1GB",  # type: ignore[assignment]
    save_tokenizer: Annotated[
        str, option("Where to keep the tokenizer (default: beside the output).", metavar="DIR")
    ] = "",
    length: Annotated[int, length("Tokens in a row.")] = "2k",  # type: ignore[assignment]
    packing: Annotated[
        str, option("sequential (no padding) or best-fit (fewest cuts).", metavar="NAME")
    ] = "sequential",
    format: Annotated[
        str, option("rows (Parquet), arrow (datasets) or megatron.", metavar="NAME")
    ] = "rows",
    report: Annotated[
        str, option("Vocabulary statistics as JSON; - is stderr.", metavar="FILE")
    ] = "",
    compare: Annotated[str, option("Report this tokenizer beside ours.", metavar="DIR")] = "",
    by: Annotated[
        str,
        option(
            "Split sources by a score: edu=1,3 makes web/edu0 to web/edu2.", metavar="SCORE=EDGE,…"
        ),
    ] = "",
    mix: Annotated[str, option("Mix sources by weight.", metavar="SOURCE=WEIGHT,…")] = "",
    tokens: Annotated[float | None, count("Budget of the mix (default: all there is).")] = None,
    max_repeat: Annotated[
        float, option("Read a source at most so often in a mix.", metavar="TIMES", min=0.01)
    ] = 4.0,
    encoder: Annotated[
        str, option("auto, kernel, tiktoken or tokenizers.", metavar="NAME")
    ] = "auto",
) -> None:
    """Pack documents into rows of token ids.

    Every row has the same length; documents end with the end-of-document token, long ones go on
    in the next row, and the rows record where documents begin. Only the last row of a shard is
    padded. The tokenizer is kept beside the rows.
    """
    from sabia.core.text import tokenize as room

    training = room.TrainingConfig(
        vocab_size=int(vocab_size),
        model=model,
        pattern=pattern,
        digits=digits,
        normalize=normalize,
        reserved=reserved,
        special_tokens=tuple(filter(None, special_tokens.split(","))),
        min_frequency=min_frequency,
        multiple=vocab_multiple,
    )
    config = room.TokenizeConfig(
        tokenizer=tokenizer,
        train_tokenizer=train_tokenizer,
        extend=extend,
        training=training,
        save_tokenizer=save_tokenizer,
        train_bytes=int(train_bytes),
        length=int(length),
        packing=packing,
        encoder=encoder,
        format=format,
        report=report,
        compare=compare,
        by=by,
        mix=mix,
        tokens=None if tokens is None else int(tokens),
        max_repeat=max_repeat,
    )
    room.run(job, config)
