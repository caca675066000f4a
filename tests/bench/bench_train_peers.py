"""Pretraining beside a Hugging Face loop and a hand-written loop, eager and compiled, in one run.

    python tests/bench/bench_train_peers.py CHECKS [--work DIR] [--precision bf16] [--eager]
        [--warmup 10] [--steps 60] [--rounds 1]
        [--contenders hf-eager,hf-compile,loop-eager,loop-compile]

CHECKS is a folder with `train_peers.py`, which says what is measured and prints the result: tokens
a CPU second on one thread and the peak memory of the largest process, at equal losses. Here the
rows are given a form that `sabia pretrain` reads and the peers the order in which it reads them.
The compiler's cache lies in the working directory and is filled before anything is measured.
Everything runs in this environment, which must have the peers' packages. A last line gives the
largest differences of the losses, ours and each peer's.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

BATCH = 8
SEED = 0
EARLY = 10  # steps after which rounding has grown to differences of losses
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def convert(work: Path) -> None:
    """tokens.parquet → ours.parquet, and order.txt with our order of its rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from sabia.core.shards.order import DataOrder

    table = pq.read_table(work / "tokens.parquet", columns=["id", "input_ids"])
    lengths = [[len(ids)] for ids in table["input_ids"].to_pylist()]
    table = table.append_column("document_lengths", pa.array(lengths, pa.list_(pa.int32())))
    pq.write_table(table, work / "ours.parquet")
    order = DataOrder((len(table),), SEED).rows(0, len(table))
    (work / "order.txt").write_text("\n".join(map(str, order.tolist())) + "\n")


def our_command(work: Path, precision: str, eager: bool) -> str:
    """The shell line that `train_peers.py --ours` takes."""
    words = [sys.executable, "-m", "sabia.cli.main", "pretrain", work / "ours.parquet"]
    line = shlex.join(map(str, words)) + " --model {model} --steps {steps} -o {output}"
    compiled = "" if eager else "--compile "
    return (
        f"{line} --batch {BATCH} --precision {precision} {compiled}--lr 1e-3 --schedule constant "
        f"--warmup 0 --weight-decay 0 --clip-norm 1 --seed {SEED} --save-every 1000000 "
        "--on-spike off --peak-flops 1T"
    )


def our_losses(work: Path) -> dict[str, float]:
    """Step → loss of the last long run."""
    text = (work / "ours-long" / "result" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    return {str(row["step"]): row["loss"] for row in rows if "loss" in row}


def run(options: argparse.Namespace, work: Path) -> None:
    """Prepare, fill the compiler's cache with ours, compare, judge the losses."""
    settings = os.environ | ONE_THREAD | {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor")}
    script = [sys.executable, str(options.checks / "train_peers.py"), "--work", str(work)]
    script += ["--warmup", str(options.warmup), "--steps", str(options.steps)]
    subprocess.run([*script, "--only", "prepare"], env=settings, check=True, stdout=sys.stderr)
    convert(work)
    line = our_command(work, options.precision, options.eager)
    with tempfile.TemporaryDirectory() as scratch:
        first = {"model": work / "bench-26m", "steps": 1, "output": Path(scratch) / "result"}
        filled = line.format(**{name: shlex.quote(str(value)) for name, value in first.items()})
        subprocess.run(filled, shell=True, env=settings, check=True, stdout=subprocess.DEVNULL)
    steps = ",".join(map(str, range(1, options.warmup + options.steps + 1)))
    script += ["--precision", options.precision, "--contenders", options.contenders]
    script += ["--order", str(work / "order.txt"), "--loss-at", steps]
    script += ["--rounds", str(options.rounds), "--ours", line]
    done = subprocess.run(script, env=settings, check=True, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    ours = our_losses(work)
    for name, found in json.loads(done.stdout)["results"].items():
        if name != "ours":
            apart = [abs(ours[step] - loss) for step, loss in found["loss_at_step"].items()]
            first = f"{max(apart[:EARLY]):.1e} in the first {EARLY} steps"
            print(f"losses, ours and {name}: apart by {max(apart):.1e} at most, {first}")


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checks", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--eager", action="store_true", help="ours without --compile")
    for name, default in (("warmup", 10), ("steps", 60), ("rounds", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--contenders", default="hf-eager,hf-compile,loop-eager,loop-compile")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        run(options, work)


if __name__ == "__main__":
    main()
