"""Speed of training: tokens a second, MFU and peak memory of our own stepper on random tokens.

Each run shows an effect against another one: compiled and eager, packed and unpacked, FP8 and BF16,
rows of 8k and 32k, the shape of the model. The first two are traced too. Steps have 32k tokens, and
every step repeats the same rows, so that the loss must fall. MFU counts causal scores within
documents, by the data sheet's dense rate.
"""

import gzip
import shutil
from collections.abc import Callable, Iterator

from cases import RESULTS, Case, Device, Failed, Figures, Skipped, read_rows
from reports import last
from traces import read_trace, summarize
from trainers import (
    STEPS,
    WARM_UP,
    Policy,
    Run,
    build,
    clear,
    compiler,
    fitting,
    median,
    peak,
    profiled,
    reset_peak,
    timed,
)
from workloads import shape_spec, token_batch

TRACE, TRACE_BYTES = "trace.json.gz", 15 << 20
LEARNING_RATE, TINY_RATE = 1e-4, 3e-3
K = 1024
# most important first: the time may end before the last
RUNS = (
    Run("1B", 8 * K),
    Run("1B", 8 * K, compiled=False),
    Run("8B", 8 * K),
    Run("1B", 8 * K, "fp8"),
    Run("1B", 8 * K, documents=8),
    Run("MoE 8 x 1B", 8 * K),
    Run("8B", 8 * K, "fp8"),
    Run("1B", 32 * K),
    Run("1B", 8 * K, compiled=False, documents=8),
    Run("MoE 8 x 1B", 8 * K, compiled=False),
    Run("8B", 32 * K, documents=16),
    Run("1B", 8 * K, "fp8", compiled=False),
    Run("8B", 8 * K, compiled=False),
    Run("1B", 8 * K, "fp8-block"),
    Run("MoE 8 x 1B", 32 * K, "fp8", documents=16),
)
TRACED = RUNS[:2]
DRY_RUNS = tuple(RUNS[number] for number in (0, 1, 2, 4, 5, 8, 11))  # FP8 takes long to trace
TINY_ROWS = 4


def cases(device: Device) -> Iterator[Case]:
    """The runs; without a GPU some of them with short rows, under the same names."""
    for run in DRY_RUNS if device.tiny else RUNS:
        yield Case(run.name, lambda run=run: judged(run, device))


def judged(run: Run, device: Device) -> Figures:
    """Figures of a run. Raises Skipped where it does not fit, Failed if no run of its shape did."""
    try:
        return measured(tiny(run, device), device, run in TRACED)
    except Skipped as reason:
        fits = {row["figures"]["shape"] for row in last(read_rows(device.out / RESULTS))
                if row["part"] == "speed" and row["status"] == "ok"}  # fmt: skip
        of_shape = [one for one in RUNS if one.shape == run.shape]
        if run == of_shape[-1] and run.shape not in fits:
            raise Failed(f"no run of {run.shape} fits: {reason}") from None
        raise


def tiny(run: Run, device: Device) -> Run:
    """The run itself, or one that a CPU does in a second."""
    if not device.tiny:
        return run
    length = run.length // 256
    return Run(run.shape, length, run.precision, run.compiled, min(run.documents, 4),
               TINY_ROWS * length)  # fmt: skip


def measured(run: Run, device: Device, traced: bool = False) -> Figures:
    """Figures of a run with the first policy that fits. Raises Failed, Skipped."""
    spec = shape_spec(run.shape, device)

    def use(policy: Policy) -> Figures:
        return steps(run, policy, device, traced)

    with compiler(device):
        try:
            figures, policy, refused = fitting(spec, run, device, use)
        finally:
            clear(device)
    figures |= {"remat": policy.remat, "micro_batch": policy.micro_batch, "refused": refused}
    figures |= rates(run, figures, device)
    losses = figures["losses"]
    finite = all(abs(loss) < float("inf") for loss in losses)  # False for NaN
    if not finite or losses[-1] >= losses[0]:
        raise Failed(f"losses {losses} (expected finite ones that fall)", figures)
    return figures


def steps(run: Run, policy: Policy, device: Device, traced: bool) -> Figures:
    """Warm up, measure, and trace a step."""
    spec = shape_spec(run.shape, device)
    stepper = build(spec, run, policy, device)
    batch = token_batch(spec.vocab_size, run.rows, run.length, run.documents)
    rate = TINY_RATE if device.tiny else LEARNING_RATE
    number = 0

    def step() -> float:
        nonlocal number
        loss = stepper.step(batch, rate, number=number).loss
        number += 1
        return float(loss)

    first = [timed(step, device) for _ in range(1 if device.tiny else WARM_UP)]
    reset_peak(device)
    measured = [timed(step, device) for _ in range(3 if device.tiny else STEPS)]
    seconds = [time for time, _ in measured]
    figures: Figures = {
        "step_s": median(seconds), "slowest_step_s": max(seconds),
        "first_step_s": first[0][0], **peak(device),
        "losses": [round(loss, 4) for _, loss in (*first, *measured)],
    }  # fmt: skip
    return figures | (trace(step, run, device) if traced else {})


def rates(run: Run, figures: Figures, device: Device) -> Figures:
    """What the figures mean for this run: tokens a second, MFU, and what describes the run."""
    from sabia.core.plan.chips import chip_of_device
    from sabia.core.spec import parameter_count, training_flops_per_token

    spec = shape_spec(run.shape, device)
    tokens_per_s = run.rows * run.length / figures["step_s"]
    result: Figures = {
        "tokens_per_s": tokens_per_s, "compile_s": figures["first_step_s"] - figures["step_s"],
        "shape": run.shape, "layers": len(spec.layers), "parameters": parameter_count(spec),
        "rows": run.rows, "length": run.length, "documents": run.documents,
        "precision": run.precision, "compiled": run.compiled,
    }  # fmt: skip
    chip = chip_of_device(device.name)
    if chip is None:
        return result
    document = run.length // run.documents
    causal, dense = (training_flops_per_token(spec, document, c) for c in ("causal", "6nd"))
    result["tflops"] = tokens_per_s * causal / 1e12
    result["mfu"] = tokens_per_s * causal / chip.bf16_flops_per_s
    result["mfu_6nd"] = tokens_per_s * dense / chip.bf16_flops_per_s
    if run.precision.startswith("fp8") and chip.fp8_flops_per_s:
        result["mfu_fp8"] = tokens_per_s * causal / chip.fp8_flops_per_s
    return result


def trace(step: Callable[[], float], run: Run, device: Device) -> Figures:
    """Profile one more step; the trace of the compiled run is kept."""
    path = device.scratch / "trace.json"
    with profiled(device, path):
        step()
    if run.compiled:
        packed = device.scratch / TRACE
        with path.open("rb") as source, gzip.open(packed, "wb", 6) as target:
            shutil.copyfileobj(source, target)
        if packed.stat().st_size < TRACE_BYTES:
            shutil.copy(packed, device.out / TRACE)
    return summarize(read_trace(path))
