"""Build a stepper that fits the device, and measure its steps."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cases import Device, Figures, Skipped
from traces import ANNOTATION
from workloads import STATE_BYTES, RandomParameters

from sabia.core.spec import ModelSpec

REMATS = ("none", "matmuls", "full")
PLANNED = {"none": "none", "matmuls": "selective", "full": "full"}  # in the planner's words
CLEARLY_SMALLER = 0.8  # of the planned memory: what is tried next after an out-of-memory error
TOO_LARGE = 0.95  # planned memory over the device's, above which a policy is not tried
WARM_UP = 3
STEPS = 5


@dataclass(frozen=True)
class Run:
    """A training run: shape and depth of the model, rows of a step, how they are computed."""

    shape: str
    length: int
    precision: str = "bf16"
    compiled: bool = True
    documents: int = 1
    step_tokens: int = 32768

    @property
    def name(self) -> str:
        """The name of its case."""
        rows = f"{self.length // 1024}k rows"
        how = "compiled" if self.compiled else "eager"
        packed = "packed" if self.documents > 1 else "unpacked"
        return f"{self.shape} / {rows} / {self.precision} / {how} / {packed}"

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return max(1, self.step_tokens // self.length)


def planned(spec: ModelSpec, run: Run, remat: str, micro_batch: int, cuda: bool) -> tuple[Any, ...]:
    """(workload, layout, stack) of a run for the planner."""
    from sabia.core.plan.counting.blocks import from_spec
    from sabia.core.plan.device.layout import Layout, Workload, find_stack
    from sabia.core.plan.memory import StateRecipe

    precision: Any = run.precision.removesuffix("-block")
    recipe = StateRecipe("adamw", 4, 4, 8, 12)
    packed = run.documents > 1
    model = from_spec(spec)
    work = Workload(model, run.length, run.rows, recipe, precision, packed=packed)
    recompute: Any = PLANNED[remat]
    layout = Layout(micro_batch=micro_batch, recompute=recompute)
    return work, layout, find_stack("sabia" if cuda else "sabia-cpu")


def planned_bytes(
    spec: ModelSpec, run: Run, remat: str, micro_batch: int, cuda: bool = True
) -> float:
    """Bytes of tensors by the planner, without those of the runtime."""
    from sabia.core.plan.device.memory import device_memory

    memory = device_memory(*planned(spec, run, remat, micro_batch, cuda))
    return float(memory.total) - sum(t.bytes for t in memory.terms if t.name == "runtime")


@dataclass(frozen=True)
class Policy:
    """What the backward pass recomputes, and the rows of a micro-batch; bytes: as planned."""

    remat: str
    micro_batch: int
    bytes: float

    def __str__(self) -> str:
        return f"{self.remat} x {self.micro_batch}"


def policies(spec: ModelSpec, run: Run, memory: float) -> list[Policy]:
    """Policies to try, fastest first: recompute little, then large micro-batches."""
    micro = [run.rows]
    while micro[-1] > 1:
        micro.append(micro[-1] // 2)
    every = [Policy(r, m, planned_bytes(spec, run, r, m)) for r in REMATS for m in micro]
    small = [policy for policy in every if policy.bytes <= TOO_LARGE * memory]
    return small or [min(every, key=lambda policy: policy.bytes)]


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device's memory is used up."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def clear(device: Device) -> None:
    """Return the memory of what is no longer referenced, compiled code included."""
    import torch

    torch._dynamo.reset()
    gc.collect()
    if device.cuda:
        torch.cuda.empty_cache()


def smaller(left: list[Policy], refused: Policy) -> list[Policy]:
    """Those that are clearly smaller than one that did not fit, else the smallest of all."""
    clearly = [policy for policy in left if policy.bytes <= CLEARLY_SMALLER * refused.bytes]
    least = min(left, key=lambda policy: policy.bytes)
    return clearly or ([least] if least.bytes < refused.bytes else [])


def fitting(
    spec: ModelSpec, run: Run, device: Device, use: Callable[[Policy], Figures]
) -> tuple[Figures, Policy, list[str]]:
    """The figures of `use` with the first policy that fits, and those that did not fit.

    Raises Skipped if none fits.
    """
    import torch

    memory = device.memory if device.cuda else float("inf")
    refused: list[str] = []
    left = policies(spec, run, memory)
    while left:
        policy, message = left[0], ""
        try:
            return use(policy), policy, refused
        except (RuntimeError, torch.OutOfMemoryError) as error:
            if not out_of_memory(error):
                raise
            message = str(error).splitlines()[0]
        # outside of the handler, whose traceback holds the tensors
        clear(device)
        refused.append(f"{policy} ({message[:120]})")
        left = smaller(left, policy)
    parameters = sum(tensor.size for tensor in spec.tensors())
    raise Skipped(f"{parameters / 1e9:.2f}e9 parameters of {STATE_BYTES} bytes and rows of "
                  f"{run.length} do not fit: {'; '.join(refused)}")  # fmt: skip


@contextlib.contextmanager
def compiler(device: Device) -> Iterator[None]:
    """Without a GPU, torch.compile traces but generates no code, which would take minutes."""
    import torch

    original = torch.compile
    if device.tiny:
        torch.compile = partial(original, backend="eager")  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = original


def build(spec: ModelSpec, run: Run, policy: Policy, device: Device, **optimizer: Any) -> Any:
    """A stepper of this project for a run."""
    from sabia.core.train.losses.next_token import next_token_loss
    from sabia.core.train.optimizer.config import OptimizerConfig
    from sabia.core.train.stepper_factory import make_stepper

    remat: Any = policy.remat
    loss = partial(next_token_loss, remat=remat)
    parameters = RandomParameters(spec, device)
    return make_stepper(
        "torch", spec, parameters, loss, OptimizerConfig(**optimizer), precision=run.precision,
        micro_batch=policy.micro_batch, compiled=run.compiled,
    )  # fmt: skip


def synchronize(device: Device) -> None:
    """Wait until the device has done what was asked of it."""
    import torch

    if device.cuda:
        torch.cuda.synchronize()


def timed(step: Callable[[], float], device: Device) -> tuple[float, float]:
    """(seconds, loss) of a step."""
    synchronize(device)
    start = time.perf_counter()
    loss = step()
    synchronize(device)
    return time.perf_counter() - start, loss


@contextlib.contextmanager
def profiled(device: Device, trace: Path) -> Iterator[None]:
    """Profile what is done within as the step of a Chrome trace, which is then written."""
    from torch import profiler

    kinds = [profiler.ProfilerActivity.CPU]
    kinds += [profiler.ProfilerActivity.CUDA] if device.cuda else []
    with profiler.profile(activities=kinds) as profile:
        synchronize(device)
        with profiler.record_function(ANNOTATION):
            yield
            synchronize(device)
    profile.export_chrome_trace(str(trace))


def reset_peak(device: Device) -> None:
    """Begin to record the peak of memory."""
    import torch

    if device.cuda:
        torch.cuda.reset_peak_memory_stats()


def peak(device: Device) -> Figures:
    """Peaks of what tensors held, and of what the allocator held, since `reset_peak`."""
    import torch

    if not device.cuda:
        return {}
    return {"peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved()}  # fmt: skip


def median(values: list[float]) -> float:
    """The middle value."""
    return sorted(values)[len(values) // 2]
