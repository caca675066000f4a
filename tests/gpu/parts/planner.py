"""The planner's step time and memory beside what the runs of the part `speed` measured.

The runs are read from the results, so this part is for after `speed`. Memory is compared without
the planner's term for the runtime, because the measured peak is that of tensors. Without a GPU the
runs are those of the dry run, by the planner's model of a CPU: this shows that it computes, and its
errors mean nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from cases import RESULTS, Case, Device, Figures, Skipped, read_rows
from reports import last
from trainers import Run, planned, planned_bytes
from workloads import shape_spec

NO_ROWS = "no run of the part speed has a result (expected to run after it)"


def cases(device: Device) -> Iterator[Case]:
    """A case for each run of `speed` that has ended well, and the median of their errors."""
    rows = [row for row in last(read_rows(device.out / RESULTS))
            if row["part"] == "speed" and row["status"] == "ok"]  # fmt: skip
    if not rows:
        yield Case("all", no_rows)
        return
    for row in rows:
        yield Case(row["case"], lambda row=row: compared(row["figures"], device))
    yield Case(f"median of {len(rows)} runs", lambda: middle(device))


def no_rows() -> Figures:
    """Say why nothing is compared."""
    raise Skipped(NO_ROWS)


def compared(run: Mapping[str, Any], device: Device) -> Figures:
    """Predicted and measured seconds and bytes of a run, and their relative differences.

    error_time and error_memory are sizes; the signs are those of predicted less measured.
    """
    from sabia.core.errors import UsageError
    from sabia.core.plan.chips import chip_of_device, find_chip
    from sabia.core.plan.device.step_time import step_time

    one = Run(run["shape"], run["length"], run["precision"], run["compiled"], run["documents"],
              run["rows"] * run["length"])  # fmt: skip
    spec = shape_spec(run["shape"], device, run["layers"])
    policy = run["remat"], run["micro_batch"]
    chip = chip_of_device(device.name)
    if chip is None and device.cuda:
        raise Skipped(f"{device.name} is not in the planner's catalogue")
    work, layout, stack = planned(spec, one, *policy, device.cuda)
    try:
        predicted = step_time(work, layout, chip or find_chip("cpu"), stack)
    except UsageError as error:  # the chip has no rate for the precision
        raise Skipped(str(error)) from None
    figures: Figures = {"predicted_s": float(predicted.total_s), "measured_s": run["step_s"]}
    figures |= _error("time", figures["predicted_s"], figures["measured_s"])
    figures["parts_s"] = {k: round(float(v), 5) for k, v in predicted.parts.items() if v}
    figures["predicted_bytes"] = planned_bytes(spec, one, *policy, device.cuda)
    if "peak_bytes" in run:
        figures["measured_bytes"] = run["peak_bytes"]
        figures |= _error("memory", figures["predicted_bytes"], figures["measured_bytes"])
    return figures


def _error(name: str, predicted: float, measured: float) -> Figures:
    relative = predicted / measured - 1
    return {f"error_{name}": abs(relative), f"signed_error_{name}": relative}


def middle(device: Device) -> Figures:
    """Median errors of the runs that were compared."""
    rows = [row["figures"] for row in last(read_rows(device.out / RESULTS))
            if row["part"] == "planner" and "predicted_s" in row["figures"]]  # fmt: skip
    if not rows:
        raise Skipped("no run was compared")
    figures: Figures = {"runs": len(rows)}
    for key in ("error_time", "error_memory"):
        values = sorted(figure[key] for figure in rows if key in figure)
        if values:
            figures[key] = values[len(values) // 2]
    return figures
