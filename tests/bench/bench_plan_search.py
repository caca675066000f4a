"""How fast the planner searches layouts: CPU seconds and candidates per second.

    python tests/bench/bench_plan_search.py [REPEATS]

Models of published shapes on H100, memory and time included; the median of REPEATS searches in this
process. The bar: 10^5 candidates in less than 2 s of CPU. Beside it, how long one layout takes
alone, which is what a search in plain loops would pay for each.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from plain_models import attention_layer, decoder, with_experts

from sabia.core.plan.chips import find_chip
from sabia.core.plan.device.layout import Workload, find_stack
from sabia.core.plan.device.search import search
from sabia.core.plan.device.search_fixes import coarse
from sabia.core.plan.device.search_rules import SearchProblem
from sabia.core.plan.device.survey import Survey, priced
from sabia.core.plan.memory import RECIPES

DENSE = decoder("70B", 8192, 128256, (replace(attention_layer(8192, 64, 8, 128, 28672), count=80),))
QWEN = attention_layer(4096, 64, 4, 128, 12288)
SPARSE = decoder(
    "235B-A22B", 4096, 151936, (replace(with_experts(QWEN, 4096, 128, 8, 1536), count=94),)
)
CHIP = find_chip("h100")


def cpu_s(work: Callable[[], Any]) -> float:
    """CPU seconds of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main(repeats: int) -> None:
    """Print a line a search, then the cost of one layout alone."""
    many = coarse(CHIP, 4096)
    cases = [
        (model, stack, counts)
        for model in (DENSE, SPARSE)
        for stack in ("sabia", "fsdp", "megatron")
        for counts in ([1024], many)
    ]
    for model, stack, counts in cases:
        job = Workload(model, 8192, 1024, RECIPES["fsdp-fp32"])
        given = (SearchProblem(job, CHIP, find_stack(stack), {}), counts, "time")
        found = search(*given)
        seconds = statistics.median(
            cpu_s(lambda given=given: search(*given)) for _ in range(repeats)
        )
        where = f"{counts[0]} chips" if len(counts) == 1 else f"{len(counts)} sizes to {counts[-1]}"
        seen = found.survey
        rate = seen.candidates / seconds
        print(
            f"{model.name:>9} {stack:<8} {where:<16} {seen.meshes.total:>7,} meshes "
            f"{seen.candidates:>9,} candidates {seen.fitting:>8,} fit "
            f"{seconds:6.2f} s {rate:>9,.0f}/s {1e5 / rate:5.2f} s per 1e5"
        )
    for model in (DENSE, SPARSE):
        job = Workload(model, 8192, 1024, RECIPES["fsdp-fp32"])
        problem = SearchProblem(job, CHIP, find_stack("megatron"), {})
        layout = Survey(problem, [256]).parts[0][0].one(0)
        alone = statistics.median(
            cpu_s(lambda problem=problem, layout=layout: priced(problem, layout))
            for _ in range(20 * repeats)
        )
        print(f"{model.name:>9} one layout alone {alone * 1e3:.2f} ms, {1 / alone:,.0f}/s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
