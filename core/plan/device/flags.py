"""A layout as options of `sabia pretrain`.

--mesh has the axes above 1 (core.parallel.mesh), --batch the rows of a step over all devices,
--micro-batch those of one device at a time, --remat the recomputation (`matmuls`, which keeps the
matrix products, is selective recomputation). The length of a row is not an option there: it is that
of the token rows (`sabia tokenize --length`).
"""

from sabia.core.errors import UsageError
from sabia.core.plan.device.layout import Layout, Workload
from sabia.core.plan.device.stack import AXES

REMAT = {"none": "none", "selective": "matmuls", "full": "full"}
PRECISION = {"fp32": "fp32", "bf16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}


def pretrain_flags(
    workload: Workload, layout: Layout, *, backend: str = "torch", lora_rank: int = 0
) -> str:
    """Such as '--mesh fsdp=8,tensor=4 --batch 512 --micro-batch 2 --remat full --precision bf16'.

    backend: torch on GPUs and CPUs, jax on TPUs. lora_rank: of the adapters, if only they are
    trained. Raises UsageError on what the trainer cannot do.
    """
    if workload.precision not in PRECISION:
        known = ", ".join(PRECISION)
        raise UsageError(
            f"--precision: {workload.precision} is not supported by sabia pretrain (expected one "
            f"of {known})"
        )
    if layout.virtual > 1:
        raise UsageError(
            f"layout: virtual={layout.virtual} (expected 1: sabia pretrain has no interleaving)"
        )
    if layout.fsdp > 1 and layout.zero != 3:
        raise UsageError(
            f"layout: zero={layout.zero} with fsdp={layout.fsdp} (expected 3: sabia pretrain "
            "splits weights, gradients and optimizer over fsdp)"
        )
    if layout.experts_over_tensor:
        raise UsageError(
            "layout: experts-over-tensor=yes (expected no: sabia pretrain slices each expert over "
            "the tensor ranks)"
        )
    if backend == "jax" and layout.pipe > 1:
        raise UsageError(
            f"layout: pipe={layout.pipe} with jax (expected 1: pipelines run on torch only)"
        )
    if (workload.adapter_params is not None) != bool(lora_rank):
        raise UsageError(f"--lora-rank: {lora_rank} (expected the rank of the trained adapters)")
    axes = [f"{axis}={getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1]
    options = {
        "backend": backend,
        "mesh": ",".join(axes) or "data=1",
        "batch": workload.batch_rows,
        "micro-batch": layout.micro_batch,
        "remat": REMAT[layout.recompute],
        "precision": PRECISION[workload.precision],
        "lora-rank": lora_rank,
    }
    usual = {("backend", "torch"), ("lora-rank", 0)}
    return " ".join(f"--{n} {value}" for n, value in options.items() if (n, value) not in usual)
