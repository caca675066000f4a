"""The planner's memory for our own trainer beside what the trainer takes, over a spread of runs.

    python tests/bench/bench_plan_memory.py [--only TEXT …]

Each run is `sabia pretrain` for three steps in processes of their own, on rows of random tokens;
its figure is the peak resident set of the fullest rank (ru_maxrss of the ended process: everything
from start to export). Interpreter and imports are the peak of the same command, with the same
options and mesh, on a model of next to nothing. glibc's malloc is left as users have it: arenas,
its moving threshold between heap and mapped blocks, and what of the heap it does not return all
count, and the planner has to know of them (core/plan/device/host_memory.py). One thread a process.
"""

import argparse
import functools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sabia.core.parallel.mesh import parse_mesh
from sabia.core.plan.counting.blocks import from_spec
from sabia.core.plan.device.layout import Layout, Workload, find_stack
from sabia.core.plan.device.memory import device_memory
from sabia.core.plan.memory import StateRecipe
from sabia.core.spec import from_config, new_config, parse_shape

STEPS = 3  # the heap still grows after the first
RECOMPUTE = {"none": "none", "matmuls": "selective", "full": "full"}
NOTHING = "d=16,layers=4,heads=4,vocab=64"
MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """One run: shape of the model, tokens of a row, rows of a step, options of pretrain."""

    shape: str
    length: int = 512
    rows: int = 4
    options: dict[str, str] = field(default_factory=dict)
    packed: bool = False

    @property
    def mesh(self) -> dict[str, int]:
        """Axes with their sizes."""
        return parse_mesh(self.options.get("mesh", ""))

    @property
    def ranks(self) -> int:
        """Processes."""
        return int(np.prod(list(self.mesh.values()), dtype=int))

    @property
    def name(self) -> str:
        """For the table."""
        told = [f"{key} {value}" for key, value in self.options.items()]
        packed = ["packed"] if self.packed else []
        return f"{self.shape}; {self.rows} x {self.length}; " + ", ".join(packed + told)


def case(shape: str, length: int = 512, rows: int = 4, packed: bool = False, **options) -> Case:
    named = {key.replace("_", "-"): str(value) for key, value in options.items()}
    return Case(shape, length, rows, named, packed)


DENSE = "d=512,layers=8,heads=8,vocab=8192"
QWEN = "family=qwen3,d=512,layers=8,heads=8,kv=2,vocab=16384,tied=false"
MOE = "family=qwen3_moe,d=384,layers=6,heads=6,kv=2,experts=16,chosen=2,ffn=1024,vocab=8192"
MLA = "family=deepseek_v3,d=384,layers=5,heads=6,experts=8,chosen=2,vocab=8192"
GEMMA = "family=gemma3,d=384,layers=6,heads=6,kv=2,vocab=65536"
CASES = [
    case(DENSE),
    case(DENSE, remat="full"),
    case(DENSE, remat="matmuls"),
    case(DENSE, precision="bf16"),
    case(DENSE, precision="bf16", remat="full"),
    case(DENSE, rows=8, micro_batch=2),
    case(DENSE, packed=True),
    case(DENSE, optimizer="muon"),
    case(DENSE, optimizer="lion"),
    case(DENSE, optimizer="adafactor"),
    case(DENSE, lora_rank=16),
    case(QWEN),
    case(QWEN, precision="bf16", rows=8, micro_batch=4, length=256),
    case(QWEN, length=1024, rows=2, remat="full"),
    case("d=1024,layers=4,heads=16,vocab=8192,tied=false", length=256, rows=2),
    case("d=1536,layers=4,heads=12,vocab=4096", length=128, rows=2),
    case("d=768,layers=3,heads=12,vocab=4096", length=1024, rows=8),
    case("family=olmo2,d=512,layers=6,heads=8,vocab=8192", length=1024, rows=2),
    case(MOE),
    case(MOE, precision="bf16"),
    case(MOE, remat="full", rows=8),
    case(MLA),
    case(MLA, precision="bf16", rows=2),
    case(GEMMA, rows=2),
    case(GEMMA, rows=4, precision="bf16"),
    case(GEMMA, rows=8, micro_batch=2, remat="full"),
    case(DENSE, mesh="data=2"),
    case(DENSE, mesh="fsdp=2"),
    case(QWEN, mesh="fsdp=2", precision="bf16", remat="full"),
    case(DENSE, mesh="tensor=2"),
    case(DENSE, mesh="pipe=2", rows=8, micro_batch=1),
    case(DENSE, mesh="context=2"),
    case(MOE, mesh="expert=2"),
    case(DENSE, mesh="fsdp=2,tensor=2"),
]


def predicted(one: Case) -> float:
    """Bytes of the fullest rank."""
    model = from_spec(from_config(new_config(**parse_shape(one.shape), context=one.length)))
    rank = int(one.options.get("lora-rank", 0))
    edges = sum(kind.count * kind.adapter_edges for kind in model.layers)
    work = Workload(
        model,
        one.length,
        one.rows,
        StateRecipe(one.options.get("optimizer", "adamw"), 4, 4, 8, 12),
        one.options.get("precision", "fp32"),
        rank * edges if rank else None,
        one.packed,
    )
    layout = Layout(**one.mesh, recompute=RECOMPUTE[one.options.get("remat", "none")])
    whole = one.rows // layout.rows
    micro = int(one.options.get("micro-batch", whole))
    layout = Layout(**{**vars(layout), "micro_batch": micro})
    return float(device_memory(work, layout, find_stack("sabia-cpu")).total)


def write_rows(path: Path, one: Case) -> None:
    """Random tokens; packed rows hold four documents."""
    vocab, count = int(parse_shape(one.shape)["vocab"]), one.rows * STEPS
    ids = np.random.default_rng(0).integers(0, vocab, count * one.length).astype(np.int32)
    starts = np.arange(0, ids.size + 1, one.length, dtype=np.int32)
    lengths = [one.length // 4] * 4 if one.packed else [one.length]
    table = {"input_ids": pa.ListArray.from_arrays(starts, ids)}
    pq.write_table(pa.table(table | {"document_lengths": [lengths] * count}), path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def peaks(one: Case) -> tuple[float, float]:
    """(peak bytes of the fullest rank, CPU seconds of all)."""
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder) / "rows.parquet", one)
        options = [word for key, value in one.options.items() for word in (f"--{key}", value)]
        command = [sys.executable, "-m", "sabia.cli.main", "pretrain", f"{folder}/rows.parquet"]
        command += ["--shape", one.shape, "--steps", str(STEPS), "--batch", str(one.rows)]
        command += [*options, "-o", f"{folder}/run"]
        processes = _started(command, one.ranks, folder)
        used = [os.wait4(process.pid, 0)[1:] for process in processes]
        if any(status for status, _ in used):
            raise SystemExit(Path(folder, "errors-0").read_text()[-2000:])
        largest = max(usage.ru_maxrss for _, usage in used) * 1024
        return largest, sum(usage.ru_utime + usage.ru_stime for _, usage in used)


def _started(command: list[str], ranks: int, folder: str) -> list[subprocess.Popen]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("SABIA_")}
    shared = plain | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    started = []
    for rank in range(ranks):
        own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else shared
        if ranks == 1:
            own = {k: v for k, v in shared.items() if k != "WORLD_SIZE"}
        with open(f"{folder}/errors-{rank}", "w") as errors:
            started.append(
                subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL, stderr=errors)
            )
    return started


@functools.cache
def _nothing(key: tuple[tuple[str, str], ...]) -> float:
    return peaks(Case(NOTHING, 64, 8, dict(key)))[0]


def interpreter(one: Case) -> float:
    """The peak of the same command on a model of next to nothing."""
    kept = {k: v for k, v in one.options.items() if k != "micro-batch"}
    kept = {k: v.replace("expert", "data") for k, v in kept.items()}
    return _nothing(tuple(sorted(kept.items())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="runs whose name holds any of these"
    )
    given = parser.parse_args()
    errors = []
    print(f"{'predicted':>9} {'measured':>9} {'error':>7} {'CPU s':>6}  MiB; run")
    for one in CASES:
        if not any(text in one.name for text in given.only):
            continue
        told, (peak, seconds) = predicted(one), peaks(one)
        seen = peak - interpreter(one)
        errors.append(told / seen - 1)
        figures = f"{told / MIB:9.0f} {seen / MIB:9.0f} {errors[-1]:+7.1%} {seconds:6.1f}"
        print(f"{figures}  {one.name}", flush=True)
    sizes = [abs(error) for error in errors]
    within = sum(size <= 0.1 for size in sizes)
    print(f"mean error {statistics.mean(sizes):.1%}, worst {max(sizes):.1%}, ", end="")
    print(f"{within} of {len(sizes)} within 10 %")


if __name__ == "__main__":
    main()
