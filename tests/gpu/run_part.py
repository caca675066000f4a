"""Run the cases of one part in this process; called by run.py.

usage: run_part.py NAME FILE OUT [SECONDS [CASES]]

CASES is a regular expression that the names of cases match. Cases that have a result in OUT are
left out. After SECONDS no further case begins (exit 75). An error of the device, after which CUDA
accepts no further work in a process, ends it (exit 76), and run.py starts it again with the next
case.
"""

import ctypes
import importlib.util
import re
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from cases import RESULTS, Case, Device, Failed, Figures, Skipped, append_row, ended, read_rows

OUT_OF_TIME, DEVICE_ERROR = 75, 76
PR_SET_PDEATHSIG = 1  # of Linux, prctl(2)
DEVICE_WORDS = ("CUDA error", "illegal memory access", "device-side assert", "cudaError", "NCCL")


def device_here(out: Path, scratch: Path) -> Device:
    """The device that torch would use."""
    import torch

    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Device(True, properties.name, properties.total_memory, out, scratch)
    return Device(False, "cpu", 0, out, scratch)


def load_part(file: Path) -> Any:
    """The module of a part."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses of the part look for it there
    spec.loader.exec_module(module)
    return module


def run_case(case: Case) -> tuple[dict[str, Any], BaseException | None]:
    """(the row without its names, the error)."""
    start, error, figures, message = time.perf_counter(), None, Figures(), ""
    try:
        status, figures = "ok", case.run() or {}
    except Skipped as reason:
        status, message = "skipped", str(reason)
    except Failed as failure:
        status, message, figures, error = "failed", str(failure), failure.figures, failure
    except Exception as failure:  # of any kind: it must not stop the rest
        status, error = "failed", failure
        text = str(failure).strip().splitlines() or [""]
        message = f"{type(failure).__name__}: {text[0][:400]}"
        traceback.print_exc()
    seconds = round(time.perf_counter() - start, 3)
    row = {"status": status, "seconds": seconds, "message": message, "figures": figures}
    return row, error


def poisoned(error: BaseException | None) -> bool:
    """Whether CUDA accepts no further work in this process after an error."""
    if error is None or isinstance(error, Failed) or "out of memory" in str(error):
        return False
    return any(word in str(error) for word in DEVICE_WORDS)


def free_memory(device: Device) -> None:
    """Return what the last case held to the device."""
    import gc

    import torch

    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()  # each case compiles its own graphs
    gc.collect()
    if device.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def end_with_parent() -> None:
    """End this process when run.py is killed; two processes must not work on one folder."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(name: str, file: str, out: str, seconds: str = "inf", cases: str = "") -> int:
    """Run what has no result; the exit status."""
    end_with_parent()
    folder, stop_at = Path(out), time.monotonic() + float(seconds)
    done = ended(read_rows(folder / RESULTS), name)
    with tempfile.TemporaryDirectory(prefix=f"sabia-{name}-") as scratch:
        device = device_here(folder, Path(scratch))
        for case in load_part(Path(file)).cases(device):
            if case.name in done or not re.match(cases, case.name):
                continue
            if time.monotonic() > stop_at:
                return OUT_OF_TIME
            done.add(case.name)
            names = {"part": name, "case": case.name}
            append_row(folder, names | {"status": "started"})
            row, error = run_case(case)
            append_row(folder, names | row)
            print(f"{name}: {case.name}: {row['status']} {row['message']}".rstrip(), flush=True)
            if poisoned(error):
                return DEVICE_ERROR
            del error
            free_memory(device)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
