"""Options of `sabia tokenize`."""

from sabia.core.options.option import (
    changed,
    choice,
    integer,
    needs,
    number,
    quantity,
    switch,
    text,
    unless,
)
from sabia.core.options.shared import RowOptions
from sabia.core.options.table import Options


class VocabularyOptions(Options, group="Tokenizer training", recorded=False):
    """The size of a vocabulary that is trained or extended."""

    vocab_size: int = quantity("whole", "Tokens of the vocabulary, special ones counted", "32k",
                               common=True)  # fmt: skip
    """There are at least 272: 256 bytes and 16 special tokens."""
    vocab_multiple: int = integer("Round the vocabulary up to a multiple", 1, least=1)
    """Unused special tokens fill it where the input has too few pairs; of an extended tokenizer the
    model's rows are rounded up."""
    min_frequency: int = integer(
        "Minimum count of a pair to merge", 2, least=1, only=needs(model=("bpe", "bpe-fallback"))
    )


class TokenizerKind(Options, group="Tokenizer training", recorded=False):
    """The kind of a tokenizer: how text is split, and its special tokens."""

    model: str = choice("Algorithm of the tokenizer", "bpe", "bpe-fallback", "unigram")
    """`bpe` works on bytes. `bpe-fallback` and `unigram` work on characters, with `▁` for a blank
    and bytes for rare characters. The scores of `unigram` differ a little from one training to the
    next."""
    pattern: str = choice(
        "How bpe splits text before it merges", "cl100k", "o200k", "gpt2", "deepseek",
        only=needs(model="bpe"),
    )  # fmt: skip
    """`cl100k` is the pattern of GPT-4."""
    digits: str = choice("Digits in a token: one, or at most three", "single", "three")
    normalize: str = choice("Unicode normalization", "none", "nfc", "nfkc")
    special_tokens: str = text("Additional special tokens", "TOKEN,…")
    reserved: int = integer("Special tokens reserved for later use", 12, least=0)


class TokenizerTraining(VocabularyOptions, TokenizerKind):
    """What a tokenizer is trained by. Its fingerprint is recorded instead of them."""


class TokenizeOptions(
    RowOptions, TokenizerTraining, group="Tokenizer",
    only={TokenizerKind: unless("extend"), TokenizerTraining: unless("tokenizer")},
):  # fmt: skip
    """Options of `sabia tokenize`."""

    tokenizer: str = text("Use this tokenizer", "DIR", common=True, recorded=False)
    """A `tokenizer.json`, or a directory that holds one, such as a model's. Without it a tokenizer
    is trained on the input."""
    train_tokenizer: bool = switch(
        "Train a tokenizer on the input (the default)", only=unless("tokenizer", "extend"),
        recorded=False,
    )  # fmt: skip
    """Standard input is kept on disk so that it can be read twice."""
    extend: str = text(
        "Extend this BPE tokenizer on the input, keeping its ids", "DIR", only=unless("tokenizer"),
        recorded=False,
    )  # fmt: skip
    """It grows to `--vocab-size` tokens. New tokens and merges come behind the old ones, so that a
    text may be encoded shorter than before. `extension.json` beside the tokenizer lists for each
    new token the old ones that it is made of, and `sabia pretrain` begins its embedding with the
    mean of theirs."""
    train_bytes: int = quantity(
        "size", "Train on at most this much text", "1GB", only=unless("tokenizer"), recorded=False,
        group="Tokenizer training",
    )  # fmt: skip
    """Each source gives an equal part as far as it goes, evenly spread over it."""
    save_tokenizer: str = text(
        "Directory to save the tokenizer in", "DIR", unset="beside the output", recorded=False
    )
    encoder: str = choice(
        "Engine that encodes", "auto", "kernel", "tiktoken", "tokenizers", recorded=False
    )
    """`auto` takes the fastest engine that gives the same ids as `tokenizers` on the first 1000
    documents, and says which: `kernel`, our own, where the tokenizer is a byte-level BPE of a known
    kind and there is enough to encode; `tiktoken`; `tokenizers`. A name insists. The rows are the
    same with every engine."""

    length: int = quantity(
        "length", "Tokens in a row", "2k", least=2, group="Data", common=True,
        only=needs(format=("rows", "arrow")),
    )  # fmt: skip
    """Lengths are binary: 2k is 2048."""
    packing: str = choice(
        "How documents fill rows", "sequential", "best-fit", group="Data",
        only=needs(format=("rows", "arrow")),
    )  # fmt: skip
    """`sequential` cuts documents where a row is full and pads only the last row of a shard.
    `best-fit` cuts only documents longer than a row and pads rows that end early."""
    format: str = choice("Format of the output", "rows", "arrow", "megatron", group="Data")
    """`rows` are Parquet. Into a directory, a part for each input shard: `arrow` writes the rows as
    Arrow files that `datasets.load_from_disk` opens; `megatron` writes documents, not rows, as
    `.bin` and `.idx` files, with 16-bit ids where the vocabulary allows."""

    by: str = text(
        "Split sources by a score: edu=1,3 makes web/edu0 to web/edu2", "SCORE=EDGE,…",
        group="Mixture", only=needs(format=("rows", "arrow")),
    )  # fmt: skip
    """With `edu=1,3` the documents of the source `web` are of `web/edu0` (below 1), `web/edu1`
    (from 1), `web/edu2` (from 3) or `web/edu-none`. Mixes here and in `sabia pretrain` can then
    prefer good documents, or keep them for the end."""
    mix: str = text(
        "Mix sources by weight", "SOURCE=WEIGHT,…", group="Mixture", only=needs(format="rows")
    )
    """Each source (the column `source`) is packed apart, and the rows are interleaved by weight,
    shuffled within a source by `--seed`. This needs all shards in one process."""
    tokens: int | None = quantity(
        "whole", "Token budget of the mix", only=needs("mix"), group="Mixture",
        unset="all that its sources have",
    )  # fmt: skip
    max_repeat: float = number(
        "Maximum passes over a source in the mix", 4.0, least=0.01, only=needs("mix"),
        group="Mixture",
    )  # fmt: skip
    """What a source cannot give, the others take over; planned and achieved shares are
    reported."""
    seed: int = changed(RowOptions.seed, only=needs("mix"))
    jobs: int = changed(RowOptions.jobs, only=unless("mix"))
    shard: str | None = changed(RowOptions.shard, only=unless("mix"))
    """A slice cannot train a tokenizer either."""

    report: str = text(
        "Write vocabulary statistics as JSON (- for stderr)", "FILE", group="Input and output",
        recorded=False,
    )  # fmt: skip
    """How well the tokenizer fits, on at most 100 MB of the documents, as JSON and as a table on
    standard error: bytes a token, tokens a word and the share of tokens without a whole character
    by language, and the share of the vocabulary that is not used."""
    compare: str = text(
        "Report on this tokenizer too", "DIR", group="Input and output", only=needs("report"),
        recorded=False,
    )  # fmt: skip
