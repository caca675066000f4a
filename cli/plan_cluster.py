"""`sabia plan-cluster`: chips, time and money of a training run, before paying for it."""

from typing import TYPE_CHECKING

from sabia.cli.command import command
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.shards.job import Job

if TYPE_CHECKING:
    from sabia.core.plan.answer import PlanOutput


@command(
    PlanOptions,
    examples="""
    sabia plan-cluster --params 1.6T --active 49B
    sabia plan-cluster --params 1.6T --active 49B --chips 150 --preempt 6h --simulate 1000
    sabia plan-cluster --model Qwen3-4B/ --tokens 80B --chip h100 --nodes 4 --search --explain
    sabia plan-cluster --params 8B --tokens 1T --compare b200,h200,v5p,v6e --search
    sabia plan-cluster config.json --tokens 1T --chip h100 --search --emit slurm > run.sbatch
    sabia plan-cluster --params 70B --stage serve --chip h200 --weights fp8
    sabia plan-cluster runs.jsonl -o plans.parquet
    sabia plan-cluster --budget examples/pyramid.toml
    """,
)
def plan_cluster(job: Job, options: PlanOptions) -> None:
    """Plan a training run: chips by deadline, by compute and by memory, time and money.

    The least it needs is --params; every assumption that fills the gaps is printed. Notes go to
    stderr, the plan to stdout: a table, one object with --json, a row a deadline with -o, or with
    --emit the script that starts it.
    """
    from sabia.core import notes
    from sabia.core.plan.answer import answer

    found = answer(options)
    if options.plot:
        _plot(options.plot, found)
    for line in found.notes:
        notes.note(line)
    for line in found.warnings:
        notes.warn(line)
    rows = _rows_asked(job)
    if rows:
        _write_rows(job, found)
    if options.json:
        import json

        print(json.dumps(found.report, indent=2))
    elif not rows:
        print(found.text)


def _plot(path: str, found: "PlanOutput") -> None:
    """Write the answer's charts, whole or not at all."""
    from sabia.core.plan.output.plots import document
    from sabia.core.shards.atomic import write_atomic

    write_atomic(path, document(path, "sabia plan-cluster", found.text, found.charts()))


def _rows_asked(job: Job) -> bool:
    """Whether rows were asked for; a terminal gets the table rather than binary."""
    import sys

    if not job.to_stdout:
        return True
    asked = not job.json and (job.out == "-" or job.to != "parquet")
    return asked and (job.to == "jsonl" or not sys.stdout.isatty())


def _write_rows(job: Job, found: "PlanOutput") -> None:
    """A Parquet file or directory, or a stream on stdout."""
    import pyarrow as pa

    from sabia.core.shards.manifest import provenance
    from sabia.core.shards.outputs import open_output

    table = pa.Table.from_pylist(found.rows)
    with open_output(job, table.schema, provenance(job, "plan", ())) as writer:
        for batch in table.to_batches():
            writer.write(batch)
