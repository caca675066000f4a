"""`sabia tokenize`: documents into packed rows of token ids."""

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
    """Pack documents into rows of token ids.

    Every row has the same length; documents end with the end-of-document token, long ones go on
    in the next row, and the rows record where documents begin. Only the last row of a shard is
    padded. The tokenizer is kept beside the rows.
    """
    from sabia.core.text.tokenize import stage

    stage.run(job, options)
