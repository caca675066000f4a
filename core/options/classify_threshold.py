"""Options of `sabia classify threshold` and `classify drift`, which read scored documents."""

from sabia.core.errors import UsageError
from sabia.core.options.option import changed, integer, needs, quantity, several, switch, text
from sabia.core.options.shared import Call, InputOptions, Output, Redo, Seeded
from sabia.core.options.table import Options


class Target(Options, group="Threshold"):
    """What a threshold must reach; without precision and recall, the highest F1."""

    precision: float = quantity(
        "share", "Target precision; choose the threshold with the highest recall", 0.0,
        excludes=("recall",), unset="highest F1", common=True,
    )  # fmt: skip
    recall: float = quantity("share",
                             "Target recall; choose the threshold with the highest precision", 0.0,
                             unset="highest F1", common=True)  # fmt: skip
    sure: bool = switch("Require the lower bound of the 95 % interval to reach the target",
                        only=needs("precision", "recall"))  # fmt: skip
    """The bound is that of Wilson's score interval. Without this option the estimate itself must
    reach the target."""


class ThresholdOptions(
    InputOptions, Target, Seeded, Redo, Call, group="Threshold", without=("force",)
):  # fmt: skip
    """Options of `sabia classify threshold` and `classify drift`, which read scored documents."""

    stdin = True

    inputs: tuple[str, ...] = changed(
        InputOptions.inputs, help="Scored and labelled documents; none or - reads stdin"
    )
    out: str | None = changed(
        Output.out, help="File to write for `classify --calibration`, such as edu.json"
    )
    score: str = text("Score or numeric column to threshold", "NAME", required=True)
    label: str = text("Column with the true labels: true/false, or label names", "COLUMN",
                      common=True)  # fmt: skip
    """A row is positive if its label is true, or is the name of the score."""
    positive: str = text("Rows for which this expression is true are positive", "EXPRESSION",
                         common=True)  # fmt: skip
    """The syntax is that of `sabia classify --where`. If `--label` is also given, rows without a
    label are ignored."""
    least: int = integer("Minimum number of rows of a language to get its own threshold", 200,
                         least=0)  # fmt: skip
    """The language also needs at least ten positive and ten negative rows. Other languages use the
    overall threshold. With 0, all languages do."""

    def check(self) -> None:
        """The labels must be given."""
        super().check()
        if not (self.label or self.positive):
            raise UsageError("--label: is missing; give --label or --positive")

    def needs_all_shards(self) -> bool:
        """A threshold is chosen from all rows."""
        return True


class DriftOptions(InputOptions, Call, group="Scores"):
    """Options of `sabia classify drift`."""

    inputs: tuple[str, ...] = changed(
        InputOptions.inputs, help="Two files or directories of scored documents to compare",
        metavar="BEFORE AFTER",
    )  # fmt: skip
    score: tuple[str, ...] = several("Compare only this score", "NAME", unset="all scores",
                                     common=True)  # fmt: skip

    def check(self) -> None:
        """Two runs are compared."""
        super().check()
        if len(self.inputs) != 2:
            raise UsageError(f"{len(self.inputs)} inputs (expected two: BEFORE AFTER)")
