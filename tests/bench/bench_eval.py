"""`sabia eval` beside lm-evaluation-harness on the same YAML tasks: items a CPU second and memory.

    python tests/bench/bench_eval.py CHECKS --peer DIR [--work DIR] [--rounds 3] [--shots 5]
        [--workloads choice,generate,together] [--sizes 60,240] [--backend torch]

CHECKS is a folder with `tiny_models.py` (the model of 15.7 M parameters), `lmeval_tasks.py` (items
of ENEM 2022 and GSM8K as YAML tasks) and `measuring.py`; DIR holds lm_eval 0.4.13, installed with
`pip install --target`. Both programs run in turns on one thread, with each of the sizes: the slope
between them is items a CPU second without the start-up. `together` is one run of the four tasks of
`lmeval_peer.py`: so many questions with five options and with letters, two fifths as many answers,
and one piece of a novel for seven questions. Where more items are asked than there are,
they are repeated with a number before the question, so that no two are equal. Our cache is new in
every run. The result is one JSON object a workload: medians over the rounds, the ratios of which
are medians of the ratios of each round, and the largest differences of what was computed.
"""

import argparse
import importlib
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
from itertools import count, islice
from pathlib import Path
from typing import Any

TASKS = {"choice": ("enem2022_options", "enem2022"), "generate": ("gsm8k_generate", "gsm8k")}
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
TOGETHER = "together"
FIGURES = ("cpu_s", "peak_rss_tree_mib")


def write_task(folder: Path, workload: str, shots: int, items: int, checks: Any) -> Path:
    """A YAML task of so many items, and its data; a folder of four if they run together."""
    if workload == TOGETHER:
        counts = {"enem": items, "gsm8k": items * 2 // 5, "pieces": -(-items // 7)}
        rest = {"data": checks.DATA, "shots": shots, "piece_characters": 12_000}
        checks.write_tasks(folder, argparse.Namespace(**counts, **rest))
        return folder
    name, file = TASKS[workload]
    folder.mkdir(parents=True, exist_ok=True)
    every = list(getattr(checks, f"{file.removesuffix('2022')}_items")(checks.DATA))
    every.sort(key=lambda item: len(item["question"]))  # so that the examples fit the context
    examples, rest = every[:shots], every[shots:]
    again = ({**one, "id": f"{one['id']}-{n}", "question": f"{n}. {one['question']}"}
             for n in count(1) for one in rest)  # fmt: skip
    for split, rows in (("fewshot", examples), ("test", list(islice(again, items)))):
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (folder / f"{file}_{split}.jsonl").write_text("".join(lines), "utf-8")
    head = checks.HEAD.format(name=name, folder=folder, file=file, shots=shots)
    (folder / f"{name}.yaml").write_text(head + checks.TASKS[name][1], "utf-8")
    return folder / f"{name}.yaml"


def commands(model: Path, task: Path, work: Path, backend: str) -> dict[str, list[str]]:
    """The commands of both programs."""
    names = task.stem if task.is_file() else ",".join(path.stem for path in task.glob("*.yaml"))
    folder = task.parent if task.is_file() else task
    peer = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args",
            f"pretrained={model},dtype=float32", "--include_path", str(folder), "--tasks",
            names, "--device", "cpu", "--batch_size", "8", "--log_samples", "--output_path",
            str(work / "peer")]  # fmt: skip
    ours = [sys.executable, "-m", "sabia.cli.main", "eval", "--task", str(task), "--model",
            str(model), "--backend", backend, "-o", str(work / "ours.parquet"), "--judge-cache",
            str(work / "cache")]  # fmt: skip
    return {"peer": peer, "ours": ours}


def differences(work: Path, workload: str) -> dict[str, float]:
    """How far the log-likelihoods of the last run are apart, or how many texts differ."""
    import pyarrow.parquet as pq

    found = sorted((work / "peer").rglob("samples_*.jsonl"), key=lambda path: path.stat().st_mtime)
    theirs = [json.loads(line) for line in found[-1].read_text("utf-8").splitlines()]
    rows = pq.read_table(work / "ours.parquet").to_pylist()
    details = {row["item_id"]: json.loads(row["detail"]) for row in rows if row["detail"]}
    by_item = list(details.values())
    # one row for each filter
    theirs = list({row["doc_id"]: row for row in theirs}.values())
    theirs.sort(key=lambda row: row["doc_id"])
    if workload == "generate":
        pairs = [
            (row["resps"][0][0], ours["response"])
            for row, ours in zip(theirs, by_item, strict=True)
        ]
        return {"items": len(pairs), "texts_that_differ": sum(a != b for a, b in pairs)}
    gaps = [
        abs(float(theirs_nats[0][0]) - ours_nats)
        for row, ours in zip(theirs, by_item, strict=True)
        for theirs_nats, ours_nats in zip(row["resps"], ours["loglikelihoods"], strict=True)
    ]
    return {"choices": len(gaps), "largest_difference_nats": max(gaps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checks", type=Path)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--workloads", default=",".join(TASKS))
    parser.add_argument("--sizes", default="60,240")
    parser.add_argument("--backend", default="torch")
    options = parser.parse_args()
    sys.path.insert(0, str(options.checks.resolve()))
    measure = importlib.import_module("measuring").measure
    checks: Any = importlib.import_module("lmeval_tasks")
    checks.DATA = options.checks.resolve().parent / "data"
    work = (options.work or Path(tempfile.mkdtemp())).resolve()
    model = work / "bench-15m"
    if not model.exists():
        out = str(work)
        measure([sys.executable, str(options.checks.resolve() / "tiny_models.py"), "--family",
                 "bench-15m", "--out", out])  # fmt: skip
    sizes = [int(size) for size in options.sizes.split(",")]
    for workload in options.workloads.split(","):
        costs: dict[str, list[list[dict[str, float]]]] = {"peer": [], "ours": []}
        for number in range(options.rounds):
            for name in costs:
                costs[name].append([])
            for size in sizes:
                folder = work / f"{workload}-{size}"
                task = write_task(folder / "task", workload, options.shots, size, checks)
                run = folder / str(number)
                shutil.rmtree(run, ignore_errors=True)  # else the scores are there already
                environment = OFFLINE | {
                    "OMP_NUM_THREADS": "1",
                    "HF_DATASETS_CACHE": str(run / "datasets"),
                    "SABIA_RUN_RECORD": "0",
                }
                for name, command in commands(model, task, run, options.backend).items():
                    path = {"PYTHONPATH": str(options.peer)} if name == "peer" else {}
                    cost = measure(command, environment | path)
                    costs[name][-1].append(cost)
                    print(f"{workload} {size} {name}: {cost['cpu_s']:.1f} CPU s, "
                          f"{cost['peak_rss_tree_mib']:.0f} MiB", file=sys.stderr)  # fmt: skip
        report: dict[str, Any] = {"workload": workload, "shots": options.shots, "sizes": sizes}
        slopes = {
            name: [(sizes[-1] - sizes[0]) / (r[-1]["cpu_s"] - r[0]["cpu_s"]) for r in rounds]
            for name, rounds in costs.items()
        }
        for name, rounds in costs.items():
            largest = {f: statistics.median(r[-1][f] for r in rounds) for f in FIGURES}
            report[name] = largest | {"items_per_cpu_s": statistics.median(slopes[name])}
        pairs = list(zip(costs["ours"], costs["peer"], strict=True))
        report["ratio_of_slopes"] = statistics.median(
            a / b for a, b in zip(slopes["ours"], slopes["peer"], strict=True)
        )
        report["ratio_of_commands"] = statistics.median(
            b[-1]["cpu_s"] / a[-1]["cpu_s"] for a, b in pairs
        )
        memory = (a[-1]["peak_rss_tree_mib"] / b[-1]["peak_rss_tree_mib"] for a, b in pairs)
        report["ratio_of_memory"] = statistics.median(memory)
        if workload in TASKS:
            report |= differences(
                work / f"{workload}-{sizes[-1]}" / str(options.rounds - 1), workload
            )
        print(
            json.dumps(
                {
                    k: round(v, 5) if isinstance(v, float) and math.isfinite(v) else v
                    for k, v in report.items()
                },
                indent=1,
            )
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
