"""CPU of every help page beside `python -c 'import typer'`, in turns, the median of nine.

usage: python tests/bench/bench_help.py [ROUNDS]
"""

import resource
import statistics
import subprocess
import sys

from sabia.cli.registry import all_calls

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 9
SABIA = [sys.executable, "-m", "sabia.cli.main"]


def cpu_ms(words: list[str]) -> float:
    """CPU milliseconds, user and system, of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> None:
    """Print a table: page, milliseconds, ratio to importing typer."""
    typer = [sys.executable, "-c", "import typer"]
    pages = {"sabia": [*SABIA, "--help"]}
    pages |= {name: [*SABIA, *name.split(), "--help"] for name in all_calls()}
    rounds = [
        (cpu_ms(typer), {name: cpu_ms(words) for name, words in pages.items()})
        for _ in range(ROUNDS)
    ]
    base = statistics.median(one for one, _ in rounds)
    print(f"import typer: {base:.0f} ms")
    print("| page | CPU ms | ratio |\n| --- | --- | --- |")
    for name in pages:
        value = statistics.median(found[name] for _, found in rounds)
        print(f"| {name} | {value:.0f} | {value / base:.2f} |")


if __name__ == "__main__":
    main()
