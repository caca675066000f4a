"""Options of `sabia report`."""

from sabia.core.errors import UsageError
from sabia.core.options.option import changed, listed, text
from sabia.core.options.shared import Call, InputOptions, TextColumn
from sabia.core.options.table import Options

QUESTIONS = ("row", "token", "document")


class Question(Options, group="Question", recorded=False):
    """What is asked about."""

    row: str | None = text("Show where the tokens of the token row with this id are from", "ID",
                           default=None, common=True, excludes=("token", "document"))  # fmt: skip
    """`pretrain --list-read` lists rows as SHARD:ID; that form is accepted too."""
    token: str | None = text("Show where a training token is from", "RUN:STEP:ROW:POSITION",
                             default=None, common=True, excludes=("document",))  # fmt: skip
    """`RUN` is a run directory, `STEP` is counted from 1 as in its metrics, `ROW` (of the step) and
    `POSITION` (in the row) from 0. Runs of `pretrain`, `sft` and `grpo` can be named; of `grpo`,
    `ROW` is a sample of the step."""
    document: str | None = text("Show where documents were kept, removed and trained on",
                                "URL|ID|FILE", default=None, common=True)  # fmt: skip
    """A URL, the id of a document, or a text file with one of these in each line."""
    tokenizer: str = text("Tokenizer of the rows", "DIR", unset="next to the rows")
    """It is used to find the characters of a token in the text of its document, and to check that
    the text still gives this token."""


class ReportOptions(Question, InputOptions, TextColumn, Call):
    """Options of `sabia report`."""

    inputs: tuple[str, ...] = changed(
        InputOptions.inputs, help="Outputs of stages and run directories to look into",
        metavar="[PATH]...", unset="the current directory",
    )  # fmt: skip
    """Directories or files of documents, removed rows, rejects and token rows, in any order, and
    run directories. The rejects next to a directory are included. Without a question: directories,
    of which all outputs below them are shown."""

    @property
    def asks(self) -> bool:
        """Whether a question is asked; else the graph of outputs is shown."""
        return any(getattr(self, name) for name in QUESTIONS)

    def check(self) -> None:
        """The graph is read from records, not from rows."""
        super().check()
        for name in () if self.asks else ("tokenizer", "text_column"):
            if name in self.given:
                asked = listed(f"--{one}" for one in QUESTIONS)
                raise UsageError(f"{self.table[name].flag}: only with {asked}")
