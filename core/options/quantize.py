"""Options of `sabia quantize`."""

from sabia.core.errors import UsageError
from sabia.core.options.option import changed, choice, integer, quantity, text
from sabia.core.options.shared import Call, InputOptions, Output, Redo, Seeded


class QuantizeOptions(InputOptions, Output, Seeded, Redo, Call, group="Precision"):
    """Options of `sabia quantize`."""

    inputs: tuple[str, ...] = changed(
        InputOptions.inputs, help="Calibration records like real use; - or a pipe: stdin"
    )
    out: str | None = changed(
        Output.out, help="Model directory to write", metavar="DIR", required=True
    )
    """It appears whole or not at all."""
    model: str = text("Model directory to quantize", "DIR", required=True, group="Model")
    recipe: str = text(
        "Recipe: mixed, w8, w8a8, w4, fp8, or a file", "NAME|FILE.toml", default="mixed",
        common=True,
    )  # fmt: skip
    """A recipe says which component of the model gets which number format."""
    group_size: int | None = integer(
        "Columns that share a 4-bit scale", None, least=1,
        unset="the recipe's, or the largest of 128, 64 and 32 that divides the columns",
    )  # fmt: skip
    """It must divide the columns of every 4-bit matrix, or the run is refused with the sizes that
    do. Where none of 128, 64 and 32 divides the columns there is one scale a row. The rows say
    which size each matrix has."""
    rounding: str | None = choice(
        "Rounding", "auto", "gptq", "rtn", default=None, unset="the recipe's, or auto"
    )
    """`auto` rounds 4 bits by GPTQ where there are calibration records, and to nearest elsewhere;
    `gptq` takes GPTQ for 8 bits as well; `rtn` rounds to nearest, without calibration."""
    scale: str | None = choice(
        "Scale of rounding", "mse", "absmax", default=None, unset="the recipe's, or mse"
    )
    """`mse` takes the scale of least squared error, `absmax` the one that clips nothing."""
    samples: int = integer("Calibration records to take", 256, least=1, group="Data")
    """They are a uniform sample of the input, the same for the same seed."""
    length: int = quantity("length", "Tokens to take of each record", "2k", group="Data")

    def check(self) -> None:
        """The output is a directory."""
        super().check()
        if self.out == "-":
            raise UsageError("--out: '-' (expected a directory)")
