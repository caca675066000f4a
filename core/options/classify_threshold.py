"""Options of `sabia classify threshold`."""

from sabia.core.errors import UsageError
from sabia.core.options.option import changed, integer, needs, quantity, switch, text
from sabia.core.options.shared import Call, InputOptions, Output, Redo, Seeded
from sabia.core.options.table import Options


class Target(Options, group="Threshold"):
    """What a threshold must reach; without precision and recall it has the best F1."""

    precision: float = quantity(
        "share", "Reach this precision, with the highest recall", 0.0, excludes=("recall",),
        unset="best F1", common=True,
    )  # fmt: skip
    recall: float = quantity(
        "share", "Reach this recall, with the highest precision", 0.0, unset="best F1", common=True
    )
    sure: bool = switch(
        "Require the 95 % interval's lower bound to reach it", only=needs("precision", "recall")
    )
    """Wilson's interval, instead of the estimate itself."""


class ThresholdOptions(
    InputOptions, Target, Seeded, Redo, Call, group="Threshold", without=("force",)
):  # fmt: skip
    """Options of `sabia classify threshold`."""

    stdin = True

    inputs: tuple[str, ...] = changed(
        InputOptions.inputs, help="Scored documents; none or - reads stdin"
    )
    out: str | None = changed(Output.out, help="File for classify --calibration, such as edu.json")
    score: str = text("Score, or column of numbers", "NAME", required=True)
    label: str = text("Column of truth values, or of labels", "COLUMN", common=True)
    """Of labels, the one that has the name of the score is positive."""
    positive: str = text("Rows where this holds are positive", "EXPRESSION", common=True)
    """The language is that of `sabia classify --where`. With `--label` too, rows without a label
    are left out."""
    least: int = integer("Minimum rows for a language's own threshold; 0: none", 200, least=0)
    """A language also needs ten rows of each kind. With 0, all languages share one threshold."""

    def check(self) -> None:
        """The truth must be told."""
        super().check()
        if not (self.label or self.positive):
            raise UsageError("--label: is missing; give --label or --positive")

    def needs_all_shards(self) -> bool:
        """One threshold is chosen from all of them."""
        return True
