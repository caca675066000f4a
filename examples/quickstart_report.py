"""The quickstart's report: what each stage did, compared with the ground truth of the generator.

Reads the files of a quickstart directory (pages, rows, metrics, scores, times), writes report.html
with tables and charts, and prints the main figures to stdout. Every figure is computed from these
files alone.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from run_folder import RunFolder, aligned, percent

from sabia.core import page
from sabia.core.bench.result_summary import Comparison, Summary
from sabia.core.svg import Bar, BarGroup, Series, bar_chart, line_chart

STAGES = (("base", "pretrained"), ("sft-plain", "sft, not rewritten"), ("sft", "sft"),
          ("grpo", "grpo"), ("w8", "grpo, 8 bits"), ("mixed", "grpo, 8 and 4 bits"))  # fmt: skip


class Run(RunFolder):
    """A quickstart directory."""

    def truth(self) -> dict[str, dict[str, Any]]:
        """The ground truth of each page, by path."""
        return {row["path"]: row for row in self.lines("truth.jsonl")}


def path_of(row: dict[str, Any]) -> str:
    """The path of a document's URL."""
    return urlsplit(row["url"]).path


def relevant(rows: Iterable[dict[str, Any]], truth: dict[str, dict[str, Any]]) -> list[bool]:
    """Whether each page is relevant by the ground truth."""
    return [bool(truth.get(path_of(row), {}).get("relevant")) for row in rows]


def harvest(name: str, rows: Sequence[dict[str, Any]], truth: dict[str, Any]) -> Series:
    """Share of relevant pages among the first n, in the order they were fetched."""
    good = accumulate(relevant(rows, truth))
    return Series(name, [(float(n), count / n) for n, count in enumerate(good, 1)])


def data_part(run: Run) -> tuple[list[list[Any]], list[str]]:
    """What crawl, classify, dedup, rewrite and tokenize did, and the harvest curve."""
    truth = run.truth()
    crawled, breadth = run.rows("crawled.parquet"), run.rows("breadth.parquet")
    kept, unique = run.rows("classified.arrow"), run.rows("unique.parquet")
    removed = run.rows("duplicates.parquet")
    rewritten = run.rows("rewritten.parquet")
    n = min(len(crawled), len(breadth))
    best, broad = (sum(relevant(rows[:n], truth)) / n for rows in (crawled, breadth))
    tokens = sum(len(row["input_ids"]) for row in run.rows("tokens/part-00000.parquet"))
    size = sum(len(row["text"].encode()) for row in rewritten)
    right = relevant(kept, truth)
    lost = sum(relevant(crawled, truth)) - sum(right)
    rows = [
        ["crawl", f"{len(crawled)} pages fetched",
         f"{percent(best)} of the first {n} are relevant; breadth first {percent(broad)}"],
        ["classify", f"{len(kept)} kept, {len(crawled) - len(kept)} dropped",
         f"{percent(sum(right) / len(kept))} of the kept are relevant; {lost} relevant dropped"],
        ["dedup", f"{len(removed)} removed, {len(unique)} left",
         _copies(kept, unique, truth)],
        ["rewrite", f"{sum(bool(r['rewritten']) for r in rewritten)} of {len(rewritten)} rewritten",
         _positions(run)],
        ["tokenize", f"{tokens:,} tokens",
         f"{size / tokens:.2f} bytes per token, {len(rewritten)} documents"],
    ]  # fmt: skip
    lines = [harvest("best first", crawled, truth), harvest("breadth first", breadth, truth)]
    chart = line_chart(lines, "Harvest", "pages fetched", "relevant share", y_range=(0, 1))
    table = page.table(["stage", "what it did", "result"], rows)
    return rows, [table, page.figure(chart, "Relevance is the ground truth of the generator.")]


def _copies(kept: Sequence[dict], unique: Sequence[dict], truth: dict[str, Any]) -> str:
    """Compares the planted copies with what is left of each page and its copies."""
    originals = {path: row["duplicate_of"] for path, row in truth.items() if row["duplicate_of"]}
    paths = (map(path_of, rows) for rows in (kept, unique))
    before, after = (Counter(originals.get(path, path) for path in group) for group in paths)
    planted = sum(n - 1 for n in before.values())
    missed = sum(n - 1 for n in after.values() if n > 1)
    lost = sum(1 for page in before if page not in after)
    return f"{planted} planted copies; {missed} not removed; {lost} pages lost with all copies"


def _positions(run: Run) -> str:
    counters = run.stats("rewrite.json")["counters"]
    conclusions = {when: counters.get(f"conclusions[{when}]", 0) for when in ("before", "after")}
    share = {w: counters.get(f"position[{w}]", 0) / n if n else 0 for w, n in conclusions.items()}
    return (f"{percent(share['before'])} of the reasoning stood before its conclusion, "
            f"now {percent(share['after'])} ({conclusions['after']:,.0f} conclusions)")  # fmt: skip


def training_part(run: Run) -> list[str]:
    """Loss and reward curves."""
    both = (("", "rewritten"), ("-plain", "not rewritten"))
    loss = [run.curve(f"base{suffix}", "loss", label) for suffix, label in both]
    tuned = [run.curve(f"sft{suffix}", "loss", label) for suffix, label in both]
    reward = [run.curve("grpo", "reward", "reward")]
    return [
        page.figure(line_chart(loss, "Pretraining", "step", "loss")),
        page.figure(line_chart(tuned, "Fine-tuning on sums (sft)", "step", "loss")),
        page.figure(line_chart(reward, "Reinforcement (grpo)", "step", "mean reward")),
    ]


def accuracy_part(run: Run, scores: Summary) -> tuple[list[list[Any]], list[str]]:
    """Accuracy after every stage with intervals, and the models' sizes."""
    places = {"base": "base/final", "sft-plain": "sft-plain/final", "sft": "sft/final",
              "grpo": "grpo/final", "w8": "grpo-w8", "mixed": "grpo-mixed"}  # fmt: skip
    rows, groups = [], []
    for model, label in STAGES:
        cells, bars = [], []
        for task in scores.tasks:
            result = scores.result(model, task)
            if result is None:
                continue
            i = result.interval
            cells.append(f"{percent(i.value)} ({percent(i.low)} – {percent(i.high)})")
            bars.append(Bar(task, i.value, i.low, i.high))
        groups.append(BarGroup(label, bars))
        rows.append([label, *cells, f"{run.size_bytes(places[model]) / 1e6:.2f} MB"])
    items = max(result.items for result in scores.results)
    names = ["model", *(f"{task} (95 % interval)" for task in scores.tasks), "weights"]
    chart = bar_chart(groups, "Accuracy by stage", "share right", x_range=(0, 1))
    under = (
        f"{items:,} held-out sums, sampled once at temperature 1; 600 of them greedy and by choice."
    )
    return rows, [page.table(names, rows, under), page.figure(chart)]


def compared(scores: Summary, a: str, b: str, task: str = "sums") -> Comparison:
    """The paired comparison of two models."""
    return next(c for c in scores.comparisons if (c.task, c.model_a, c.model_b) == (task, a, b))


def claims_part(scores: Summary, corrupt: float) -> list[str]:
    """The differences between stages, in sentences with their figures."""
    claims = [f"{percent(corrupt)} of the sft demonstrations had one digit of the answer replaced "
            "at random, so that imitation alone does not reach full accuracy."]  # fmt: skip
    rewrite = ("sft-plain", "sft", "pretraining on rewritten text against the same tokens not"
               " rewritten, both followed by the same sft")  # fmt: skip
    pairs = (("sums", "sft", "grpo", "grpo against sft"),
             ("sums", "grpo", "w8", "8 bits against 32"),
             ("sums", "grpo", "mixed", "8 and 4 bits against 32"),
             ("sums", *rewrite), ("greedy", *rewrite))  # fmt: skip
    for task, a, b, words in pairs:
        pair = compared(scores, a, b, task).paired
        d = pair.difference
        claims.append(f"{task}, {words}: {100 * d.value:+.1f} points ({100 * d.low:+.1f} to "
                      f"{100 * d.high:+.1f}; p = {pair.p_value:.2g}, {pair.test}).")  # fmt: skip
    claims.append(
        "The last two lines measure the claim of the article that sabia follows, at toy size and on"
        " one seed."
    )
    return claims


def times_part(run: Run, seconds: float) -> tuple[list[list[str]], list[str]]:
    """The time of each step; the other core ran the branch without the rewrite at the same time."""
    rows = run.times()
    main = [[name, f"{s:.1f} s"] for name, s, branch in rows if branch == "main"]
    other = [[f"{name} (in parallel)", f"{s:.1f} s"] for name, s, b in rows if b != "main"]
    table = [*main, *other, ["in all", f"{seconds:.0f} s"]]
    return table, [page.table(["step", "time"], table)]


NEXT = """bash examples/own_data.sh DIR            your WARC, HTML, text and JSONL files
sabia crawl seeds.txt --contact you@lab.org --focus topic.txt -o pages/
sabia pretrain tokens/ --model base/ --tokens 10B -o run/     continue from an open checkpoint
sabia plan-cluster --params 1.6T --active 49B                 what a large model would cost"""


def main() -> None:
    """Write the report and print the main figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--corrupt", type=float, required=True, help="share of wrong answers")
    parser.add_argument("--seconds", type=float, required=True, help="of the whole run")
    given = parser.parse_args()
    run = Run(given.folder)
    scores = run.summary()
    data_rows, data = data_part(run)
    accuracy_rows, accuracy = accuracy_part(run, scores)
    time_rows, times = times_part(run, given.seconds)
    claims = claims_part(scores, given.corrupt)
    plan = (run.folder / "plan.txt").read_text()
    parts = [
        page.paragraph("A small web site was crawled and cleaned, and its text used for training."),
        page.section("Data", data),
        page.section("Training", training_part(run)),
        page.section("Accuracy", [*accuracy, *map(page.paragraph, claims)]),
        page.section("Time", times),
        page.section("A plan for a large model", [page.preformatted(plan)]),
        page.section("Next: your own data", [page.preformatted(NEXT)]),
    ]
    (run.folder / "report.html").write_text(page.page("sabia: the quickstart's report", parts))
    for rows in (data_rows, accuracy_rows):
        print("\n" + aligned(rows))
    print("\n" + "\n".join(claims) + "\n\n" + aligned(time_rows))
    print(f"\nthe whole report: {(run.folder / 'report.html').resolve()}\n\nnext:\n{NEXT}")


if __name__ == "__main__":
    main()
