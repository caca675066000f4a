"""`--executor ray`: the slices and phases that a Slurm array runs, as tasks of a Ray cluster.

A task is one call of the same command with `--shard I/N` in a process of its own, on any node; the
nodes share the paths of inputs, outputs and `--scratch`. Ray schedules the tasks, runs those whose
worker has died again, and adds nodes while tasks wait. As a finished shard is not computed again, a
task that is repeated goes on where it was. This process opens the inputs, waits, and adds up the
statistics of the slices.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from sabia.core import notes, stop
from sabia.core.errors import (
    BadData,
    ExitCode,
    Failed,
    Infeasible,
    Interrupted,
    MissingBackend,
    SabiaError,
    UsageError,
)
from sabia.core.notes import progress, working_s
from sabia.core.options.shared import Call
from sabia.core.sandbox.kernel import end_with_parent
from sabia.core.shards.inputs import open_inputs
from sabia.core.shards.job import Job
from sabia.core.shards.summary import Summary

# variables of this process that the tasks get too: options, and access to stores and models
PASSED_ON = ("SABIA_", "AWS_", "GOOGLE_", "FSSPEC_", "HF_")
LINES = 50  # of what a slice writes to stderr, the last ones
LOOK_S = 0.2  # interval at which this process looks for a stop signal
END_S = 10.0  # for tasks that are cancelled
RETRIES = 3  # of a task whose worker has died
# codes that end all: the others would fail in the same way
FATAL = (ExitCode.USAGE, ExitCode.MISSING)
# codes of a slice whose rows are all there: what all slices together come to is decided here
RATES = (ExitCode.INFEASIBLE, ExitCode.BAD_DATA)


class CommandLine(NamedTuple):
    """The words of a call of sabia before and after the options that this module adds; the
    folder where it runs and variables that it gets."""

    words: list[str]
    inputs: list[str]
    folder: str
    variables: dict[str, str]


class Ended(NamedTuple):
    """How a slice ended: its exit code, its statistics if it came to them, its last messages."""

    code: int
    figures: dict[str, Any] | None
    messages: list[str]


def run(job: Job, options: Call) -> None:
    """Run a call of a command on Ray. Raises UsageError, MissingBackend without Ray, Interrupted,
    and the error of a slice."""
    values, address = options.values(), job.executor.partition("=")[2]
    phases = _phases(job, options)
    if not job.inputs or "-" in job.inputs:
        raise UsageError("--executor: ray reads paths that all nodes share, not stdin; give INPUT")
    if not job.to_directory:
        raise UsageError("--executor: ray writes a shard for each input shard; give -o DIR")
    started = working_s()
    shards = len(open_inputs(job, "document"))
    ray = _connected(address)
    try:
        resources = ray.cluster_resources()
        wanted = job.jobs if "jobs" in options.given else int(resources.get("CPU", 1))
        count = max(1, min(wanted, shards))
        device = float(_runs_a_model(values) and bool(resources.get("GPU")))
        remote = ray.remote(num_cpus=1, num_gpus=device, max_retries=RETRIES)(run_slice)
        total, call = Summary(), _call(job, values)
        for phase in phases:
            slices = ["all"] if phase == "compare" else [f"{i}/{count}" for i in range(count)]
            added = [f"--phase={phase}"] if phase else []
            tasks = {
                remote.options(name=f"sabia {job.command} {phase} {one}").remote(
                    call, [*added, f"--shard={one}"]
                ): one
                for one in slices
            }
            _wait(ray, tasks, f"{job.command} {phase}".strip(), total)
    finally:
        ray.shutdown()
    total.seconds = working_s() - started
    total.report(job)
    total.check_rejects()


def run_slice(call: CommandLine, added: Sequence[str]) -> Ended:
    """Run one slice in a process of its own; it stops if this worker dies or is interrupted."""
    if not Path(call.folder).is_dir():
        message = f"{call.folder}: no such folder on node {os.uname().nodename}"
        return Ended(ExitCode.FAILED, None, [message])
    words = [sys.executable, "-m", "sabia.cli.main", *call.words, *added, "--", *call.inputs]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
        child = subprocess.Popen(
            words, cwd=call.folder, env=os.environ | call.variables, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=stderr,
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),
        )  # fmt: skip
        try:
            code = child.wait()
        except BaseException:  # cancelled
            child.terminate()
            child.wait()
            raise
        stderr.seek(0)
        lines = deque(stderr, LINES)
    if code == -signal.SIGKILL:  # for memory: Ray shall see a worker that dies
        os.kill(os.getpid(), signal.SIGKILL)
    figures, messages = None, list[str]()
    for line in map(str.strip, lines):
        printed = _object(line)
        if "rows_in" in printed:
            figures = {key: printed[key] for key in printed if key in Summary.__dataclass_fields__}
        else:
            messages.append(printed["error"]["message"] if "error" in printed else line)
    return Ended(code, figures, messages)


def _object(line: str) -> dict[str, Any]:
    """The JSON object of a line, empty for other lines."""
    try:
        return dict(json.loads(line)) if line.startswith("{") else {}
    except ValueError:
        return {}


def _phases(job: Job, options: Call) -> tuple[str, ...]:
    """The phases to run: '' for a command without them."""
    values = options.values()
    if not options.needs_all_shards():
        return (values.get("phase") or "",)
    if "phase" not in values:
        raise UsageError(f"--executor: {job.command} needs all shards at once; use local")
    if not values["scratch"]:
        raise UsageError(
            f"--executor: ray runs {job.command} in phases; give --scratch DIR that all nodes share"
        )
    every = tuple(filter(None, options.table["phase"].choices))
    return (values["phase"],) if values["phase"] else every


def _call(job: Job, values: Mapping[str, Any]) -> CommandLine:
    arguments, inputs = list(job.call["arguments"]), [str(one) for one in job.inputs]
    del arguments[len(arguments) - len(inputs) :]
    if arguments[-1:] == ["--"]:
        arguments.pop()
    flags = ["--executor=local", "--jobs=1", "--quiet", "--json", *["--force"] * job.force]
    named = values.get("api_key_env")
    variables = {name: value for name, value in os.environ.items()
                 if name.startswith(PASSED_ON) or name == named}  # fmt: skip
    return CommandLine([*job.command.split(), *arguments, *flags], inputs, os.getcwd(), variables)


def _runs_a_model(values: Mapping[str, Any]) -> bool:
    """Whether the call runs a language model or an encoder, on an accelerator if there is one."""
    given = values.get("model") or ()
    paths = [one.rpartition("=")[2] for one in ((given,) if isinstance(given, str) else given)]
    asks = bool(values.get("ask")) and not values.get("url")
    return asks or any(map(os.path.isdir, paths))


def _connected(address: str) -> Any:
    """Ray, connected to a cluster, or to one of this machine that is started."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
    try:
        import ray
    except ImportError as error:
        raise MissingBackend(
            "--executor: the package ray is missing; pip install 'sabia[ray]'"
        ) from error
    handlers = {number: signal.getsignal(number) for number in (*stop.SIGNALS, signal.SIGINT)}
    options: dict[str, Any] = {"address": address} if address else {"include_dashboard": False}
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", **options)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        where, line = address or "local", str(error).strip().partition("\n")[0]
        raise Failed(f"--executor: cannot connect to Ray at {where}: {line}") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ray


def _wait(ray: ModuleType, tasks: dict[Any, str], title: str, total: Summary) -> None:
    """Wait for the slices of a phase and add their statistics; raise the first error of them,
    after all have ended."""
    left, failed = dict(tasks), dict[str, Ended]()
    try:
        with progress(len(tasks), title, "slices") as bar:
            while left and not any(one.code in FATAL for one in failed.values()):
                stop.check()
                for task in ray.wait(list(left), timeout=LOOK_S)[0]:
                    name = left.pop(task)
                    ended = _ended(ray, task)
                    if ended.figures is not None and ended.code in (ExitCode.OK, *RATES):
                        total.add(Summary(**ended.figures))
                    elif ended.code != ExitCode.OK:
                        failed[name] = ended
                    for line in ended.messages[: -1 if name in failed else None]:
                        notes.say(f"slice {name}: {line}")
                    bar.advance(1, rows=f"{total.rows_out:,}")
    finally:
        for task in left:
            ray.cancel(task)
        if left:
            ray.wait(list(left), num_returns=len(left), timeout=END_S)
    if failed:
        name, first = next(iter(failed.items()))
        raise _error(first.code)(
            f"{len(failed)} of {len(tasks)} slices failed; slice {name}: "
            f"{(first.messages or [f'exit code {first.code}'])[-1]}"
        )


def _ended(ray: ModuleType, task: object) -> Ended:
    try:
        ended: Ended = ray.get(task)
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError):
        died = f"its worker died {RETRIES + 1} times (out of memory?); run again to resume"
        return Ended(ExitCode.FAILED, None, [died])
    except ray.exceptions.RayError as error:
        return Ended(ExitCode.FAILED, None, [str(error).strip().partition("\n")[0]])
    return ended


def _error(code: int) -> type[SabiaError]:
    """The class of errors with an exit code; Failed if there is none."""
    kinds: dict[int, type[SabiaError]] = {
        int(kind.exit_code): kind
        for kind in (UsageError, Infeasible, BadData, MissingBackend, Interrupted)
    }
    return Interrupted if code == -signal.SIGTERM else kinds.get(code, Failed)
