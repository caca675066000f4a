"""`eval --mesh data=N`: N processes, each of which computes what models in directories are asked
about its part of the items.

Each process keeps its results where all find them (`--judge-cache`), as a run does that may be
killed. When all have ended, the first one reads them, calls judges and servers, and writes the
rows: the same as one process.
"""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import timedelta

from sabia.core.bench.items import Item, part_of
from sabia.core.bench.task import Task
from sabia.core.errors import UsageError
from sabia.core.options.eval import EvalOptions
from sabia.core.parallel import process_group
from sabia.core.parallel.health.watchdog import WatchdogConfig
from sabia.core.parallel.mesh import parse_mesh
from sabia.core.parallel.world import detect
from sabia.core.recipes.evaluated_models import EvaluatedModel, LocalModel
from sabia.core.recipes.run_call import joined
from sabia.core.shards.job import Job

LONGEST = timedelta(days=30)  # that a process waits for the others, which may have slower items


def check_mesh(options: EvalOptions, models: Sequence[EvaluatedModel]) -> None:
    """UsageError for a mesh that divides more than the items, or has nothing to divide."""
    axes = [axis for axis, size in parse_mesh(options.mesh).items() if size > 1 and axis != "data"]
    if axes:
        raise UsageError(
            f"--mesh: axis {axes[0]} (expected data=N: each process has a whole model and a part "
            "of the items; a model that needs several devices can be evaluated through a server)"
        )
    if options.backend != "torch":
        raise UsageError(f"--mesh: only with --backend torch, not {options.backend}")
    if not any(isinstance(model, LocalModel) for model in models):
        raise UsageError("--mesh: only with a model directory as --model")


def compute(
    job: Job, options: EvalOptions, tasks: Sequence[Task], items: Mapping[str, Sequence[Item]],
    models: Sequence[EvaluatedModel],
) -> bool:  # fmt: skip
    """Compute the results of all items, each process its part; whether this process goes on to
    write the rows."""
    import torch

    world = detect()
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr([(name, [item.id for item in of]) for name, of in items.items()]).encode())
    config = WatchdogConfig({"items": digest.hexdigest()}, hang_timeout_s=LONGEST.total_seconds())
    with process_group.library_output_to_stderr(world), joined(job, world, config):
        if world.size == 1:
            return True
        for model in models:
            if isinstance(model, LocalModel):
                with model:
                    for task in tasks:
                        part = part_of(items[task.name], world.rank, world.size)
                        model.compute(task, part, options)
                model.anew = False
        torch.distributed.barrier(torch.distributed.new_group(timeout=LONGEST, backend="gloo"))
    return world.leads
