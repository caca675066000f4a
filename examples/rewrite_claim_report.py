"""The result of rewrite_claim.sh: rewritten pages against pages as they are, at each point.

Each seed is one replication with problems of its own, so that an interval between seeds (a cluster
each) holds for other seeds and other problems alike. Beside the stated answer, the result of the
last step is compared with the right one. Writes rows.parquet (an answer a row) and effects.json,
and prints a table. An effect whose 95 % interval contains 0 was not seen; then the smallest one
that would have been, in 80 % of such experiments, is given.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from run_folder import RunFolder, aligned, percent

from sabia.core.bench import statistics
from sabia.core.shards.atomic import write_json

POINTS = {
    "none": "before fine-tuning",
    "few": "after few demonstrations",
    "many": "after many demonstrations",
}
MEASURES = {"answer": "stated answer right", "steps": "result of the steps right"}
KEPT = re.compile(r"keep (\d)\.")
FEWEST = 6  # items that must differ: with fewer, all in one direction, p is above 0.05
NEXT = """sabia rewrite pages/ -o rewritten/                                your pages, by the rules
sabia rewrite pages/ --engine endpoint --url URL --model NAME -o rewritten/     by a model
sabia tokenize pages/ -o a/ && sabia tokenize rewritten/ --tokenizer a/_tokenizer -o b/
sabia pretrain --compare a/ b/ --model base/ --tokens 100M --task exam.toml -o compared/"""


def rows_of(folder: Path, seed: str) -> list[dict[str, Any]]:
    """An answer a row: seed, pages, point, item, response, and for each measure whether it is
    right."""
    made, run = [], RunFolder(folder / seed)
    for score in [*run.scores("none.parquet"), *run.scores("tuned.parquet")]:
        if score.detail is None:
            continue
        pages, point = score.model.split(".")
        response, kept = score.detail["response"], KEPT.findall(score.detail["response"])
        made.append(
            {
                "seed": seed, "pages": pages, "point": point, "item": score.item_id,
                "response": response, "answer": score.value,
                "steps": float(bool(kept) and kept[-1] == score.detail["answer"]),
            }
        )  # fmt: skip
    return made


def effect(rows: Sequence[dict[str, Any]], point: str, measure: str) -> dict[str, Any]:
    """The shares of both models, and the difference with the wider one of two intervals, between
    seeds and between problems, because a few seeds may be equal by chance."""
    values: dict[str, dict[tuple[str, str], float]] = {"pages": {}, "rewritten": {}}
    for row in rows:
        if row["point"] == point:
            values[row["pages"]][row["seed"], row["item"]] = row[measure]
    keys = sorted(values["pages"])
    a, b = (np.array([of[key] for key in keys]) for of in values.values())
    seeds, clusters = np.unique([seed for seed, _ in keys], return_inverse=True)
    pair = max(
        (statistics.paired(a, b, of, len(keys)) for of in (clusters, np.arange(len(keys)))),
        key=lambda one: one.difference.half_width,
    )
    by_seed = np.bincount(clusters, b - a) / np.bincount(clusters)
    d = pair.difference
    return {
        "point": point, "measure": measure, "items": len(keys), "seeds": len(seeds),
        "pages": float(a.mean()), "rewritten": float(b.mean()), "difference": d.value,
        "low": d.low, "high": d.high, "p": pair.p_value,
        "seen": d.low > 0 or d.high < 0,
        "detectable": max(pair.detectable, FEWEST / len(keys)), "by_seed": by_seed.tolist(),
    }  # fmt: skip


def line(one: dict[str, Any]) -> list[str]:
    """A line of the table."""
    interval = " to ".join(f"{100 * one[end]:+.1f}" for end in ("low", "high"))
    least = min(one["detectable"], 1.0)
    missed = f"not seen; {100 * least:.1f} points would have been in 80 % of the cases"
    return [
        POINTS[one["point"]], MEASURES[one["measure"]], percent(one["pages"]),
        percent(one["rewritten"]), f"{100 * one['difference']:+.1f} ({interval})",
        "seen" if one["seen"] else missed,
    ]  # fmt: skip


def cpu_minutes(folder: Path) -> float:
    """Of the commands, from the two outputs of the shell's `times`."""
    totals = []
    for name in ("cpu-before.txt", "cpu-after.txt"):
        spent = re.findall(r"(\d+)m([\d.]+)s", (folder / name).read_text())
        totals.append(sum(60 * float(minutes) + float(seconds) for minutes, seconds in spent))
    return (totals[1] - totals[0]) / 60


def main() -> None:
    """Write and print the results of the seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("seeds", nargs="+", help="folders of the seeds")
    given = parser.parse_args()
    rows = [row for seed in given.seeds for row in rows_of(given.folder, seed)]
    effects = [effect(rows, point, measure) for point in POINTS for measure in MEASURES]
    pq.write_table(pa.Table.from_pylist(rows), given.folder / "rows.parquet")
    minutes = cpu_minutes(given.folder)
    write_json(given.folder / "effects.json", {"cpu_minutes": minutes, "effects": effects})
    columns = ["when", "share of held-out problems", "pages", "rewritten",
               "difference in points (95 %)", "effect"]  # fmt: skip
    print("\n" + aligned([columns, *map(line, effects)]))
    print(
        f"\n{len(given.seeds)} seeds, {effects[0]['items']:,} problems, {minutes:.1f} CPU minutes"
    )
    for one in effects:
        if one["measure"] == "answer":
            each = ", ".join(f"{100 * value:+.0f}" for value in one["by_seed"])
            print(f"{POINTS[one['point']]}, difference of each seed: {each}")
    print(
        f"rows: {given.folder.resolve() / 'rows.parquet'}, effects.json beside it\n\nnext:\n{NEXT}"
    )


if __name__ == "__main__":
    main()
