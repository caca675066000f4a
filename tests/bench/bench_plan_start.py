"""CPU time of plan-cluster without a search, of its help, and of what no command can avoid.

Each line is a process of its own, `RUNS` times in turn with the others (A/B/C/A/B/C); user + system
time of the process, least and median. Bytecode is compiled beforehand, as in any installation.

    python tests/bench/bench_plan_start.py
"""

import os
import statistics
import subprocess
import sys
import tempfile

RUNS = 15
ARTICLE = ["--params", "1.6T", "--active", "49B"]
SMALL = ["--params", "8B", "--tokens", "1T", "--chip", "h100"]
CALLS: dict[str, list[str]] = {
    "python -c pass": ["-c", "pass"],
    "import typer": ["-c", "import typer"],
    "plan-cluster --help": ["plan-cluster", "--help"],
    "plan-cluster --params 1.6T --active 49B": ["plan-cluster", *ARTICLE],
    "… --json": ["plan-cluster", *ARTICLE, "--json"],
    "… --preempt 6h --carbon": ["plan-cluster", *ARTICLE, "--preempt", "6h", "--carbon"],
    "… --compare b200,h200,v5p,v6e": ["plan-cluster", *SMALL[:4], "--compare", "b200,h200,v5p,v6e"],
    "8B --fixed-layout fsdp=64 --explain": [
        "plan-cluster", *SMALL, "--fixed-layout", "fsdp=64", "--explain"
    ],
    "8B --search --chips 64 (with NumPy)": ["plan-cluster", *SMALL, "--search", "--chips", "64"],
    "8B --search over all sizes (with NumPy)": ["plan-cluster", *SMALL, "--search"],
}  # fmt: skip


def cpu_ms(words: list[str], environment: dict[str, str]) -> float:
    """User and system milliseconds of one process."""
    command = [sys.executable, *([] if words[0] == "-c" else ["-m", "sabia.cli.main"]), *words]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    assert not status, words
    return 1e3 * (used.ru_utime + used.ru_stime)


def main() -> None:
    """Print a row for each call."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"PYTHONPYCACHEPREFIX": cache, "OMP_NUM_THREADS": "1"}
        for words in CALLS.values():
            cpu_ms(words, environment)
        times: dict[str, list[float]] = {name: [] for name in CALLS}
        for _ in range(RUNS):
            for name, words in CALLS.items():
                times[name].append(cpu_ms(words, environment))
    print("| call | least, ms | median, ms |\n|---|---|---|")
    for name, all_ms in times.items():
        print(f"| {name} | {min(all_ms):.0f} | {statistics.median(all_ms):.0f} |")


if __name__ == "__main__":
    main()
