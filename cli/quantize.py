"""`sabia quantize`: quantize a model to 8 and 4 bits."""

from sabia.cli.command import command
from sabia.core.options.quantize import QuantizeOptions
from sabia.core.shards.job import Job


@command(
    QuantizeOptions,
    examples="""
    sabia quantize chats.parquet --model run/final --recipe mixed -o model-w4/ > errors.parquet
    sabia quantize --model run/final --recipe w8 -o model-w8/
    sabia quantize chats.parquet --model run/final --recipe nvfp4 --smooth awq -o model-fp4/
    sabia quantize chats.parquet --model run/final --recipe w4 --format gguf -o model-gguf/
    sabia quantize docs/ --model base/ --recipe recipe.toml --samples 512 -o out/ --json
    sabia quantize chats.parquet --model base/ --bits 5 -o model-5/ > errors.parquet
    sabia quantize chats.parquet --model run/final -o out/ --task capabilities --gate capabilities
    sabia quantize chats.parquet --model base/ --verify model-w4/ > compared.parquet
    """,
)
def quantize(job: Job, options: QuantizeOptions) -> None:
    """Quantize the weights of a model to 8 and 4 bits, by component as --recipe says.

    INPUT is calibration records that resemble real use: chats, documents or token rows. With them,
    4-bit weights are rounded by GPTQ, integers and E2M1 alike; without them, to nearest. The
    quantization error of each matrix is written to stdout as rows. With --task the original and
    the quantized model are compared on benchmark tasks.
    """
    from sabia.core.recipes.quantize import run

    run(job, options)
