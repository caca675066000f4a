"""`sabia tokenize`: pack documents into rows of token ids."""

from sabia.cli.command import command
from sabia.core.options.tokenize import TokenizeOptions
from sabia.core.shards.job import Job


@command(
    TokenizeOptions,
    examples="""
    sabia tokenize docs/ --tokenizer model/ --length 2k -o tokens/
    sabia dedup docs.parquet | sabia tokenize --train-tokenizer --vocab-size 4096 -o tokens/
    sabia tokenize docs/ --tokenizer model/ --format megatron --report fit.json -o megatron/
    sabia tokenize web/ edu/ --tokenizer model/ --mix web=0.6,edu=0.4 --tokens 10M -o mixed/
    """,
)
def tokenize(job: Job, options: TokenizeOptions) -> None:
    """Encode documents and pack them into rows of token ids.

    All rows have the same length. Each document ends with the end-of-document token, and a document
    that does not fit continues in the next row. Only the last row of a shard is padded. Each row
    records the lengths of its documents. The tokenizer is saved next to the rows.
    """
    from sabia.core.text.tokenize.stage import run

    run(job, options)
