"""The harvest rate of a crawl (share of relevant pages among the first n), and its report.

The report compares the crawl's curve with that of a breadth-first crawl with the same judge, the
same seeds and as many pages. That crawl runs over the archive: the one given by `--replay`, or else
the crawl's own WARC files, which hold only pages that the focused crawl has fetched.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sabia.core import notes, page, svg
from sabia.core.notes import progress
from sabia.core.options.crawl import CrawlOptions
from sabia.core.shards.atomic import scratch_directory, write_atomic
from sabia.core.web.archives.archive_fetcher import ArchiveFetcher
from sabia.core.web.crawler import Crawl
from sabia.core.web.focus import PageJudge
from sabia.core.web.frontier import Frontier

POINTS = 200
REPORTED_COUNTS = (100, 1_000, 10_000, 100_000, 1_000_000)
BINS = 20


def curve(scores: Sequence[float], threshold: float) -> list[tuple[float, float]]:
    """(n, share of relevant pages among the first n) at about POINTS values of n and the last."""
    points, relevant = [], 0
    step = max(1, len(scores) // POINTS)
    for number, score in enumerate(scores, 1):
        relevant += score >= threshold
        if number % step == 0 or number == len(scores):
            points.append((float(number), relevant / number))
    return points


def report_curve(scores: Sequence[float], threshold: float) -> None:
    """Print the harvest rate of the first 100, 1,000, … pages and of all."""
    counts = [n for n in REPORTED_COUNTS if n < len(scores)] + [len(scores)]
    rates = [sum(s >= threshold for s in scores[:n]) / max(1, n) for n in counts]
    shares = ", ".join(f"{rate:.1%} of {n:,}" for n, rate in zip(counts, rates, strict=True))
    notes.note(f"harvest (relevant among the first pages): {shares}")


def offline(options: CrawlOptions, paths: Sequence[str]) -> tuple[CrawlOptions, ArchiveFetcher]:
    """The same crawl on WARC files: no delays, any address, as many requests in flight as workers.

    Raises what opening the files raises."""
    most = options.jobs
    options = options.replace(allow_private=True, delay=0.0, per_host=most, concurrency=most)
    return options, ArchiveFetcher(paths, options.max_bytes)


def write_report(
    options: CrawlOptions, seeds: Sequence[str], hosts: frozenset[str] | None, judge: PageJudge,
    scores: Sequence[float], web: ArchiveFetcher | None,
) -> None:  # fmt: skip
    """Write `--report`: the harvest compared with breadth-first, and the scores."""
    against = "breadth-first, same archive"
    if web is None and options.warc:
        options, web = offline(options, (options.warc,))
        against = "breadth-first, over the pages that this crawl fetched"
    breadth = _walk(options, seeds, hosts, judge, web, len(scores)) if web else []
    write_atomic(Path(options.report), _page(options.threshold, scores, breadth, against))
    notes.note(f"report: {options.report}")


def _walk(
    options: CrawlOptions, seeds: Sequence[str], hosts: frozenset[str] | None, judge: PageJudge,
    web: ArchiveFetcher, count: int,
) -> list[float]:  # fmt: skip
    """Scores of the first pages of a breadth-first crawl of an archive; in a temporary state."""
    options = options.replace(budget=max(1, count), order="breadth", hard=False)
    with (
        scratch_directory("sabia-crawl") as scratch,
        contextlib.closing(Frontier(scratch / "frontier.sqlite")) as frontier,
        progress(options.budget, "breadth-first", "pages") as bar,
    ):
        crawl = Crawl(options, frontier, judge, hosts, None, bar, web)
        crawl.add_seeds(seeds)
        asyncio.run(crawl.run())
        return frontier.scores()


def _page(threshold: float, scores: Sequence[float], breadth: Sequence[float], against: str) -> str:
    lines = [svg.Series("this crawl", curve(scores, threshold))]
    if breadth:
        lines.append(svg.Series(against, curve(breadth, threshold)))
    parts = [page.paragraph(_verdict(scores, breadth, threshold, against))]
    parts.append(page.figure(svg.line_chart(lines, "Harvest rate", "pages fetched", "relevant")))
    bins = Counter(min(BINS - 1, int(score * BINS)) for score in scores)
    counts = svg.Series("pages", [((n + 0.5) / BINS, float(bins[n])) for n in range(BINS)])
    parts.append(page.figure(svg.line_chart([counts], "Scores", "score", "pages")))
    if not breadth:
        hint = "With --warc DIR the pages are kept, and the report compares with breadth-first."
        parts.append(page.paragraph(hint, quiet=True))
    return page.page("Focused crawl", parts)


def _verdict(
    scores: Sequence[float], breadth: Sequence[float], threshold: float, against: str
) -> str:
    rate = sum(s >= threshold for s in scores) / max(1, len(scores))
    share = f"{rate:.1%} of {len(scores):,} pages score {threshold:g} or more"
    if not breadth:
        return share + "."
    other = sum(s >= threshold for s in breadth) / len(breadth)
    times = f", {rate / other:.2f} times as many" if other else ""
    return f"{share}; {against}: {other:.1%} of {len(breadth):,}{times}."
