"""`sabia tokenize`: documents into packed rows of token ids."""

from typing import Annotated

from sabia.cli.grammar import command, count, length, option, size
from sabia.core.shards.job import Job


@command(
    kind="map",
    examples="""
    sabia tokenize docs/ --tokenizer model/ --length 2k -o tokens/
    sabia dedup docs.parquet | sabia tokenize --train-tokenizer --vocab-size 4096 -o tokens/
    sabia tokenize web/ edu/ --tokenizer model/ --mix web=0.6,edu=0.4 --tokens 10M -o mixed/
    """,
)
def tokenize(
    job: Job,
    tokenizer: Annotated[
        str, option("tokenizer.json, or a directory with one; else one is trained.", metavar="DIR")
    ] = "",
    train_tokenizer: Annotated[
        bool, option("Train a byte-level BPE on the input (default).", "--train-tokenizer")
    ] = False,
    vocab_size: Annotated[int, option("Tokens to train, special ones counted.", metavar="N")] = (
        32_000
    ),
    train_bytes: Annotated[float, size("Train on at most so much text.")] = "1GB",  # type: ignore[assignment]
    save_tokenizer: Annotated[
        str, option("Where to keep the tokenizer (default: beside the output).", metavar="DIR")
    ] = "",
    length: Annotated[int, length("Tokens in a row.")] = "2k",  # type: ignore[assignment]
    packing: Annotated[
        str, option("sequential (no padding) or best-fit (fewest cuts).", metavar="NAME")
    ] = "sequential",
    mix: Annotated[str, option("Mix sources by weight.", metavar="SOURCE=WEIGHT,…")] = "",
    tokens: Annotated[float | None, count("Budget of the mix (default: all there is).")] = None,
    max_repeat: Annotated[
        float, option("Read a source at most so often in a mix.", metavar="TIMES", min=0.01)
    ] = 4.0,
    encoder: Annotated[str, option("auto, tiktoken or tokenizers.", metavar="NAME")] = "auto",
) -> None:
    """Pack documents into rows of token ids.

    Every row has the same length; documents end with the end-of-document token, long ones go on
    in the next row, and the rows record where documents begin. Only the last row of a shard is
    padded. The tokenizer is kept beside the rows.
    """
    from sabia.core.text import tokenize as room

    config = room.TokenizeConfig(
        tokenizer=tokenizer,
        train_tokenizer=train_tokenizer,
        vocab_size=vocab_size,
        save_tokenizer=save_tokenizer,
        train_bytes=int(train_bytes),
        length=int(length),
        packing=packing,
        encoder=encoder,
        mix=mix,
        tokens=None if tokens is None else int(tokens),
        max_repeat=max_repeat,
    )
    room.run(job, config)
