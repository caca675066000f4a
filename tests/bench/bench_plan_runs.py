"""Chip-hours of whole published runs beside the planner's forecast, with stops: ratios.

python tests/bench/bench_plan_runs.py
"""

import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

from published_runs import forecast, runs


def main() -> None:
    """Print a row a run, and the median."""
    print("| run | chips | published | steps | with stops | of it | MFU | layout |")
    print("|---|---|---|---|---|---|---|---|")
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for run, config in runs():
            seen = forecast(run, config, Path(folder))
            ratios.append(seen.wall / run["chip_hours"])
            chips = f"{run['chips']:,} {run['chip']}" + "*" * run.get("assumed", False)
            hours = " | ".join(
                f"{h / 1e3:,.0f}K" for h in (run["chip_hours"], seen.work, seen.wall)
            )
            name = f"{run['id']} {run['model']} {run['tokens']}"
            print(
                f"| {name} | {chips} | {hours} | {ratios[-1]:.2f} | {seen.mfu:.0%} "
                f"| {seen.layout} |",
                flush=True,
            )
    print(f"\nmedian {median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
