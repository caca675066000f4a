"""`eval --mesh`: devices that compute what models in directories are asked about the items.

Under torch each process along `data` computes its part of the items, with a whole model or one that
is split over the processes along the other axes, which compute the same items together. In JAX the
rows of each batch are split too. Log-likelihoods can be computed on any of these; answers are
generated in torch, by whole models or by models split over `tensor`.

Each process keeps its results where all find them (`--judge-cache`), as a run does that may be
killed. When all have ended, the first one reads them, calls judges and servers, and writes the
rows: the same as one process.
"""

import hashlib
from collections.abc import Mapping, Sequence

from sabia.core.bench.items import Item, part_of
from sabia.core.bench.task import Task
from sabia.core.errors import UsageError
from sabia.core.options.eval import EvalOptions
from sabia.core.parallel import process_group
from sabia.core.parallel.health.watchdog import WatchdogConfig
from sabia.core.parallel.mesh import parse_mesh
from sabia.core.parallel.split_model import AXES, GENERATION_AXES, split_model
from sabia.core.parallel.world import detect
from sabia.core.recipes.evaluated_models import EvaluatedModel, LocalModel, divides
from sabia.core.recipes.run_call import joined
from sabia.core.shards.job import Job


def check_mesh(
    options: EvalOptions, tasks: Sequence[Task], models: Sequence[EvaluatedModel]
) -> None:
    """UsageError for a mesh that cannot compute the tasks, or has nothing to divide."""
    axes = [axis for axis, size in parse_mesh(options.mesh).items() if size > 1]
    if others := [axis for axis in axes if axis not in AXES]:
        raise UsageError(
            f"--mesh: axis {others[0]}: an evaluation divides items over data, and models over "
            f"{', '.join(AXES[1:])} (expected tensor=N or fsdp=N in place of {others[0]}=N if a "
            "device cannot hold the model, else data=N)"
        )
    if not any(isinstance(model, LocalModel) for model in models):
        raise UsageError("--mesh: only with a model directory as --model")
    if not divides(options):
        return
    works = "--mesh data=N with --backend torch"
    generating = next((task.name for task in tasks if task.generates), "")
    if generating and options.backend == "jax":
        raise UsageError(
            f"--mesh: {options.mesh}: {generating} is answered in words (expected {works}, or "
            "tensor=N too)"
        )
    others = [axis for axis in axes if axis not in GENERATION_AXES]
    if generating and others:
        raise UsageError(
            f"--mesh: axis {others[0]}: {generating} is answered in words, by whole models or "
            f"ones split over tensor (expected tensor=N in place of {others[0]}=N if a device "
            "cannot hold the model, else data=N; or run a server and give its URL)"
        )
    if options.min_k:
        raise UsageError(f"--min-k: not with --mesh {options.mesh} (expected {works})")
    for model in models if others and options.backend == "torch" else ():
        if isinstance(model, LocalModel) and model.spec.config.get("quantization_config"):
            raise UsageError(
                f"--mesh: axis {others[0]}: {model.name} is quantized, and split over tensor alone "
                f"(expected tensor=N in place of {others[0]}=N)"
            )


def compute(
    job: Job, options: EvalOptions, tasks: Sequence[Task], items: Mapping[str, Sequence[Item]],
    models: Sequence[EvaluatedModel],
) -> bool:  # fmt: skip
    """Compute the results of all items, each process its part; whether this process goes on to
    write the rows."""
    world = detect()
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr([(name, [item.id for item in of]) for name, of in items.items()]).encode())
    config = WatchdogConfig(
        {"items": digest.hexdigest()}, hang_timeout_s=process_group.LONGEST.total_seconds()
    )
    with process_group.library_output_to_stderr(world), joined(job, world, config) as mesh:
        if mesh.size == 1:
            return True
        for model in models:
            if isinstance(model, LocalModel):
                part = (world.rank, world.size)
                if divides(options):
                    model.split = split_model(options.backend, model.spec, mesh, world)
                    part = model.split.part
                with model:
                    for task in tasks:
                        model.compute(task, part_of(items[task.name], *part), options)
                model.anew, model.split = False, None
        if options.backend == "torch":
            import torch

            group = torch.distributed.new_group(timeout=process_group.LONGEST, backend="gloo")
            torch.distributed.barrier(group)
        else:
            process_group.barrier(world, options.backend, "all results are kept")
    return world.leads
