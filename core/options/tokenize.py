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
from sabia.core.options.shared import Appending, Executor, RowOptions, TextColumn
from sabia.core.options.table import Options


class VocabularyOptions(Options, group="Tokenizer training", recorded=False):
    """The size of a vocabulary that is trained or extended."""

    vocab_size: int = quantity(
        "whole", "Number of tokens in the vocabulary, including special tokens", "32k", common=True
    )
    """At least 272: 256 bytes and 16 special tokens. Counts are decimal: 32k is 32,000."""
    vocab_multiple: int = integer("Round the vocabulary size up to a multiple of this", 1, least=1)
    """Unused special tokens fill the vocabulary if the input has too few pairs to merge. With
    `--extend` the embedding rows of the model are rounded up."""
    min_frequency: int = integer("Merge only pairs that occur at least this often", 2, least=1,
                                 only=needs(model=("bpe", "bpe-fallback")))  # fmt: skip


class TokenizerKind(Options, group="Tokenizer training", recorded=False):
    """The algorithm of a tokenizer, and its special tokens."""

    model: str = choice("Tokenizer algorithm", "bpe", "bpe-fallback", "unigram")
    """`bpe` is byte-level BPE. `bpe-fallback` (BPE) and `unigram` work on characters: `▁` replaces
    a space, and rare characters are encoded as bytes. Training `unigram` twice on the same input
    gives slightly different scores."""
    pattern: str = choice("Pre-tokenization pattern of bpe; cl100k is that of GPT-4", "cl100k",
                          "o200k", "gpt2", "deepseek", only=needs(model="bpe"))  # fmt: skip
    """`cl100k` is the pattern of GPT-4, `o200k` that of GPT-4o, `gpt2` that of GPT-2 and `deepseek`
    that of DeepSeek-V3."""
    digits: str = choice("Maximum number of digits in a token: one or three", "single", "three")
    normalize: str = choice("Unicode normalization form applied to the text", "none", "nfc", "nfkc")
    special_tokens: str = text("Additional special tokens, separated by commas", "TOKEN,…")
    reserved: int = integer("Number of special tokens reserved for later use", 12, least=0)


class TokenizerTraining(VocabularyOptions, TokenizerKind):
    """How a tokenizer is trained. Its fingerprint is recorded instead of these options."""


class TokenizeOptions(
    RowOptions, Executor, TextColumn, Appending, TokenizerTraining, group="Tokenizer",
    only={TokenizerKind: unless("extend"), TokenizerTraining: unless("tokenizer")},
):  # fmt: skip
    """Options of `sabia tokenize`."""

    tokenizer: str = text("Use this tokenizer instead of training one", "DIR", common=True,
                          recorded=False)  # fmt: skip
    """A `tokenizer.json`, or a directory that contains one, such as a model directory. Without it,
    a tokenizer is trained on the input."""
    train_tokenizer: bool = switch("Train a tokenizer on the input (the default)",
                                   only=unless("tokenizer", "extend"), recorded=False)  # fmt: skip
    """Standard input is copied to a temporary file, because it is read twice."""
    extend: str = text(
        "Add tokens learned from the input to this BPE tokenizer; old ids stay the same", "DIR",
        only=unless("tokenizer"), recorded=False,
    )  # fmt: skip
    """Tokens learned from the input are added until there are `--vocab-size`. The new tokens and
    merges are appended to the old ones, so that a text may be encoded in fewer tokens than before.
    `extension.json` next to the tokenizer lists the old tokens of which each new token consists;
    `sabia pretrain` initializes its embedding with the mean of theirs."""
    train_bytes: int = quantity("size", "Maximum amount of text to train the tokenizer on", "1GB",
                                only=unless("tokenizer"), recorded=False,
                                group="Tokenizer training")  # fmt: skip
    """Each source contributes the same number of bytes, from documents evenly spaced over the
    source. If a source is too small, the other sources contribute more."""
    save_tokenizer: str = text("Directory to save the tokenizer in", "DIR",
                               unset="next to the output", recorded=False)  # fmt: skip
    encoder: str = choice("Encoder implementation; auto uses the fastest one with identical ids",
                          "auto", "kernel", "tiktoken", "tokenizers", recorded=False)  # fmt: skip
    """`kernel` is sabia's own encoder for BPE, both byte-level with a known pattern (GPT-2, GPT-4,
    GPT-NeoX, Llama 3, Qwen, DeepSeek) and with `▁` for a space (Llama 2, Mistral, Gemma);
    `tiktoken` and `tokenizers` are the packages. `auto` uses the fastest one that gives the same
    ids as `tokenizers` on the first 1000 documents, and prints its name. Any other value requires
    that implementation. The ids are the same with all of them."""

    length: int = quantity("length", "Number of tokens in a row; lengths are binary, 2k is 2048",
                           "2k", least=2, group="Data", common=True,
                           only=needs(format=("rows", "arrow")))  # fmt: skip
    packing: str = choice(
        "How rows are filled: split every document at the end of a row, or only long ones",
        "sequential", "best-fit", group="Data", only=needs(format=("rows", "arrow")),
    )  # fmt: skip
    """`sequential` splits a document when a row is full, and pads only the last row of a shard.
    `best-fit` splits only documents that are longer than a row, and pads rows that are not
    full."""
    format: str = choice("Output format: token rows (Parquet), Arrow for datasets, or Megatron-LM",
                         "rows", "arrow", "megatron", group="Data")  # fmt: skip
    """`rows` writes packed rows as Parquet. `arrow` and `megatron` need a directory as `--out` and
    write one part per input shard: `arrow` writes packed rows as Arrow files that
    `datasets.load_from_disk` can read; `megatron` writes whole documents as `.bin` and `.idx` files
    of Megatron-LM, with 16-bit ids if the vocabulary is small enough."""

    by: str = text("Split each source by a score: edu=1,3 gives SOURCE/edu0 to SOURCE/edu2",
                   "SCORE=EDGE,…", group="Mixture",
                   only=needs(format=("rows", "arrow")))  # fmt: skip
    """With `edu=1,3` the documents of the source `web` get the source `web/edu0` (score `edu` below
    1), `web/edu1` (from 1 to below 3), `web/edu2` (3 or more) or `web/edu-none` (no score). `--mix`
    here and in `sabia pretrain` can then give them different weights."""
    mix: str = text("Mix sources by weight (fraction of tokens), such as web=3,books=1",
                    "SOURCE=WEIGHT,…", group="Mixture", only=needs(format="rows"))  # fmt: skip
    """Each source (a value of the column `source`) is packed separately. The rows of a source are
    shuffled with `--seed`, and the sources are interleaved by weight. One process reads all
    shards."""
    tokens: int | None = quantity("whole", "Total number of tokens in the mix", only=needs("mix"),
                                  group="Mixture", unset="all tokens of its sources")  # fmt: skip
    max_repeat: float = number("Maximum number of passes over a source in the mix", 4.0, least=0.01,
                               only=needs("mix"), group="Mixture")  # fmt: skip
    """If a source is too small for its weight, the other sources get the remaining tokens. Planned
    and achieved fractions are reported."""
    seed: int = changed(RowOptions.seed, only=needs("mix"))
    jobs: int = changed(RowOptions.jobs, only=unless("mix"))

    append: bool = changed(Appending.append, only=(
        needs("out"), needs("tokenizer"), needs(format="rows"), unless("mix")))  # fmt: skip
    report: str = text("Write tokenizer statistics to this file as JSON (- for stderr)", "FILE",
                       group="Input and output", recorded=False)  # fmt: skip
    """The statistics are measured on at most 100 MB of the documents: for each language the bytes
    per token, the tokens per word and the fraction of tokens that do not contain a complete
    character; and the fraction of the vocabulary that is not used. They are also printed as a table
    on standard error."""
    compare: str = text("Also report the statistics of this tokenizer, for comparison", "DIR",
                        group="Input and output", only=needs("report"), recorded=False)  # fmt: skip
