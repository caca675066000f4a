"""Options that most commands share: input, output, parallelism, and the call itself."""

from typing import ClassVar

from sabia.core.errors import UsageError
from sabia.core.options.option import (
    changed,
    choice,
    integer,
    needs,
    quantity,
    several,
    switch,
    text,
)
from sabia.core.options.table import Options
from sabia.core.shards.job import FORMATS, check_ending, file_ending, is_stream

NGRAM = "ngram"  # a value of --draft that is no directory


class Call(Options, group="General", recorded=False):
    """Messages and configuration. `stdin`: without INPUT the command reads standard input."""

    stdin: ClassVar[bool] = False

    json: bool = switch("Write reports, summaries and errors as JSON")
    """A report is written to standard output, a summary or an error to standard error, as one
    object each. An error has the keys `code`, `message`, `option`, `value`, `expected` and
    `fix`."""
    config: str = text("Read option values from a TOML file", "FILE.toml")
    """The keys are option names without the leading dashes, in a table named after the command,
    such as `[dedup]` or `[classify.train]`. If the file has no such table, the keys at its top
    level are used. The command line takes precedence over environment variables, those over the
    file, and the file over the defaults."""
    quiet: bool = switch(
        "Suppress informational messages; print only warnings and errors", short="-q"
    )
    debug: bool = switch("Print the Python traceback of an error")

    def needs_all_shards(self) -> bool:
        """Whether the call must read all input shards, so that an array job would be wrong."""
        return False


class Output(Options, group="Input and output", recorded=False):
    """Where rows are written."""

    out: str | None = text("Output: FILE.parquet, a directory, or - for stdout (the default)",
                           "PATH", default=None, short="-o", common=True)  # fmt: skip
    """A path that ends in `.parquet`, `.arrow`, `.jsonl`, `.jsonl.gz` or `.jsonl.zst` is one file
    of that format. The endings of other data formats, such as `.csv`, are errors. Any other path is
    a directory, which gets one Parquet shard for each input shard; so is a path that ends with `/`.
    A FIFO, or a pipe such as `>(COMMAND)`, is written as standard output is."""
    to: str = choice("Format of the rows on stdout; arrow can be read while it is written",
                     "parquet", "arrow", "jsonl", variable="SABIA_PIPE")  # fmt: skip
    """`arrow` is a stream format: the next command of a pipeline can read the first rows before
    the last ones are written. `parquet` can be read only when it is complete. With `--out`, the
    ending of its path is the format."""

    def check_format(self) -> None:
        """Raise UsageError if `--to` contradicts the path of `--out`, whose ending is the format;
        stdout and pipes have none."""
        out = self.out or "-"
        streamed = out == "-" or (is_stream(out) and not file_ending(out))
        form = FORMATS.get(file_ending(out), "parquet")
        if "to" in self.given and not streamed and self.to != form:
            raise UsageError(
                f"--to: {self.to} is a format of standard output, but --out is {out} (expected"
                f" {form}, by its ending; --out FILE.{self.to} is written as {self.to})"
            )


class InputOptions(Options, group="Input and output", recorded=False):
    """What is read."""

    inputs: tuple[str, ...] = several(
        "Input files, directories, globs or URLs; none or - reads stdin", "[INPUT]...",
        positional=True, common=True,
    )  # fmt: skip


class Redo(Options, group="General", recorded=False):
    """Whether existing outputs are computed again, or the work is only described."""

    force: bool = switch("Recompute outputs that are already complete")
    dry_run: bool = switch("Print what would be read and written, then exit")
    """Also prints estimates of the CPU time, the memory and the bytes written. Nothing is
    written."""


class Seeded(Options, group="General", recorded=False):
    """Random numbers."""

    seed: int = integer("Random seed", 0, least=0)


class Workers(Options, group="Parallelism", recorded=False):
    """Processes on one machine."""

    jobs: int = integer("Number of worker processes", 1, short="-j", least=1, common=True)


class RowOptions(
    InputOptions, Output, Workers, Seeded, Redo, Call, group="Input and output", recorded=False
):
    """Options of the data stages: rows in, rows out."""

    stdin: ClassVar[bool] = True

    rejects: str | None = text("Where to write rejected rows, with the reason", "PATH",
                               default=None, unset="next to the output")  # fmt: skip
    """A directory if `--out` is a directory, otherwise a Parquet file. A row is rejected if it
    cannot be processed. The default is `OUT.rejects/` for a directory, `OUT.rejects.parquet` for
    `OUT.parquet`, and a file in `sabia-COMMAND.rejects/` for standard output."""
    max_rejects: float | None = quantity(
        "share", "Exit with code 3 if a larger fraction of the rows is rejected", unset="no limit"
    )
    """The other rows are written nevertheless."""
    stats: str | None = text(
        "Write run statistics to this file as JSON (- for stderr)", "FILE", default=None
    )
    shard: str | None = text("Input files to process: slice I of N, the Slurm task's slice, or all",
                             "I/N|auto|all", default=None, group="Parallelism",
                             unset="all")  # fmt: skip
    """`0/4` is the first of four slices. With `auto`, each task of a Slurm array (or of
    `srun -n N`) processes a slice of the same inputs; with `all`, each task processes all of its
    inputs, which should be its own, such as `dump$SLURM_ARRAY_TASK_ID/`. A task of several must
    have one of the three."""

    def check(self) -> None:
        """The ending of `--out` is that of a format, or of a directory."""
        super().check()
        check_ending(self.out, "--out")
        self.check_format()


class Executor(Options, group="Parallelism", recorded=False):
    """Who runs the slices of a data stage."""

    executor: str = text("Where slices run: local, ray, or ray=ADDRESS of a Ray cluster",
                         "local|ray|ray=ADDRESS", default="local")  # fmt: skip
    """With `ray`, `-j` is the number of slices (default: the CPUs of the cluster, at most one for
    each input shard), each of them a Ray task with one CPU that runs this command with `--shard
    I/N`, and `sabia dedup` runs its three phases one after another. All nodes need sabia and the
    same paths; outputs are directories. Ray runs the task of a worker that died again, three times
    at most, and finished shards are not computed again. Without an address `RAY_ADDRESS` is used,
    or Ray is started on this machine. Tasks get the variables that begin with `SABIA_`, `AWS_`,
    `GOOGLE_`, `FSSPEC_` or `HF_`, and the API key."""

    def check(self) -> None:
        """Slices are chosen by the executor. Raises UsageError."""
        super().check()
        kind, _, address = self.executor.partition("=")
        if kind not in ("local", "ray") or (address and kind == "local"):
            raise UsageError(f"--executor: {self.executor!r} (expected local, ray or ray=ADDRESS)")
        if kind == "ray" and self.values().get("shard"):
            raise UsageError("--shard: ray gives each task its slice; use --executor local")


class TextColumn(Options, group="Input and output", recorded=False):
    """Where the text of documents is."""

    text_column: str = text("Column of the input that has the text", "NAME", unset="text")
    """It is read as the column `text`; the input must not have both."""


class Appending(Options, group="Input and output", recorded=False):
    """Several calls that write to one directory."""

    append: bool = switch(
        "Add parts to a directory that has outputs of other inputs", only=needs("out")
    )
    """Without it, a call whose output has rows of other inputs is an error, because they would be
    lost. The parts are named by a hash of the path and the content of their input instead of a
    number, so several calls may add parts at the same time, and a call that is repeated skips the
    parts that are complete. All parts must have the same columns."""

    def check(self) -> None:
        """Parts are added only to a directory."""
        super().check()
        out = str(self.values()["out"])
        if self.append and (out == "-" or is_stream(out) or file_ending(out)):
            raise UsageError(f"--append: {out} is not a directory (expected one as --out)")


class Backend(Options, group="Parallelism", recorded=False):
    """The framework that runs models."""

    backend: str = choice(
        "Framework that runs the models", "torch", "jax", variable="SABIA_BACKEND"
    )


class Drafting(Options, group="Generation"):
    """Speculative decoding."""

    draft: str = text("What proposes tokens that the model checks together: ngram, or a model",
                      "ngram|DIR", unset="nothing")  # fmt: skip
    """Speculative decoding (arXiv 2211.17192): one pass of the model checks several tokens, and
    keeps those before the first that it does not draw. The samples have the same distribution as
    without, and the log-probabilities are those of the model. `ngram` proposes what followed the
    last three tokens of the sample before, in its prompt or its own text; it pays where text
    repeats, and the tokens are those that the same seed gives without it. DIR is a smaller model
    with the same tokenizer, which draws the tokens. Greedy answers are the same in all cases.
    Requests with penalties, biases or a grammar, and tokens that close reasoning, are decoded token
    by token."""
    draft_tokens: int = integer("Number of tokens that are proposed at a time", 4, least=1, most=64,
                                only=needs("draft"))  # fmt: skip


class MeshOptions(Backend, group="Parallelism", recorded=False):
    """How a model is distributed over devices."""

    mesh: str = text("Devices per mesh axis, such as data=4,tensor=2", "AXIS=N,…")
    """The axes are `data` (data parallelism: each replica of the model processes its own rows),
    `fsdp` (data parallelism with sharded parameters and optimizer state; try it first if memory is
    short), `expert` (data parallelism with sharded experts), `context` (shards the tokens of a
    row, for long rows), `tensor` (shards attention heads, MLP widths and the vocabulary; keep it
    within a host) and `pipe` (pipeline parallelism: each stage has some of the layers; torch
    only). Devices that the given axes do not use are added to `data`. The size of an axis must
    divide the dimension that it shards; the error message lists sizes that do. Neighbouring ranks
    are along `tensor`, then `context`, `expert`, `fsdp`, `data` and `pipe`. With torch each
    process uses one device. With JAX a process uses all of its devices, and a CPU is divided into
    as many virtual devices as the mesh needs."""


class Trainer(
    InputOptions, MeshOptions, Seeded, Redo, Call, group="Input and output", recorded=False
):
    """Options of the trainers: rows in, a run directory out."""

    stdin: ClassVar[bool] = True

    out: str | None = text("Run directory: checkpoints, metrics and the final model", "DIR",
                           default=None, short="-o", common=True)  # fmt: skip
    """It contains `checkpoints/`, `metrics.jsonl`, `run.json` and, at the end, `final/`, the model
    in Hugging Face format. All processes must be able to write to it under this path. With a single
    process it may be a URL such as `s3://bucket/run`, where checkpoints are uploaded while it runs
    and the other files at the end. The same command run again resumes an interrupted run and does
    nothing if the run is complete."""
    to: str = changed(Output.to, help="Format of the metrics on stdout")
    """The metrics are written as rows when the run is complete."""
    rejects: str | None = changed(RowOptions.rejects, unset="OUT.rejects/")
    """A row is rejected if it cannot be processed."""
    seed: int = Seeded.seed
    """Determines the initial weights, the order of the rows, stochastic rounding and sampling."""
    force: bool = changed(
        Redo.force, help="Delete the contents of the run directory and start over"
    )
    """Checkpoints at a `--checkpoint-url` are deleted too. The run starts over each time the
    command is started with this option, so do not let Slurm requeue it."""
    dry_run: bool = changed(Redo.dry_run, help="Print the plan of the run, then exit")
