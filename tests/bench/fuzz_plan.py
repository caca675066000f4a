"""Random lines and damaged files for `sabia plan-cluster`: what took longest, and the memory.

usage: fuzz_plan.py [LINES [FIRST_SEED]]; all lines run in this process, a seed for every hundred.
A line with a traceback, another exit code, a long message or more than MOST_S of CPU is printed and
ends the run with 1, and so does a peak of more than MOST_MB.
"""

import os
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "cli")]

from plan_calls import called  # noqa: E402
from plan_odd import damaged_file, near_line, odd_line  # noqa: E402
from test_plan_odd_inputs import fault  # noqa: E402

MOST_S, MOST_MB = 2, 500


def main() -> None:
    """Run and report."""
    lines, first = map(int, (*sys.argv[1:], *("10000", "1")[len(sys.argv) - 1 :]))
    codes: Counter[int] = Counter()
    slowest: list[tuple[float, list[str]]] = []
    longest, faults = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for number in range(lines):
            if number % 100 == 0:
                rng = Random(first + number // 100)
            stdin = ""
            drawn = rng.random()
            if drawn < 0.3:
                words = odd_line(rng)
            elif drawn < 0.7:
                words = near_line(rng)
            else:
                words, stdin = damaged_file(rng, Path(folder))
            before = time.process_time()
            done = called(words, stdin)
            took_s = time.process_time() - before
            slowest.append((took_s, [word[:60] for word in words]))
            slowest = sorted(slowest, key=lambda one: -one[0])[:5]
            longest = max(longest, *map(len, done.stderr.splitlines()), 0)
            codes[done.code] += 1
            said = fault(done) or (f"{took_s:.1f} s of CPU" if took_s > MOST_S else "")
            if said:
                faults += 1
                print(first + number // 100, [w[:200] for w in words], said, flush=True)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{lines} lines, {faults} faults; exit codes {dict(codes)}; longest line of a message "
          f"{longest} characters; {peak_mb:.0f} MB; {time.process_time():.0f} CPU s")  # fmt: skip
    for seconds, words in slowest:
        print(f"{seconds:6.2f} s  {' '.join(words)}")
    sys.exit(faults > 0 or peak_mb > MOST_MB)


if __name__ == "__main__":
    main()
