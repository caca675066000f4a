"""`sabia crawl` from a Job and options to documents: from the network, or from files.

The crawl's state is a folder beside the output (`OUT.crawl`, or `--state`): the frontier with the
documents so far. When the budget is spent or no URL is left, all documents are written to the
output; a repeated run with a larger budget resumes from the same state.

The report on the harvest rate (share of relevant pages among the first n) compares the crawl's
curve with that of a breadth-first crawl with the same judge, the same seeds and as many pages. That
crawl runs over the archive: the one given by `--replay`, or else the crawl's own WARC files, which
hold only pages that the focused crawl has fetched.
"""

import asyncio
import contextlib
import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from sabia.core import notes, page, svg
from sabia.core.errors import Failed, UsageError
from sabia.core.notes import progress
from sabia.core.options.crawl import CrawlOptions, Network, comma_separated
from sabia.core.shards import layout, manifest
from sabia.core.shards.atomic import scratch_directory, write_atomic
from sabia.core.shards.dry_run import planned
from sabia.core.shards.job import Job
from sabia.core.shards.records import to_batch
from sabia.core.shards.rejects import Rejects, reject_path
from sabia.core.shards.schemas import document as document_schema
from sabia.core.shards.summary import Summary
from sabia.core.web.archives.archive_fetcher import ArchiveFetcher
from sabia.core.web.archives.stored_pages import read_stored_pages
from sabia.core.web.archives.warc_writer import Archive, Position
from sabia.core.web.crawl_inputs import Inputs, open_crawl_inputs
from sabia.core.web.crawler import TRANSIENT, Crawl
from sabia.core.web.documents import ARCHIVED, FOCUS
from sabia.core.web.expand import EXPLORATION
from sabia.core.web.fetch import user_agent
from sabia.core.web.focus import PageJudge, make_judge
from sabia.core.web.frontier import Frontier
from sabia.core.web.url_rules import host_of

PART_DOCUMENTS = 50_000
_BATCH = 500  # documents; a multiple of it makes a part
NEXT = "sabia classify"
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


def run(job: Job, options: CrawlOptions) -> Summary:
    """Crawl from seeds, or read the files given; writes documents to the job's output."""
    inputs = open_crawl_inputs(job, options.max_bytes, comma_separated(options.exclude))
    _check(job, options, files=bool(inputs.sources))
    if inputs.sources:
        return read_stored_pages(job, inputs.sources, options)
    if job.dry_run:
        figures = {"seeds": len(inputs.seeds), "pages": f"up to {options.budget:,}"}
        unknown = "nothing: the time and size of a crawl are not known in advance"
        planned(job, figures=figures, basis=unknown).show(job)
        return Summary()
    return _crawl(job, options, inputs)


def _check(job: Job, options: CrawlOptions, files: bool) -> None:
    """Refuse options that do not apply to this kind of INPUT: files of pages, or seed URLs."""
    names = Network.table if files else ("exclude", "append")
    if odd := next((name for name in names if name in options.given), None):
        kind = "seed URLs" if files else "files of pages"
        raise UsageError(f"{options.table[odd].flag}: only with {kind} as INPUT")
    if files:
        return
    if job.shard:
        raise UsageError(
            "a crawl of the network has one frontier and cannot run in slices; run it as one job"
        )
    if not options.contact and not options.replay:
        raise UsageError(
            "--contact is missing (expected an e-mail address or URL, which site owners can see)"
        )


def _crawl(job: Job, options: CrawlOptions, inputs: Inputs) -> Summary:
    started = time.monotonic()
    judge, web = make_judge(options), None
    if options.replay:
        options, web = offline(options, comma_separated(options.replay))
    hosts = frozenset(host_of(url) for url in inputs.seeds) if options.stay else None
    with _state(job, options) as folder, contextlib.closing(Frontier(folder)) as frontier:
        frontier.belongs_to(_identity(options, inputs))
        _begin_round(frontier, options)
        bar_of_pages = progress(options.budget, "crawl", "pages")
        with _archive(options, frontier) as kept, bar_of_pages as bar:
            crawl = Crawl(options, frontier, judge, hosts, kept, bar, web)
            bar.advance(crawl.fetched - crawl.before)
            crawl.add_seeds(inputs.seeds)
            asyncio.run(crawl.run())
        frontier.set_fact("round", "closed")
        about = manifest.provenance(job, "reject", [str(frontier.fact("identity"))])
        about["out"] = manifest.named_output(job)
        with Rejects(reject_path(job), about) as rejects:
            for line in inputs.bad_seeds:
                rejects.add({"url": line}, "not an http(s) URL", "seeds")
            for url, host, reason in frontier.refusals():
                rejects.add({"url": url}, reason, host)
        if not crawl.fetched:  # clear the state, so that the next run tries the URLs again
            url, _host, reason = next(frontier.refusals(), ("", "", "no URL was left to try"))
            frontier.forget()
            rejected = f"{rejects.count} rejected → {rejects.path}"
            raise Failed(f"no page was fetched; {url}: {reason} ({rejected})")
        summary = _summary(frontier, crawl.counters, rejects)
        if not options.no_extract:
            archived = ARCHIVED if options.warc or options.replay else ()
            _write(job, frontier, (FOCUS,) if judge else (), archived)
        following = _next(frontier, options, crawl.left)
        scores = frontier.scores()
    if judge:
        report_curve(scores, options.threshold)
        if options.report:
            write_report(options, inputs.seeds, hosts, judge, scores, web)
        summary.counters["harvest_rate"] = round(crawl.harvest(), 4)
    summary.seconds = time.monotonic() - started
    summary.report(job, following)
    return summary


def _begin_round(frontier: Frontier, options: CrawlOptions) -> None:
    """With `--revisit`, make old pages pending again; an interrupted round is resumed instead."""
    counters = json.loads(frontier.fact("counters") or "{}")
    if options.revisit is not None and frontier.fact("round") == "closed":
        again = frontier.revisit(time.time() - options.revisit, TRANSIENT)
        frontier.set_fact("before", str(int(counters.get("fetched", 0))))
        notes.note(f"{again:,} URLs will be requested again")
    frontier.set_fact("round", "open")


def _next(frontier: Frontier, options: CrawlOptions, left: int) -> str:
    """The next steps, in one line."""
    steps = [f"sabia crawl {options.warc} -o pages/" if options.no_extract else NEXT]
    waiting, transient = frontier.waiting(), frontier.given_up(TRANSIENT)
    if waiting:
        what = "a larger --budget" if left <= 0 else "a larger --host-pages"
        steps.append(f"{what} for the {waiting:,} pending URLs")
    if transient:
        steps.append(f"--revisit AGE to retry {transient:,} URLs that failed")
    return "; or ".join(steps)


@contextlib.contextmanager
def _state(job: Job, options: CrawlOptions) -> Iterator[Path]:
    """The frontier's path: `--state`, beside the output, or for stdout a temporary folder."""
    beside = options.warc if options.no_extract else None if job.to_stdout else str(job.out)
    given = options.state or (beside and f"{beside.rstrip('/')}.crawl")
    if given is None:
        notes.note("with stdout the crawl cannot be resumed; --state DIR keeps its state")
        with scratch_directory("sabia-crawl") as scratch:
            yield scratch / "frontier.sqlite"
        return
    if "://" in given:
        raise UsageError(f"{given}: the state must be a local folder; give --state DIR")
    if job.force:
        shutil.rmtree(given, ignore_errors=True)
    yield Path(given) / "frontier.sqlite"


def _archive(
    options: CrawlOptions, frontier: Frontier
) -> contextlib.AbstractContextManager[Archive | None]:
    if not options.warc:
        return contextlib.nullcontext()
    position = Position.parse(frontier.fact("warc"))
    file = Archive(options.warc, position, user_agent(options), options.warc_size)
    return contextlib.closing(file)


def _identity(options: CrawlOptions, inputs: Inputs) -> dict[str, object]:
    """The settings that identify a crawl; budget and delays may change when it is resumed. The keys
    must not change, because they are stored in existing states; new ones only with new options."""
    steering = {"words": options.focus, "classifier": options.classifier, "label": options.label,
                "threshold": options.threshold, "hard": options.hard, "order": options.order,
                "exploration": EXPLORATION}  # fmt: skip
    seeds = hashlib.blake2b("\n".join(inputs.seeds).encode(), digest_size=16).hexdigest()
    later = {"markdown": True} if options.markdown else {}
    return {"seeds": seeds, "steering": steering, "seed": options.seed, "stay": options.stay,
            "warc": options.warc, "extract": not options.no_extract,
            "replay": comma_separated(options.replay), **later}  # fmt: skip


def _summary(frontier: Frontier, counters: dict[str, float], rejects: Rejects) -> Summary:
    summary = Summary(rows_in=int(counters.get("fetched", 0)), shards_done=1)
    summary.counters = {k: v for k, v in counters.items() if k not in ("fetched", "bytes")}
    summary.counters["megabytes"] = round(counters.get("bytes", 0) / 1e6, 3)
    summary.rejected, summary.reject_path = rejects.count, rejects.path
    summary.rows_out = frontier.document_count()
    return summary


def _write(
    job: Job, frontier: Frontier, names: tuple[str, ...], extras: Sequence[pa.Field]
) -> None:
    """All documents, with scores of these names and further columns; a directory gets parts of
    PART_DOCUMENTS."""
    layout.adopt(job)
    rows, schema = map(_row, frontier.documents()), pa.schema([*document_schema(names), *extras])
    count = frontier.document_count()
    parts = -(-count // PART_DOCUMENTS) if job.to_directory else 1
    inputs = [str(frontier.fact("identity")), str(count)]
    made = manifest.provenance(job, "document", inputs, schema=schema)
    groups = (list(islice(rows, _BATCH)) for _ in range(0, count, _BATCH))
    batches = (to_batch(group, "document", extras, names) for group in groups)
    manifest.write_parts(job, schema, made, batches, parts, PART_DOCUMENTS)


def _row(kept: dict[str, Any]) -> dict[str, object]:
    """A stored document with the types of Arrow."""
    scores = [tuple(pair) for pair in kept["scores"]]
    return kept | {"scores": scores, "crawl_time": datetime.fromisoformat(kept["crawl_time"])}
