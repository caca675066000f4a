"""sabia plan-cluster: chips, time and money of a training run, before paying for it."""

from typing import TYPE_CHECKING, Annotated

from sabia.cli.grammar import command, count, duration, fraction, length, option, size
from sabia.core.shards.job import Job

if TYPE_CHECKING:
    from sabia.core.plan.answer import Answer


@command(
    "plan",
    examples="""
sabia plan-cluster --params 1.6T --active 49B
sabia plan-cluster --params 1.6T --active 49B --chips 150 --preempt 6h --bucket-gbps 8
sabia plan-cluster --params 8B --tokens 1T --chip h100 --deadline 30d --price 2.50 --json
sabia plan-cluster --model Qwen3-4B/ --tokens 80B --chip v5p
sabia plan-cluster --budget examples/pyramid.toml
""",
)
def plan_cluster(
    job: Job,
    *,
    params: Annotated[float | None, count("Parameters of the model, all experts.")] = None,
    active: Annotated[
        float | None, count("Parameters that a token visits (default: all of them).")
    ] = None,
    model: Annotated[
        str | None,
        option("Count a config.json or its directory instead.", metavar="PATH"),
    ] = None,
    layers: Annotated[
        int | None, option("Layers (default: those of the nearest published model).", min=1)
    ] = None,
    hidden: Annotated[int | None, option("Hidden size (default: likewise).", min=1)] = None,
    tokens: Annotated[float | None, count("Training tokens (default 500B).")] = None,
    seq: Annotated[int | None, length("Sequence length, binary: 8k is 8192 (default 8k).")] = None,
    batch_tokens: Annotated[
        float | None, count("Tokens of a global batch, live at once (default 4M).")
    ] = None,
    lora: Annotated[
        bool, option("Train adapters on frozen weights (4ND, 2 bytes a parameter).", "--lora")
    ] = False,
    state_recipe: Annotated[
        str | None,
        option("What is held per parameter (default adamw16).", metavar="NAME"),
    ] = None,
    chip: Annotated[str | None, option("b200, h100, v5p … (default b200).", metavar="NAME")] = None,
    hbm: Annotated[
        int | None, size("Memory of a chip, every byte usable (default: as sold).")
    ] = None,
    chips: Annotated[
        int | None, option("Plan for this many chips instead of finding the number.", min=1)
    ] = None,
    mfu: Annotated[
        float | None,
        fraction(
            "Share of the peak that training reaches (default 40%; usual: sparse 20-40%, "
            "dense 50-60%)."
        ),
    ] = None,
    deadline: Annotated[
        str | None, option("Deadlines, by commas (default 30d,14d,7d).", metavar="DURATION,…")
    ] = None,
    price: Annotated[
        str | None,
        option("Dollars a chip-hour, by commas (default: prices on file).", metavar="USD,…"),
    ] = None,
    failure_rate: Annotated[
        float | None, fraction("Failures per chip and day (default 0.1%); shows the stops view.")
    ] = None,
    preempt: Annotated[
        float | None, duration("Mean time between preemptions (default never); likewise.")
    ] = None,
    restart: Annotated[
        float | None, duration("Time to start again after a stop (default 15m); likewise.")
    ] = None,
    bucket_gbps: Annotated[
        float | None,
        option(
            "Gigabytes a second that storage takes (default 8); likewise.", metavar="GB/S", min=1e-6
        ),
    ] = None,
    spot_share: Annotated[
        float | None, fraction("Preemptible price as a share of on-demand (default 50%).")
    ] = None,
    budget: Annotated[
        str | None,
        option("Sum up a pyramid of runs instead of planning one.", metavar="FILE.toml"),
    ] = None,
) -> None:
    """Plan a training run: chips by deadline, by compute and by memory, time and money.

    The least it needs is --params; every assumption that fills the gaps is printed. Notes go to
    stderr, the plan to stdout: a table, one object with --json, or a row a deadline with -o.
    """
    from sabia.core.plan import answer

    cluster = {"chip": chip, "mfu": mfu, "prices": price, "lora": lora}
    run = {
        "tokens": tokens, "sequence": seq, "batch_tokens": batch_tokens, "hbm_bytes": hbm,
        "chips": chips, "deadlines": deadline, "recipe": state_recipe,
    }  # fmt: skip
    stops = {
        "failures_per_chip_day": failure_rate, "preemption_s": preempt, "restart_s": restart,
        "bucket_bytes_per_s": bucket_gbps and bucket_gbps * 1e9, "spot_share": spot_share,
    }  # fmt: skip
    counts = {"params": params, "active": active, "layers": layers, "hidden": hidden}
    if budget:
        refused = {"model": model} | counts | run | stops
        _show(job, answer.of_budget(budget, refused, **cluster))
    else:
        _show(job, answer.of_run(model, counts, run | cluster, stops))


def _show(job: Job, found: "Answer") -> None:
    """Put the answer where the job says, and what is to be known beside it on stderr."""
    from sabia.core import notes

    for line in found.notes:
        notes.note(line)
    for line in found.warnings:
        notes.warn(line)
    if job.json:
        import json

        print(json.dumps(found.report, indent=2))
    elif not job.to_stdout or _rows_on_stdout(job):
        _write_rows(job, found)
    else:
        print(found.text)


def _rows_on_stdout(job: Job) -> bool:
    """Whether rows were asked for; a terminal gets the table rather than binary."""
    import sys

    asked = job.out == "-" or job.to != "parquet"
    return asked and (job.to == "jsonl" or not sys.stdout.isatty())


def _write_rows(job: Job, found: "Answer") -> None:
    """A Parquet file or directory, or a stream on stdout."""
    import pyarrow as pa

    from sabia.core.shards.manifest import provenance
    from sabia.core.shards.outputs import open_output

    table = pa.Table.from_pylist(found.rows)
    with open_output(job, table.schema, provenance(job, "plan", ())) as writer:
        for batch in table.to_batches():
            writer.write(batch)
