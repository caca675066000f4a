"""`sabia quantize`: a model directory into one of 8 and 4 bits."""

from typing import Annotated

from sabia.cli.grammar import command, length, option
from sabia.core.shards.job import Job


@command(
    kind="report",
    examples="""
    sabia quantize chats.parquet --model run/final --recipe mixed -o model-w4/ > errors.parquet
    sabia quantize --model run/final --recipe w8 -o model-w8/
    sabia quantize docs/ --model base/ --recipe recipe.toml --samples 512 -o out/ --json
    """,
)
def quantize(
    job: Job,
    model: Annotated[
        str, option("Model directory to quantize.", metavar="DIR", show_default=False)
    ],
    recipe: Annotated[
        str, option("w8, w8a8, w4, fp8, mixed, or a file.", metavar="NAME|FILE.toml")
    ] = "mixed",
    group_size: Annotated[
        int | None, option("Columns that share a 4-bit scale.", metavar="N", min=1)
    ] = None,
    rounding: Annotated[
        str | None, option("auto, gptq, or rtn (to nearest).", metavar="NAME")
    ] = None,
    scale: Annotated[str | None, option("mse or absmax.", metavar="NAME")] = None,
    samples: Annotated[int, option("Calibration records to take.", metavar="N", min=1)] = 256,
    length: Annotated[int, length("Tokens to take of each record.")] = "2k",  # type: ignore[assignment]
) -> None:
    """Write a model in 8 and 4 bits, component by component.

    INPUT are calibration records that look like real use: chats, documents or token rows. Four
    bits are rounded by GPTQ with their activations; without records all is rounded to nearest.
    The error of each matrix goes to stdout as rows.
    """
    from sabia.core.recipes import quantize as room

    config = room.QuantizeConfig(
        model=model,
        recipe=recipe,
        group=group_size,
        rounding=rounding,
        scale=scale,
        samples=samples,
        length=int(length),
    )
    room.run(job, config)
