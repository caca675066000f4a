"""The report of own_data.sh: files, pages kept and dropped, bytes per token, losses, evaluation.

    python examples/own_data_report.py WORK DIR --seconds S [--markdown]

Everything is computed from the files that the commands left in WORK, and the names of those in DIR.
Writes report.html; tables also go to stdout, as text or as Markdown.
"""

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run_folder import RunFolder, aligned, markdown, percent

from sabia.core import page
from sabia.core.bench.report import value_text
from sabia.core.bench.score_rows import Score
from sabia.core.bench.task import METRICS_OF
from sabia.core.svg import line_chart
from sabia.core.web.archives.warc_reader import ENDINGS as WARC_ENDINGS
from sabia.core.web.crawl_inputs import HTML_ENDINGS, RECORD_ENDINGS, TEXT_ENDINGS

PACKED = (".gz", ".zst")
READ = (*WARC_ENDINGS, *HTML_ENDINGS, *TEXT_ENDINGS, *RECORD_ENDINGS)


@dataclass(frozen=True)
class Table:
    """A titled table, for the page, the terminal and Markdown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def html(self) -> str:
        """A section of the page."""
        return page.section(self.title, [page.table(self.columns, self.rows, self.note)])

    def text(self) -> str:
        """Aligned text."""
        note = f"\n({self.note})" if self.note else ""
        return f"{self.title}\n{aligned([self.columns, *self.rows])}{note}"

    def markdown(self) -> str:
        """A Markdown table under its title."""
        note = f"\n\n{self.note}" if self.note else ""
        return f"**{self.title}**\n\n{markdown(self.columns, self.rows)}{note}"


def ending(name: str) -> str:
    """The ending of a file name, with that of its compression; '(none)' without one."""
    path = Path(name.lower())
    if path.suffix in PACKED:
        return Path(path.stem).suffix + path.suffix
    return path.suffix or "(none)"


def files_table(data: Path) -> Table:
    """How many files of each kind were read and ignored; the folder `eval` is not counted."""
    read, left = Counter[str](), Counter[str]()
    for parent, folders, names in os.walk(data):
        if Path(parent) == data and "eval" in folders:
            folders.remove("eval")
        for name in names:
            if not name.startswith("."):
                known = name.lower().removesuffix(".gz").removesuffix(".zst").endswith(READ)
                (read if known else left)[ending(name)] += 1
    rows = [["read", *_count_and_names(read)], ["ignored", *_count_and_names(left)]]
    return Table("Files", ["", "files", "kinds"], rows)


def _count_and_names(counts: Counter[str]) -> list[Any]:
    return [sum(counts.values()), ", ".join(f"{n} {name}" for name, n in counts.most_common())]


def stages_table(run: RunFolder) -> Table:
    """The rows that each data stage read and wrote."""
    crawl, kept, unique = (run.stats(f"{n}.json") for n in ("crawl", "classify", "dedup"))
    split, tokens = run.stats("split.json"), run.stats("tokenize.json")
    twins = Counter(row["reason"] for row in run.rows("duplicates.parquet", ["reason"]))
    dropped = kept["rows_in"] - kept["rows_out"]
    changed = run.stats("rewrite.json")["counters"].get("rewritten", 0)
    count = language_sum(tokens, "tokens")
    held_out = split["held_out_characters"]
    share = held_out / (held_out + split["train_characters"])
    rows = [
        ["read", crawl["rows_in"], crawl["rows_out"], f"{crawl['rejected']} rejected"],
        ["classify", kept["rows_in"], kept["rows_out"],
         f"{dropped} dropped: quality under 0.5 or fewer than 50 words"],
        ["dedup", unique["rows_in"], unique["rows_out"],
         f"{twins['exact']} exact and {twins['near']} near duplicates"],
        ["rewrite", unique["rows_out"], unique["rows_out"], f"{changed:.0f} documents rewritten"],
        ["hold out", unique["rows_out"], split["train"],
         f"{split['held_out']} held out, and the ends of long ones: {percent(share)} of the text"],
        ["tokenize", tokens["rows_in"], f"{count:,.0f} tokens",
         f"{language_sum(tokens, 'bytes') / max(1, count):.2f} bytes per token"],
    ]  # fmt: skip
    return Table("Pages", ["stage", "in", "out", ""], rows)


def language_sum(stats: dict[str, Any], unit: str) -> float:
    """Bytes or tokens of all languages together, from the figures of `sabia tokenize`."""
    start = f"{unit}[language="
    return sum(value for name, value in stats["counters"].items() if name.startswith(start))


def rejects_table(run: RunFolder) -> Table:
    """What could not be read, and why; figures in the reasons are left out so that they group."""
    exists = (run.folder / "pages.rejects.parquet").exists()  # there is none without rejects
    rejected = run.rows("pages.rejects.parquet", ["reason"]) if exists else []
    reasons = Counter(re.sub(r"\d+", "N", row["reason"]) for row in rejected)
    rows = [[reason, n] for reason, n in reasons.most_common()] or [["nothing was rejected", 0]]
    return Table("Rejected", ["reason", "count"], rows)


def language_table(run: RunFolder) -> Table:
    """Documents, bytes and bytes per token of each language of the training text."""
    stats = run.stats("tokenize.json")
    documents = Counter(row["language"] for row in run.rows("train.parquet", ["language"]))
    rows = []
    for name, ratio in stats["bytes_per_token"]["language"].items():
        size = stats["counters"][f"bytes[language={name}]"]
        rows.append([name, documents[name], f"{size:,.0f}", f"{ratio:.2f}"])
    rows.sort(key=lambda row: -int(row[2].replace(",", "")))
    return Table("Languages", ["language", "documents", "bytes", "bytes per token"], rows)


def training_table(run: RunFolder) -> Table:
    """Loss on the held-out text before and after training, and the models' sizes."""
    metrics = run.lines("run/metrics.jsonl")
    checked = [row for row in metrics if "validation_loss" in row]
    before, after = checked[0], checked[-1]
    last = next(row for row in reversed(metrics) if "loss" in row)
    rows = [
        ["validation loss before", f"{before['validation_loss']:.3f} nats per token"],
        ["validation loss after", f"{after['validation_loss']:.3f} nats per token"],
        ["held-out tokens", f"{after['validation_tokens']:,}"],
        ["trained on", f"{last['tokens']:,} tokens in {last['step']} steps"],
        ["trained model", f"{run.size_bytes('run/final') / 1e6:.2f} MB"],
        ["quantized model", f"{run.size_bytes('small') / 1e6:.2f} MB"],
    ]
    return Table("Training", ["what", "value"], rows)


def guess_accuracy(scores: Sequence[Score]) -> dict[str, float]:
    """For each multiple-choice task, the accuracy of guessing: the mean of 1 / options."""
    shares: dict[str, list[float]] = {}
    for score in scores:
        if score.detail and "loglikelihoods" in score.detail:
            shares.setdefault(score.task, []).append(1 / len(score.detail["loglikelihoods"]))
    return {task: sum(values) / len(values) for task, values in shares.items()}


def evaluation_table(run: RunFolder, name: str = "scores.parquet") -> Table:
    """Results with their intervals; for multiple choice also the accuracy of guessing."""
    guess, summary = guess_accuracy(run.scores(name)), run.summary(name)
    rows = []
    for r in summary.results:
        if r.metric in METRICS_OF["perplexity"] and r.metric != summary.headlines[r.task]:
            continue  # the same likelihood in another unit; eval.html has them
        remark, line = "", guess.get(r.task)
        if line is not None:
            where = "at chance" if r.interval.low <= line <= r.interval.high else "not at chance"
            remark = f"{line:.3f}: {where}"
        unread = f"; {r.no_verdict} without verdict" if r.no_verdict else ""
        rows.append([r.task, r.model, r.metric, value_text(r), f"{r.items}{unread}", remark])
    columns = ["task", "model", "metric", "value [95 %]", "items", "guessing"]
    return Table("Evaluation", columns, rows)


def times_table(run: RunFolder, seconds: float) -> Table:
    """How long each step took in this call of the script."""
    rows = [[name, f"{s:.1f} s"] for name, s, _ in run.times()]
    return Table("Time", ["step", "time"], [*rows, ["in all", f"{seconds:.0f} s"]])


def tables(run: RunFolder, data: Path, seconds: float) -> list[Table]:
    """All tables of the report, in the order of the work."""
    return [files_table(data), stages_table(run), rejects_table(run), language_table(run),
            training_table(run), evaluation_table(run), times_table(run, seconds)]  # fmt: skip


def main() -> None:
    """Write the page and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--seconds", type=float, help="of the whole run (default: the last value)")
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")
    parser.add_argument("--scores", help="only the evaluation in this file of WORK, as Markdown")
    given = parser.parse_args()
    run = RunFolder(given.work)
    if given.scores:
        table = evaluation_table(run, given.scores)
        print(markdown(table.columns, table.rows))
        return
    seconds_file = given.work / "seconds.json"
    if given.seconds is not None:
        seconds_file.write_text(json.dumps(given.seconds))
    seconds = json.loads(seconds_file.read_text())
    made = tables(run, given.data, seconds)
    losses = [run.curve("run", "loss", "training"),
              run.curve("run", "validation_loss", "held-out text")]  # fmt: skip
    chart = page.figure(line_chart(losses, "Loss", "step", "nats per token"))
    parts = [*(table.html() for table in made), page.section("Loss", [chart])]
    (given.work / "report.html").write_text(page.page("sabia: your own data", parts))
    for table in made:
        print("\n" + (table.markdown() if given.markdown else table.text()))
    if not given.markdown:
        folder = given.work.resolve()
        print(f"\nthe report: {folder / 'report.html'}\nevery item: {folder / 'eval.html'}")


if __name__ == "__main__":
    main()
