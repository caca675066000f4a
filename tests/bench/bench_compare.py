"""How often verdicts of `pretrain --compare` are wrong, and how many tokens they take, simulated.

    OMP_NUM_THREADS=1 python tests/bench/bench_compare.py [--rounds 10] [--first 100] [--nulls 2000]

Scores of runs are drawn as tests/core/bench/test_seed_noise.py draws them (noise between seeds,
partly shared by a pair; own differences of 60 held-out items) and go through the rule of the
command. The first table has rounds of 30 contrasts and 30 nulls with at most 5 runs of each corpus,
the second one nulls, and ways that differ by just more than a margin, of which all looks at 2 to 10
pairs are counted, and beside them the test of the same items of one run of each corpus. The shares
of the error (`seed_noise.LOOKS`) were chosen on rounds 0 to 4; others test them.
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "core/bench"))
from test_seed_noise import ITEMS, NULLS, OPEN, Rule, looks, losses, right, wrong_ones

from sabia.core.bench.statistics import paired

# noise between the seeds of a corpus, delta, the range of contrasts, noise of items
CASES = (
    (0.008, 0.05, (0.03, 0.15), 0.010),
    (0.008, 0.03, (0.02, 0.12), 0.010),
    (0.003, 0.015, (0.01, 0.06), 0.003),
    (0.002, 0.01, (0.01, 0.05), 0.003),
    (0.002, 0.01, (0.01, 0.05), 0.010),
)


def planted(case: tuple, shared: float, rounds: range) -> str:
    """A line of the first table."""
    noise, delta, (least, most), of_items = case
    ends, used = {True: [], False: []}, {True: [], False: []}
    for number in rounds:
        rng, rule = np.random.default_rng(number), Rule(0.05, delta, 5)
        for index in range(60):
            null = index % 2 == 1
            gap = 0.0 if null else float(rng.choice([-1, 1]) * rng.uniform(least, most))
            ways = losses(rng, gap, (noise, noise), shared, of_items, 5)
            last = [*looks(rule, *ways)][-1]
            ends[null].append((gap, last.verdict))
            used[null].append(last.pairs / 5)
    decided = [end for of in ends.values() for end in of if end[1] != OPEN]
    rightly = np.mean([right(verdict, gap, math.log1p(delta)) for gap, verdict in decided])
    told = [np.mean([verdict != OPEN for _, verdict in ends[null]]) for null in (False, True)]
    return (
        f"{noise:7.1%} {shared:7.0%} {of_items:7.1%} {delta:7.1%} {least:6.0%} - {most:.0%}"
        f" {told[0]:9.0%} {told[1]:7.0%} {rightly:8.1%} {np.mean(used[False]):10.1%}"
        f" {np.mean(used[True]):6.1%} {np.mean(used[False] + used[True]):6.1%}"
    )


def by_items_alone(name: str, count: int) -> float:
    """How often one run of each corpus differs by the paired test of items alone, of nulls."""
    rng, wrong = np.random.default_rng(len(name)), 0
    for _ in range(count):
        first, second = losses(rng, 0.0, **NULLS[name])
        wrong += paired(first[0], second[0], np.arange(ITEMS), ITEMS).p_value < 0.05
    return wrong / count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--first", type=int, default=100, help="round")
    parser.add_argument("--nulls", type=int, default=2000)
    given = parser.parse_args()
    print("  seeds  shared   items   delta  contrasts   decided: c.  nulls    right  tokens: c."
          "  nulls   all")  # fmt: skip
    for case in CASES:
        for shared in (0.5, 0.8):
            rounds = range(given.first, given.first + given.rounds)
            print(planted(case, shared, rounds), flush=True)
    print("wrong at any of 9 looks: nulls, just outside of 1 % and of 3 %; nulls by items alone")
    for name in NULLS:
        shares = [wrong_ones(name, given.nulls, m) / given.nulls for m in (1e-9, 0.01, 0.03)]
        alone = by_items_alone(name, given.nulls)
        print(*(f"{share:7.2%}" for share in (*shares, alone)), f" {name}", flush=True)


if __name__ == "__main__":
    main()
