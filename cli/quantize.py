"""`sabia quantize`: a model directory into one of 8 and 4 bits."""

from sabia.cli.command import command
from sabia.core.options.quantize import QuantizeOptions
from sabia.core.shards.job import Job


@command(
    QuantizeOptions,
    examples="""
    sabia quantize chats.parquet --model run/final --recipe mixed -o model-w4/ > errors.parquet
    sabia quantize --model run/final --recipe w8 -o model-w8/
    sabia quantize docs/ --model base/ --recipe recipe.toml --samples 512 -o out/ --json
    """,
)
def quantize(job: Job, options: QuantizeOptions) -> None:
    """Write a model in 8 and 4 bits, component by component.

    INPUT are calibration records that look like real use: chats, documents or token rows. Four
    bits are rounded by GPTQ with their activations; without records all is rounded to nearest.
    The error of each matrix goes to stdout as rows.
    """
    from sabia.core.recipes import quantize as stage

    stage.run(job, options)
