"""One command that shows what a GPU can show: correctness, speed, tuning, memory, the planner.

    python tests/gpu/run.py --out DIR                    everything, once
    python tests/gpu/run.py --out DIR --budget 9m        what fits into nine minutes
    python tests/gpu/run.py --out DIR --budget 9m --resume     the rest of it, call after call
    python tests/gpu/run.py --out DIR --only kernels,models    some parts
    python tests/gpu/run.py --out DIR --resume --compare OLD/results.jsonl
    python tests/gpu/run.py --out DIR --resume --only none --record    a table of DIR in RESULTS.md
    python tests/gpu/run.py --carry WHEELS               what a machine without a network lacks

The parts run in the order of the table PARTS, each in a process of its own that is ended at its
limit; those that measure no time run at the same time (--jobs). DIR gets results.jsonl (a row per
case, on disk after each), report.md, log.txt, the block sizes of the device (DEVICE.json) and one
profiler trace. A case that fails, hangs or ends its process is reported with its message and does
not stop the rest. Nothing has to be installed beyond torch and NumPy: a part that needs more is
skipped, and says what is missing. Without a GPU the kernels run interpreted at tiny sizes, and all
other parts as a dry run on the CPU.

Exit status: 0 all cases hold, 1 a case failed, 2 wrong usage, 75 cases are left (--resume).
"""

import argparse
import contextlib
import importlib.util
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import reports  # noqa: E402
from carry import carry  # noqa: E402
from cases import RESULTS, append_row, in_progress, read_rows  # noqa: E402
from run_part import DEVICE_ERROR, OUT_OF_TIME  # noqa: E402

RESTARTS = 5  # of a part whose process ended by itself
SLOWER = 10  # times the limit without a GPU, on a machine that may be busy
GRACE_S = 20.0  # between the end of a part's time for new cases and its end by force


@dataclass(frozen=True)
class Part:
    """file: of the cases, in parts/. limit_s: seconds until it is ended. needs: packages.

    cases: a regular expression that the names of its cases match. timed: it measures time, so
    nothing else may run meanwhile.
    """

    file: Path
    limit_s: float
    needs: tuple[str, ...] = ()
    cases: str = ""
    timed: bool = False


def _part(name: str, limit_s: float, *needs: str, cases: str = "", timed: bool = False) -> Part:
    return Part(HERE / "parts" / f"{name}.py", limit_s, needs, cases, timed)


COMMANDS_NEED = ("pyarrow", "tokenizers", "xxhash", "jinja2", "typer")
PARTS: Mapping[str, Part] = {
    "environment": _part("environment", 60, timed=True),
    "kernels-attention": _part("kernels", 400, "triton", cases="attention .*float32"),
    "kernels-attention-16": _part("kernels", 400, "triton", cases="attention .*(bfloat16|float16)"),
    "kernels-others": _part("kernels", 400, "triton", cases="(?!attention)"),
    "codes": _part("codes", 120, "triton"),
    "models": _part("models", 420, cases="(?!.*compiled)"),
    "models-compiled": _part("models", 420, cases=".*compiled"),
    "resume": _part("resume", 300, *COMMANDS_NEED),
    "generation": _part("generation", 120),
    "commands": _part("commands", 300, *COMMANDS_NEED),
    "implementations": _part("implementations", 300, "triton", timed=True),
    "speed": _part("speed", 1500, timed=True),
    "peers": _part("peers", 500, "transformers", timed=True),
    "post-training": _part("post_training", 600, *COMMANDS_NEED, timed=True),
    "decoding": _part("decoding", 300, cases="(?!.*transformers)", timed=True),
    "peers-decoding": _part("decoding", 300, "transformers", cases=".*transformers", timed=True),
    "tuning": _part("tuning", 400, "triton", timed=True),
    "gptq": _part("gptq", 300, timed=True),
    "planner": _part("planner", 60, timed=True),
}


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--only", default="", help=f"parts of {','.join(PARTS)}, or none; the name "
                        "before a hyphen stands for all that begin with it")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=0, help="parts at the same time, of those that "
                        "measure no time (default: 8 on a GPU, or half of its host's CPU cores if "
                        "these are fewer; 1 without a GPU)")  # fmt: skip
    parser.add_argument("--budget", default="", help="time for this call, such as 9m or 90s")
    parser.add_argument("--resume", action="store_true", help="leave out cases that have a result")
    parser.add_argument("--record", action="store_true", help="append a table to RESULTS.md")
    parser.add_argument("--compare", type=Path, help="results.jsonl of an earlier run")
    parser.add_argument("--carry", type=Path, help="collect missing pure-Python wheels here")
    options = parser.parse_args(words)
    options.only = list(filter(None, options.only.split(",")))
    unknown = [name for name in options.only if name != "none" and not _named(name, PARTS)]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} (expected {', '.join(PARTS)} or none)")
    if options.jobs < 0:
        parser.error(f"--jobs: {options.jobs} (expected a number from 1)")
    if options.out is None and options.carry is None:
        parser.error("--out: missing (expected a folder)")
    if options.compare and not options.compare.is_file():
        parser.error(f"--compare: {options.compare} is not a file (expected results.jsonl)")
    try:
        options.seconds = seconds_of(options.budget)
    except ValueError as error:
        parser.error(str(error))
    if options.out and (options.out / RESULTS).exists() and not options.resume:
        parser.error(f"--out: {options.out} holds results (expected --resume or another folder)")
    return options


def _named(name: str, parts: Mapping[str, Part]) -> list[str]:
    """The parts that a name of --only stands for."""
    return [part for part in parts if part == name or part.startswith(f"{name}-")]


def seconds_of(text: str) -> float:
    """`9m` → 540.0; no text: no limit. Raises ValueError."""
    if not text:
        return float("inf")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None:
        raise ValueError(f"--budget: {text!r} (expected a time such as 9m, 90s or 1h)")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def environment(scratch: Path, cuda: bool) -> dict[str, str]:
    """The environment of the parts: `sabia` of this source tree, whether installed or not."""
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    metadata = scratch / f"sabia-{version[1]}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: sabia\nVersion: {version[1]}\n")
    paths = [str(scratch), str(ROOT / ".mypy"), str(HERE), str(HERE.parent / "support")]
    more = {"PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])}
    more |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    more |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # JAX leaves memory to torch
    if not cuda:
        more["TRITON_INTERPRET"] = "1"
    return os.environ | more


def missing(part: Part) -> list[str]:
    """Packages that a part needs and that are not installed."""
    return [name for name in part.needs if importlib.util.find_spec(name) is None]


def run_part(name: str, part: Part, out: Path, seconds: float, settings: Mapping[str, str]) -> bool:
    """Run the cases of a part that have no result; whether none is left to a later call.

    seconds: left to this call. A case that is running at the part's own limit is recorded as a
    timeout; one that is running when the call's time is over is left to the next call.
    """
    lacking = missing(part)
    if lacking:
        message = f"{', '.join(lacking)} not installed (see --carry)"
        append_row(out, {"part": name, "case": "all", "status": "skipped", "seconds": 0,
                         "message": message, "figures": {}})  # fmt: skip
        print(f"{name}: skipped: {message}", flush=True)
        return True
    own = part.limit_s * (1 if "TRITON_INTERPRET" not in settings else SLOWER)
    begin, own_limit = time.monotonic(), own <= seconds
    limit = min(own, seconds)
    for _ in range(RESTARTS + 1):
        left = limit - (time.monotonic() - begin)
        code = _process(name, part, out, left, settings)
        if code in (0, OUT_OF_TIME):
            return code == 0
        rows = read_rows(out / RESULTS)
        running = in_progress(rows, name)
        if code is None:
            # a case that was cut off twice by the ends of calls hangs
            if running and (own_limit or running[1] > 1):
                _record(out, name, running[0], "timeout", f"ended after {limit:.0f} s of the part")
            return False
        if running:
            _record(out, name, running[0], "crashed", reports.exit_text(code) + "; see log.txt")
        elif code != DEVICE_ERROR:
            _record(out, name, "all", "crashed", reports.exit_text(code) + "; see log.txt")
            return True
    return False


def _record(out: Path, part: str, case: str, status: str, message: str) -> None:
    append_row(out, {"part": part, "case": case, "status": status, "seconds": 0,
                     "message": message, "figures": {}})  # fmt: skip
    print(f"{part}: {case}: {status}: {message}", flush=True)


def _process(
    name: str, part: Part, out: Path, seconds: float, settings: Mapping[str, str]
) -> int | None:
    """The exit status of a part's process; None: it was ended after `seconds`."""
    soft = max(seconds - GRACE_S, seconds / 2)
    words = [sys.executable, str(HERE / "run_part.py"), name, str(part.file), str(out), f"{soft}"]
    words.append(part.cases)
    with (out / "log.txt").open("ab") as log:
        log.write(f"== {name}\n".encode())
        log.flush()
        process = subprocess.Popen(
            words, env=dict(settings), cwd=ROOT, stdout=subprocess.PIPE, stderr=log,
            start_new_session=True, text=True,
        )  # fmt: skip
    try:
        return _wait(process, seconds)
    finally:
        _end(process)


def _wait(process: "subprocess.Popen[str]", seconds: float) -> int | None:
    """Pass on the lines of a process until it ends or the time is over."""
    assert process.stdout is not None
    lines = process.stdout

    def pass_on() -> None:
        for line in lines:
            print(line, end="", flush=True)

    reader = threading.Thread(target=pass_on, daemon=True)
    reader.start()
    try:
        code: int | None = process.wait(timeout=max(seconds, 0.1) if seconds < 1e9 else None)
    except subprocess.TimeoutExpired:
        code = None
        _end(process)
    reader.join(timeout=5)
    return code


def _end(process: "subprocess.Popen[str]") -> None:
    """End a process and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def has_cuda() -> bool:
    """Whether torch finds a GPU; asked in a process of its own, which then releases it."""
    words = [sys.executable, "-c", "import torch, sys; sys.exit(not torch.cuda.is_available())"]
    return subprocess.run(words, stderr=subprocess.DEVNULL).returncode == 0


def jobs_of(options: argparse.Namespace, cuda: bool) -> int:
    """Parts at the same time."""
    return options.jobs or (max(1, min(8, (os.cpu_count() or 1) // 2)) if cuda else 1)


def run(options: argparse.Namespace, parts: Mapping[str, Part]) -> bool:
    """Run the parts; whether no case is left."""
    options.out.mkdir(parents=True, exist_ok=True)
    end, written = time.monotonic() + options.seconds, threading.Lock()
    with tempfile.TemporaryDirectory(prefix="sabia-gpu-") as scratch:
        cuda = bool(parts) and has_cuda()
        settings = environment(Path(scratch), cuda) if parts else {}
        jobs = jobs_of(options, cuda)

        def one(name: str) -> bool:
            left = end - time.monotonic()
            if left <= 1:
                print(f"{name}: not begun: the budget of {options.budget} is used up", flush=True)
                return False
            given = settings
            if jobs > 1 and not parts[name].timed:
                threads = max(1, (os.cpu_count() or 1) // jobs)
                given = {"OMP_NUM_THREADS": str(threads), **settings}
            complete = run_part(name, parts[name], options.out, left, given)
            with written:
                reports.write_report(options.out)
            return complete

        complete = True
        for timed, names in itertools.groupby(parts, lambda name: parts[name].timed):
            with ThreadPoolExecutor(1 if timed else jobs) as pool:
                complete &= all(list(pool.map(one, names)))
    return complete


def main(words: Sequence[str] | None = None, parts: Mapping[str, Part] = PARTS) -> int:
    """Run the command; the exit status."""
    options = parse_arguments(words)
    if options.carry is not None:
        carry(options.carry, sorted({need for part in parts.values() for need in part.needs}))
        return 0
    chosen = [part for name in options.only or parts for part in _named(name, parts)]
    complete = run(options, {name: parts[name] for name in chosen})
    rows = read_rows(options.out / RESULTS)
    print(reports.summary(rows))
    if options.compare:
        print(reports.comparison(read_rows(options.compare), rows))
    if options.record:
        results: Any = ROOT / "tests" / "bench" / "RESULTS.md"
        with results.open("a") as file:
            file.write("\n" + reports.report(rows))
        print(f"appended to {results.relative_to(ROOT)}")
    if any(row["status"] in ("failed", "crashed", "timeout") for row in reports.last(rows)):
        return 1
    return 0 if complete else OUT_OF_TIME


if __name__ == "__main__":
    sys.exit(main())
