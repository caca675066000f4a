"""`sabia pretrain`: train a model on token rows."""

from sabia.cli.command import command
from sabia.core.options.pretrain import PretrainOptions
from sabia.core.shards.job import Job


@command(
    PretrainOptions,
    examples="""
    sabia pretrain tokens/ --shape d=256,layers=6 --tokens 20M -o run/
    sabia pretrain tokens/ --model base/ --lr 1e-4 --validation held-out/ -o run/
    sabia pretrain tokens/ --model base/ --mix web=3,books=1 --then decay:maths=1,web=1 -o run/
    sabia pretrain tokens/ --shape d=64,layers=2 --steps 300 --search-mix regression -o mix/
    sabia pretrain --compare web/ edu/ --shape d=128,layers=4 --tokens 5M --validation held-out/ \\
        -o comparison/
    torchrun --nproc-per-node 8 -m sabia.cli.main pretrain tokens/ --model base/ \\
        --mesh fsdp=4,tensor=2 --precision bf16 --save-every auto -o run/
    """,
)
def pretrain(job: Job, options: PretrainOptions) -> None:
    """Train a model on token rows.

    The metrics are also written to stdout as rows. The same command run again resumes an
    interrupted run, on any mesh and with either backend, and does nothing if the run is complete.
    """
    if options.compare:
        from sabia.core.recipes.comparison.compare import run
    else:
        from sabia.core.recipes.pretrain import list_read, run

        run = list_read if options.list_read else run
    run(job, options)
