"""Options of `sabia report` and `sabia show`."""

from typing import ClassVar

from sabia.core.errors import UsageError
from sabia.core.options.classify import ClassifyOptions
from sabia.core.options.option import changed, choice, integer, listed, needs, several, switch, text
from sabia.core.options.shared import Call, InputOptions, Seeded, TextColumn
from sabia.core.options.table import Options

QUESTIONS = ("row", "token", "document")


class Question(Options, group="Question", recorded=False):
    """What is asked about."""

    row: str | None = text("Show where the tokens of the token row with this id are from", "ID",
                           default=None, common=True,
                           excludes=("token", "document", "card"))  # fmt: skip
    """`pretrain --list-read` lists rows as SHARD:ID; that form is accepted too."""
    token: str | None = text("Show where a training token is from", "RUN:STEP:ROW:POSITION",
                             default=None, common=True,
                             excludes=("document", "card"))  # fmt: skip
    """`RUN` is a run directory, `STEP` is counted from 1 as in its metrics, `ROW` (of the step) and
    `POSITION` (in the row) from 0. Runs of `pretrain`, `sft` and `grpo` can be named; of `grpo`,
    `ROW` is a sample of the step."""
    document: str | None = text("Show where documents were kept, removed and trained on",
                                "URL|ID|FILE", default=None, common=True,
                                excludes=("card",))  # fmt: skip
    """A URL, the id of a document, or a text file with one of these in each line."""
    card: str | None = text("Write a model card and the EU's summary of training content", "RUN",
                            default=None, common=True)  # fmt: skip
    """Markdown with the YAML front matter of the Hugging Face hub, and then the public summary of
    training content by the template of the EU AI Office of 2025-07-24. Both are filled from the
    records of the run and of all that it was made from, as far as these outputs are below the paths
    given. What no record has is `not recorded`, and what only a person can know is marked. The
    documents of the training are read once, to sum the bytes of their texts by domain, language,
    source and licence."""
    scores: tuple[str, ...] = several(
        "Score rows of sabia eval, for the card's results and their contamination", "FILE",
        only=needs("card"),
    )  # fmt: skip
    """The card has the tasks' results with their intervals, figures that tell whether the model has
    read the items (`eval --min-k`), and apart the results on those items that the documents of the
    training hold, where `sabia dedup --decontaminate` has marked them."""
    sme: bool = switch("List the domains that small and medium-sized providers must list",
                       only=needs("card"))  # fmt: skip
    """The top 5 % of the domains, at most 1,000, instead of the top 10 %."""
    out: str | None = text("File for the model card; - is stdout", "FILE", default=None, short="-o",
                           only=needs("card"))  # fmt: skip
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
        if not self.asks:
            asked = listed(f"--{one}" for one in QUESTIONS)
            self.refuse(("tokenizer", "text_column"), f"only with {asked}")


class Selection(Seeded, group="Selection"):
    """Which rows are shown."""

    where: str = changed(
        ClassifyOptions.where, help="Show only rows for which this is true, such as 'reward < 0.5'",
        group="Selection", recorded=False,
    )  # fmt: skip
    """The syntax is that of `sabia classify --where`. Only the columns that are named are read of
    rows that are not shown. With `--diff`, a row is shown if the expression is true before or
    after."""
    rows: int | None = integer("Show at most so many rows", least=1, short="-n", common=True,
                               recorded=False, unset="all; 100 with --out")  # fmt: skip
    sample: int | None = integer("Show a random sample of so many rows, in their order", least=1,
                                 common=True, recorded=False)  # fmt: skip
    """Each row has the same probability; `--seed` gives another sample. Of Parquet files only the
    footers are read, and the row groups of the rows in the sample, and with `--where` the columns
    that it names. Other formats are read whole."""
    seed: int = changed(Seeded.seed, group="Selection", help="Random seed of the sample")


class ShowOptions(
    Selection, InputOptions, TextColumn, Call, group="Input and output", recorded=False
):
    """Options of `sabia show`."""

    stdin: ClassVar[bool] = True

    inputs: tuple[str, ...] = changed(
        InputOptions.inputs, help="Files, directories, globs or URLs; none or - reads stdin",
        metavar="[PATH]...",
    )  # fmt: skip
    """Anything that a command of sabia writes (documents, removed and rejected rows, token rows,
    conversations, samples, scores, metrics, run directories), and other Parquet, Arrow and JSON
    files. Of a run directory, the samples of `grpo`, the token rows of `sft` or the metrics of
    `pretrain` are shown."""
    out: str | None = text("Write one HTML page, which needs no network, to this file", "FILE.html",
                           default=None, short="-o", common=True)  # fmt: skip
    to: str = choice("Format on stdout: text to read, or the rows as JSON lines", "text", "jsonl")
    """A terminal gets the text page by page, by the program in `SABIA_PAGER` or `PAGER`, or by
    `less`."""
    chars: int = integer(
        "Show at most so many characters of a text; 0: all of them", 2_000, least=0
    )
    with_: tuple[str, ...] = several("Where the rows that rows refer to are looked up by id",
                                     "PATH", common=True,
                                     unset="the recorded outputs and inputs")  # fmt: skip
    """These are the document that was kept for a removed one, the prompt of a sample, the text
    before a rewrite and the text of a decision of `dedup`. May be repeated. Without this option the
    paths that the rows record are searched, a million rows at most."""
    tokenizer: str = text("Tokenizer of token rows; renders conversations by its chat template",
                          "DIR", unset="next to the rows")  # fmt: skip
    diff: bool = switch("Show what differs between two PATHs, BEFORE and AFTER", common=True,
                        excludes=("sample", "judge"))  # fmt: skip
    """Rows are compared by id, or by text where they have none. Files with the same name in both
    directories are compared with each other if all names of AFTER are in BEFORE, else all rows with
    all; the ids of what is compared are held in memory."""
    judge: bool = switch("Ask whether removed rows were rightly removed; print the rate of errors",
                         common=True, only=needs(to="text"), excludes=("out",))  # fmt: skip
    """The rows are a sample of 50, or of `--sample` rows. The answers are `y` (rightly removed),
    `n` (wrongly removed), `s` (skip) and `q` (stop), one in a line, from standard input, or from
    the terminal if the rows come from there. The interval is Wilson's, of 95 %. With `--json` the
    result is an object."""

    def check(self) -> None:
        """The ending of `--out` is that of a page; `--diff` has two inputs."""
        super().check()
        if self.out and not self.out.lower().endswith((".html", ".htm")):
            raise UsageError(f"--out: {self.out} (expected FILE.html)")
        if self.out and self.to == "jsonl":
            raise UsageError("--to: jsonl is a format of standard output (expected no --out)")
        if self.diff and len(self.inputs) != 2:
            raise UsageError(f"--diff: {len(self.inputs)} PATHs (expected BEFORE and AFTER)")
