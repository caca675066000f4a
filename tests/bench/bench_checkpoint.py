"""Checkpoints: memory, blocking and disturbance of the step, beside torch DCP and Orbax.

    python tests/bench/bench_checkpoint.py [--gb 2] [--rounds 2] [--place DIR]

The state is float32 tensors of 64 MB on the CPU. Each measurement is a process of its own, the
contenders in turns. Memory is the peak of the process's resident memory over a save less what it
was before, as a share of the state; blocking is the time until training may go on, beside a plain
write of the same bytes to the same disk with one fsync; disturbance is the time of a step of fixed
work (matrix products and small operations) during an upload held to 20 MB/s by its file system,
beside the same step while the upload is held, ten steps each in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

TENSOR_BYTES = 64_000_000
RATE = 20e6


def make_state(size: float) -> dict[str, np.ndarray]:
    """Named float32 tensors of `size` bytes in all."""
    draw = np.random.default_rng(0)
    shape = (4000, TENSOR_BYTES // 16000)
    return {f"param/{i}": draw.random(shape, np.float32) for i in range(round(size / TENSOR_BYTES))}


class Peak:
    """The most memory this process has had since it was made, over what it had then, in bytes.

    Anonymous memory: pages of files that happen to be mapped can be taken away at any time.
    """

    def __init__(self) -> None:
        self.before = self.most = anonymous()
        self.running = True
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        while self.running:
            self.most = max(self.most, anonymous())
            time.sleep(0.002)

    def stop(self) -> int:
        """End the watching."""
        self.running = False
        self.thread.join()
        return self.most - self.before


def anonymous() -> int:
    """Resident bytes of this process that are not of files."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def raw(state: dict[str, np.ndarray], place: Path) -> float:
    """Seconds of a plain write with one fsync."""
    since = time.perf_counter()
    with open(place / "raw", "wb", buffering=0) as file:
        for array in state.values():
            view = memoryview(array).cast("B")
            while view:
                view = view[file.write(view[: 8 << 20]) :]
        os.fsync(file.fileno())
    return time.perf_counter() - since


def sabia(state: dict[str, np.ndarray], place: Path) -> float:
    """Seconds that a save blocks; waits for the commit."""
    from sabia.core.train.checkpoint.pieces import whole_pieces
    from sabia.core.train.checkpoint.saver import Saver

    with Saver(place) as saver:
        saver.save(1, whole_pieces(state), {})
    return saver.blocking_s or 0.0


def dcp(state: dict[str, np.ndarray], place: Path) -> float:
    """torch.distributed.checkpoint.async_save."""
    import torch
    from torch.distributed import checkpoint

    tensors = {name: torch.from_numpy(array) for name, array in state.items()}
    since = time.perf_counter()
    future = checkpoint.async_save(tensors, checkpoint_id=place / "dcp", no_dist=True)
    blocked = time.perf_counter() - since
    future.result()
    return blocked


def orbax(state: dict[str, np.ndarray], place: Path) -> float:
    """Orbax's asynchronous checkpointer on JAX arrays."""
    import jax
    from orbax import checkpoint

    tree = {name.replace("/", "."): jax.device_put(array) for name, array in state.items()}
    state.clear()
    jax.block_until_ready(tree)
    with checkpoint.AsyncCheckpointer(checkpoint.StandardCheckpointHandler()) as saver:
        peak = Peak()
        since = time.perf_counter()
        saver.save(place / "orbax", args=checkpoint.args.StandardSave(tree))
        blocked = time.perf_counter() - since
        saver.wait_until_finished()
        print(json.dumps({"extra": peak.stop(), "blocked": blocked}))
    sys.exit()


CONTENDERS = {"raw": raw, "sabia": sabia, "dcp": dcp, "orbax": orbax}


def measure(name: str, size: float, place: Path) -> None:
    """Print one contender's seconds and extra bytes; the first save of a process may warm up."""
    state = make_state(size)
    if name == "dcp":
        import torch
        import torch.distributed.checkpoint  # noqa: F401
    if name == "sabia":
        import sabia.core.train.checkpoint  # noqa: F401
    if name == "orbax":
        orbax(state, place)
    peak = Peak()
    blocked = CONTENDERS[name](state, place)
    print(json.dumps({"extra": peak.stop(), "blocked": blocked}))


def disturb(size: float, place: Path) -> None:
    """Print the median seconds of steps while an upload runs and while it is held, in turns."""
    import torch

    from sabia.core.train.checkpoint.pieces import whole_pieces
    from sabia.core.train.checkpoint.saver import Saver, wait_for

    flowing = slow_store()
    torch.set_num_threads(1)
    a, b = torch.randn(1024, 1024), torch.zeros(64)

    def step() -> float:
        since = time.perf_counter()
        for _ in range(4):
            a @ a
        for _ in range(500):
            b.add_(1.0)  # the interpreter has its part in a step
        return time.perf_counter() - since

    times: dict[str, list[float]] = {"held": [], "flowing": []}
    with Saver(place / "spool", f"slow://{place}/remote") as saver:
        saver.save(1, whole_pieces(make_state(size)), {})
        wait_for(saver._commit)
        for turn in range(10**6):
            kind = ("held", "flowing")[turn % 2]
            (flowing.set if turn % 2 else flowing.clear)()
            times[kind] += [step() for _ in range(12)][2:]
            if saver._upload is None or saver._upload.done():
                break
            saver.poll()
    found = {kind: statistics.median(seconds) for kind, seconds in times.items()}
    print(json.dumps(found | {"upload": saver.upload_s, "steps": len(times["held"])}))


def slow_store() -> threading.Event:
    """Register slow://, files written at RATE in all while the event that is returned is set."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    flowing, one = threading.Event(), threading.Lock()
    flowing.set()

    class Slow(LocalFileSystem):
        protocol = "slow"
        cachable = False

        def _open(self, path, mode="rb", **settings):
            file = super()._open(path, mode, **settings)

            def slow(data):
                flowing.wait()
                with one:  # all streams together make the rate
                    time.sleep(len(data) / RATE)
                return len(data)  # as over a network: no second write to this disk

            if "w" in mode:
                file.write = slow
            return file

    fsspec.register_implementation("slow", Slow, clobber=True)
    return flowing


def child(*words: object) -> dict:
    """Run this file in a new process; its last line of output."""
    start = [sys.executable, __file__, *map(str, words)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(start, capture_output=True, text=True, env=environment)
    if done.returncode:
        return {"error": done.stderr.strip().rpartition("\n")[2]}
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def main() -> None:
    """Measure all, in turns, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--only", default="raw,sabia,dcp,orbax", help="contenders; raw is needed")
    parser.add_argument("--upload-gb", type=float, default=0.5, help="of the throttled upload")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--place", default=None, help="a directory on the disk to measure")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    place, size = Path(options.place or tempfile.gettempdir()), options.gb * 1e9
    if options.child == "disturb":
        disturb(size, place)
    elif options.child:
        measure(options.child, size, place)
    else:
        compare(options, place, size)


def compare(options: argparse.Namespace, place: Path, size: float) -> None:
    """Run the contenders in turns, then the disturbance."""
    found: dict[str, list[dict]] = {name: [] for name in options.only.split(",")}
    for _ in range(options.rounds):
        for name, results in found.items():
            with tempfile.TemporaryDirectory(dir=place) as scratch:
                words = ("--child", name, "--gb", options.gb, "--place", scratch)
                results.append(child(*words))
                os.sync()
    print(table(found, size))
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        found = child("--child", "disturb", "--gb", options.upload_gb, "--place", scratch)
    ratio = found["flowing"] / found["held"]
    print(f"\nStep during an upload at 20 MB/s: {ratio:.3f} of a step without {found}")


def table(found: dict[str, list[dict]], size: float) -> str:
    """A line for each contender: medians of memory and of blocking beside the raw write."""
    lines = ["| | extra memory / state | blocking, s | blocking / raw write |",
             "| --- | --- | --- | --- |"]  # fmt: skip
    plain = [result.get("blocked", 0.0) for result in found["raw"]]
    for name, results in found.items():
        errors = [r["error"] for r in results if "error" in r]
        if errors:
            lines.append(f"| {name} | {errors[0]} | | |")
            continue
        extra = statistics.median(r["extra"] for r in results) / size
        blocked = [r["blocked"] for r in results]
        ratio = statistics.median(b / p for b, p in zip(blocked, plain, strict=True))
        lines.append(f"| {name} | {extra:.2f} | {statistics.median(blocked):.2f} | {ratio:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
