"""Options that most commands share: what is read and written, and how the call behaves."""

from typing import ClassVar

from sabia.core.options.option import changed, choice, integer, quantity, several, switch, text
from sabia.core.options.table import Options


class Call(Options, group="Call"):
    """How a call behaves. `stdin`: without INPUT it reads standard input."""

    stdin: ClassVar[bool] = False

    json: bool = switch("Write reports, summaries and errors as JSON", recorded=False)
    """A report goes to standard output, a summary or an error to standard error, as one object. An
    error has the keys `code`, `message`, `option`, `value`, `expected` and `fix`."""
    config: str = text("Read options from a TOML file", "FILE.toml", recorded=False)
    """Keys are option names, at the top level or in a table named after the command. An option on
    the command line takes precedence over the environment, the environment over the file, and the
    file over the default."""
    quiet: bool = switch("Suppress informational messages", short="-q", recorded=False)
    debug: bool = switch("Show tracebacks", recorded=False)

    def needs_all_shards(self) -> bool:
        """Whether the call must see all input shards, so that an array job would be wrong."""
        return False


class Output(Options, group="Input and output"):
    """Where rows go."""

    out: str | None = text(
        "FILE.parquet, a directory, or - (stdout)",
        "PATH", default=None, short="-o", common=True, recorded=False,
    )  # fmt: skip
    """A path that ends in `.parquet` is written as one file, any other path is a directory with one
    shard for each input shard. With `-`, or without the option, rows go to standard output."""
    to: str = choice(
        "Format of rows on stdout", "parquet", "arrow", "jsonl",
        variable="SABIA_PIPE", recorded=False,
    )  # fmt: skip
    """`arrow` is a stream, so that the stages of a pipeline overlap."""


class InputOptions(Options, group="Input and output"):
    """What is read."""

    inputs: tuple[str, ...] = several(
        "Files, directories, globs or URLs; none or - reads stdin",
        "[INPUT]...", positional=True, common=True, recorded=False,
    )  # fmt: skip


class Redo(Options, group="Call"):
    """Whether work is done again, or only described."""

    force: bool = switch("Redo what is already done", recorded=False)
    dry_run: bool = switch("Show what would be read and written; change nothing", recorded=False)
    """Prints the inputs and outputs with estimates of CPU time, memory and bytes written."""


class Seeded(Options, group="Call"):
    """Random numbers."""

    seed: int = integer("Random seed", 0, least=0, recorded=False)


class Workers(Options, group="Parallelism"):
    """Processes on one machine."""

    jobs: int = integer("Worker processes", 1, short="-j", least=1, common=True, recorded=False)


class RowOptions(InputOptions, Output, Workers, Seeded, Redo, Call, group="Input and output"):
    """Options of the data stages: rows in, rows out."""

    stdin: ClassVar[bool] = True

    rejects: str | None = text(
        "Directory of rejected rows, with the reason", "PATH", default=None, recorded=False,
        unset="beside the output",
    )  # fmt: skip
    max_rejects: float | None = quantity(
        "share", "Exit with 3 when more than this share of rows is rejected", recorded=False,
        unset="any share",
    )  # fmt: skip
    """The rows that could be used are written all the same."""
    stats: str | None = text(
        "Write run statistics as JSON (- for stderr)", "FILE", default=None, recorded=False,
    )  # fmt: skip
    shard: str | None = text(
        "Take slice I of N of the input shards", "I/N", default=None,
        recorded=False, group="Parallelism", unset="the Slurm array's",
    )  # fmt: skip


class Backend(Options, group="Parallelism"):
    """What computes models."""

    backend: str = choice(
        "Backend of models", "torch", "jax", variable="SABIA_BACKEND", recorded=False
    )


class MeshOptions(Backend, group="Parallelism"):
    """How a model is spread over devices."""

    mesh: str = text("Devices by axis, such as data=4", "AXIS=N,…", recorded=False)
    """The axes are `data` (copies of the model, each with rows of its own), `fsdp` (rows likewise,
    parameters and optimizer state split; the first axis to use when memory is short), `expert`
    (rows likewise, experts split), `context` (the tokens of a row split, for long rows), `tensor`
    (heads, inner widths and vocabulary split; within a host) and `pipe` (layers split into stages;
    torch only). Devices that are left over lie along `data`. Each axis must divide what it splits;
    the error names sizes that fit. Neighbouring ranks lie along `tensor`, then `context`, `expert`,
    `fsdp`, `data` and `pipe`. Under torch a device is a process; JAX spreads over all devices of
    its processes, and makes as many as are asked for out of a CPU."""


class Trainer(InputOptions, MeshOptions, Seeded, Redo, Call, group="Input and output"):
    """Options of the trainers: rows in, a run directory out."""

    stdin: ClassVar[bool] = True

    out: str | None = text(
        "Run directory", "DIR", default=None, short="-o", common=True, recorded=False
    )
    """It holds `checkpoints/`, `metrics.jsonl`, `run.json` and, at the end, `final/` in Hugging
    Face form. All processes must see it under this name. The same command again resumes a run that
    was stopped, and leaves a finished one as it is."""
    to: str = changed(Output.to, help="Format of the metrics on stdout")
    """The metrics are written as rows when the run is done."""
    rejects: str | None = changed(RowOptions.rejects, unset="rejects/ in the run directory")
    seed: int = Seeded.seed
    """Initial weights, the order of rows, and what is rounded or sampled at random."""
    force: bool = changed(Redo.force, help="Discard what the run directory holds and start over")
    """Checkpoints at a `--checkpoint-url` are discarded too. A forced command does so each time it
    is started: do not requeue it."""
    dry_run: bool = changed(Redo.dry_run, help="Show the plan of the run; change nothing")
