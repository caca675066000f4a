"""`sabia plan-cluster`: estimate the chips, time and cost of a training run."""

from sabia.cli.command import command
from sabia.core.options.plan_cluster import PlanOptions
from sabia.core.shards.job import Job


@command(
    PlanOptions,
    examples="""
    sabia plan-cluster --params 1.6T --active 49B
    sabia plan-cluster --params 1.6T --active 49B --chips 150 --preempt 6h --simulate 1000
    sabia plan-cluster --model Qwen3-4B/ --tokens 80B --chip h100 --nodes 4 --search --explain
    sabia plan-cluster --params 8B --tokens 1T --compare b200,h200,v5p,v6e --search
    sabia plan-cluster config.json --tokens 1T --chip h100 --search --emit slurm > run.sbatch
    sabia plan-cluster --measure > lab.toml
    sabia plan-cluster --params 1B --tokens 20B --machine lab.toml --chips 4 --search
    sabia plan-cluster --params 70B --stage serve --chip h200 --weights fp8
    sabia plan-cluster runs.jsonl -o plans.parquet
    sabia plan-cluster --budget examples/pyramid.toml
    """,
)
def plan_cluster(job: Job, options: PlanOptions) -> None:
    """Estimate the chips, time, memory and cost of a training run.

    The size of the model (--params, or --model) is enough. Values that are not given are assumed,
    and every assumption is printed. Notes and warnings go to stderr, the plan to stdout: a table,
    or with --json one object. -o writes one row per deadline, and --emit prints the script that
    starts the run.
    """
    import json
    import shutil
    import sys

    from sabia.core import notes
    from sabia.core.plan.answer import answer
    from sabia.core.plan.output.table import wrapped

    if options.measure:
        from sabia.core.recipes.machine.measured import as_toml, measured_machine

        machine = measured_machine()
        print(json.dumps(machine, default=str, indent=2) if job.json else as_toml(machine))
        return
    readable = job.to == "jsonl" or not sys.stdout.isatty()  # no binary data on a terminal
    rows_to_stdout = readable and not job.json and (job.out == "-" or job.to != "parquet")
    shows_plan = job.json or (job.to_stdout and not rows_to_stdout)
    plan = answer(options, beside=shows_plan)
    if options.plot:
        from sabia.core.plan.output.plots import document
        from sabia.core.shards.atomic import write_atomic

        charts = document(options.plot, "sabia plan-cluster", plan.text, plan.charts())
        write_atomic(options.plot, charts)
    for line in plan.notes:
        notes.note(line)
    for line in plan.warnings:
        notes.warn(line)
    if rows_to_stdout or not job.to_stdout:
        import pyarrow as pa

        from sabia.core.shards.manifest import provenance
        from sabia.core.shards.outputs import open_output

        table = pa.Table.from_pylist(plan.rows)
        with open_output(job, table.schema, provenance(job, "plan", ())) as writer:
            for batch in table.to_batches():
                writer.write(batch)
    if options.json:
        print(json.dumps(plan.report, indent=2))
    elif shows_plan:
        terminal = sys.stdout.isatty()
        print(wrapped(plan.text, shutil.get_terminal_size().columns) if terminal else plan.text)
