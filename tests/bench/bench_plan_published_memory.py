"""Predicted peaks of training memory a device beside published ones, row by row.

    python tests/bench/bench_plan_published_memory.py

Rows: tests/core/plan/published_memory.toml and those of published_steps.toml with a memory.
"""

import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from published_memory import judged, peaks


def main() -> None:
    found = list(peaks())
    print(f"{'PUBLISHED':>9} {'OURS':>7} {'ERROR':>7}  ROW")
    for peak in found:
        print(f"{peak.published:9.2f} {peak.predicted:7.2f} {peak.error:+7.1%}  {peak.name}")
        if peak.miss:
            print(f"{'':26} outside the band: {peak.miss}")
    errors = [abs(peak.error) for peak in found]
    print(f"mean error {fmean(errors):.1%} of {len(found)} rows, worst {max(errors):.1%}")
    for name, rows in (("all", found), ("judged half", judged(found))):
        inside = sum(peak.inside for peak in rows)
        print(f"{name}: {inside} of {len(rows)} within -5/+15 % ({inside / len(rows):.0%})")


if __name__ == "__main__":
    main()
