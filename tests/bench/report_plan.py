"""Errors of the planner's step time on published tables that its constants were not fitted on.

  python tests/bench/report_plan.py           figures by table, every row, what was refused
  python tests/bench/report_plan.py --brief   figures only
  python tests/bench/report_plan.py --write   their band, into core/plan/data/judged.toml

Error of a row: |predicted / published - 1| of the step's seconds. Rows: tests/core/plan/
published_steps.toml, whole tables; calibration rows are left out of all figures. Further rows
(further_steps.toml) are not fitted on either, but had been seen when the model was written.
"""

import argparse
import sys
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from datetime import date
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from judged_steps import Refused, judged_cases  # noqa: E402
from step_cases import Case, calibration_cases, further_cases, mixture_cases  # noqa: E402

from sabia.core.plan.device.step_time import WORDS, StepTime, kind_of, step_time  # noqa: E402  # noqa: E402
from sabia.core.plan.device.step_work import Band, load_bands  # noqa: E402


@dataclass(frozen=True)
class Judged:
    """A row and its prediction."""

    case: Case
    time: StepTime

    @property
    def error(self) -> float:
        """Signed, as a share of the published time."""
        return self.time.total_s / self.case.measured_s - 1

    @property
    def inside(self) -> bool:
        """Whether the published time lies in the predicted band."""
        return self.time.low_s <= self.case.measured_s <= self.time.high_s

    @property
    def mixture(self) -> bool:
        """Whether the model has routed experts."""
        return bool(self.case.workload.architecture.expert_params)


@dataclass(frozen=True)
class Figures:
    """Of a set of rows. share: within 15 %; band: inside the predicted band; bias: mean signed."""

    rows: int
    mean: float
    median: float
    share: float
    band: float
    bias: float

    def __str__(self) -> str:
        return (
            f"{self.rows:4d} rows   mean {self.mean:6.1%}   median {self.median:6.1%}   "
            f"within 15 % {self.share:5.0%}   in band {self.band:5.0%}   bias {self.bias:+6.1%}"
        )


def predict(case: Case) -> Judged:
    """The case with its prediction."""
    return Judged(case, step_time(case.workload, case.layout, case.chip, case.stack))


def judge() -> tuple[list[Judged], list[Refused]]:
    """All rows: predicted, or refused."""
    rows = list(judged_cases())
    done = [predict(row) for row in rows if isinstance(row, Case)]
    return done, [row for row in rows if isinstance(row, Refused)]


def figures(rows: list[Judged]) -> Figures:
    """Errors of a set of rows."""
    off = [abs(row.error) for row in rows]
    return Figures(
        rows=len(rows),
        mean=fmean(off),
        median=median(off),
        share=fmean(error <= 0.15 for error in off),
        band=fmean(row.inside for row in rows),
        bias=fmean(row.error for row in rows),
    )


def by_table(rows: list[Judged]) -> dict[str, Figures]:
    """Figures of each table."""
    names = dict.fromkeys(row.case.table for row in rows)
    return {name: figures([row for row in rows if row.case.table == name]) for name in names}


def band(rows: list[Judged]) -> Band:
    """Published over predicted: 10th and 90th percentile, by rows and by tables, the wider."""
    sizes = Counter(row.case.table for row in rows)
    ends = []
    for power in (0, 1):
        ratios = sorted((1 / (1 + row.error), sizes[row.case.table] ** -power) for row in rows)
        reached = list(accumulate(weight for _, weight in ratios))
        places = [bisect_left(reached, share * reached[-1]) for share in (0.1, 0.9)]
        ends.append([ratios[min(place, len(ratios) - 1)][0] for place in places])
    fast, slow = zip(*ends, strict=True)
    return Band(round(min(fast) - 5e-4, 3), round(max(slow) + 5e-4, 3))


def bands(rows: list[Judged]) -> dict[str, Band]:
    """Of each kind of step."""
    return {kind: band(found) for kind, found in by_kind(rows).items()}


def by_kind(rows: list[Judged]) -> dict[str, list[Judged]]:
    """The rows of each kind of step (step_time.py)."""
    return {kind: [r for r in rows if kind_of(r.case.workload) == kind] for kind in WORDS}


def compared(rows: list[Judged]) -> list[str]:
    """The table of what the predictions were compared with: judged and further rows."""
    cases = [row.case for row in rows] + list(further_cases())
    chips = ", ".join(f'"{name}"' for name in sorted({case.chip.name for case in cases}))
    formats = ", ".join(f'"{name}"' for name in sorted({c.workload.precision for c in cases}))
    return [
        "",
        "[compared]  # of these rows, and of those that had been seen before",
        f"chips = [{chips}]",
        f"precisions = [{formats}]",
        f"longest_row = {max(case.workload.sequence for case in cases)}",
        f"most_chips = {max(int(case.layout.chips) for case in cases)}",
    ]


def write(found: dict[str, Band], rows: list[Judged]) -> None:
    """The data file that predictions take their band from."""
    lines = [
        "# Published over predicted step time: 10th and 90th percentile of judged rows and tables.",
        "# Written by tests/bench/report_plan.py --write; never edit.",
        "",
        f"date = {date.today()}",
    ]
    for kind, seen in found.items():
        count = len(by_kind(rows)[kind])
        lines += ["", f"[band.{kind}]", f"rows = {count}"]
        lines += [f"fast = {seen.fast}", f"slow = {seen.slow}"]
    lines += compared(rows)
    (ROOT / "core" / "plan" / "data" / "judged.toml").write_text("\n".join(lines) + "\n")


def line(row: Judged) -> str:
    """One row of the report."""
    peak = row.case.chip.bf16_flops_per_s * row.case.layout.chips
    shares = (row.case.model_flops / seconds / peak for seconds in (row.time.total_s,
              row.case.measured_s))  # fmt: skip
    mfu, published = shares
    parts = {name: seconds / row.time.total_s for name, seconds in row.time.parts.items()}
    largest = sorted(parts, key=lambda name: -parts[name])[:4]
    what = " ".join(f"{name} {parts[name]:.0%}" for name in largest)
    return (
        f"{row.case.table:18s}{row.case.label:52s}{row.case.measured_s:10.3f}"
        f"{row.time.total_s:10.3f} s {row.error:+7.1%}  MFU {published:5.1%} {mfu:5.1%}  {what}"
    )


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    rows, refused = judge()
    if asked.write:
        write(bands(rows), rows)
    tables = by_table(rows)
    for name, found in tables.items():
        print(f"{name:20s}{found}")
    groups = {
        "all rows": rows,
        "without MPT": [row for row in rows if not row.case.table.startswith("mpt")],
        "dense": [row for row in rows if not row.mixture],
        "mixtures": [row for row in rows if row.mixture],
        "calibration rows": [predict(case) for case in calibration_cases()],
        "their mixtures": [predict(case) for case in mixture_cases()],
        "further rows": [predict(case) for case in further_cases()],
    }
    for name, group in groups.items():
        print(f"{name:20s}{figures(group)}")
    for kind, group in by_kind(rows).items():
        own = load_bands()[kind]
        held = fmean(own.fast <= 1 / (1 + row.error) <= own.slow for row in group)
        width = (own.slow - own.fast) / (own.slow + own.fast)
        print(f"band of {kind:12s}{own.fast} to {own.slow} (+-{width:.0%}) holds {held:.0%}")
    mean = fmean(found.mean for found in tables.values())
    share = fmean(found.share for found in tables.values())
    print(f"{'mean over tables':20s}{len(tables):4d} tables mean {mean:6.1%}   share {share:5.0%}")
    print("worst:", line(max(rows, key=lambda row: abs(row.error))))
    for reason, count in Counter(row.reason for row in refused).items():
        print(f"{count:3d} rows not predicted: {reason}")
    if not asked.brief:
        for row in (*rows, *groups["further rows"]):
            print(line(row))
        for row in refused:
            print(f"{row.table:18s}{row.label:52s}  {row.reason}")


if __name__ == "__main__":
    main()
