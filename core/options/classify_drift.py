"""Options of `sabia classify drift`."""

from sabia.core.errors import UsageError
from sabia.core.options.option import changed, several
from sabia.core.options.shared import Call, InputOptions


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
