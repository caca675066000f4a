"""sabia crawl: pages from the web, from WARC files or from folders, as documents."""

from typing import Annotated

from sabia.cli.grammar import command, count, duration, fraction, option, size
from sabia.core.shards.job import Job


@command(
    "map",
    examples="""
sabia crawl seeds.txt --contact me@example.org --budget 10k -o pages/
sabia crawl seeds.txt --contact me@example.org --focus examples.txt -o pages/
sabia crawl seeds.txt --contact me@example.org --classifier quality.bin --warc warc/ -o pages/
sabia crawl seeds.txt --contact me@example.org --sitemaps robots --no-extract --warc warc/
sabia crawl seeds.txt --replay warc/ --focus examples.txt --budget 2k --report focus.html -o try/
sabia crawl archive.warc.gz my_folder/ | sabia classify -o kept/
""",
)
def crawl(
    job: Job,
    *,
    contact: Annotated[
        str, option("E-mail address or URL that site owners see; needed to fetch.", metavar="WHO")
    ] = "",
    budget: Annotated[float, count("Pages to fetch at most.")] = "10k",  # type: ignore[assignment]
    focus: Annotated[
        str,
        option("Words, or a file of example texts, that wanted pages resemble.", metavar="TEXT"),
    ] = "",
    classifier: Annotated[
        str, option("A fastText model that scores pages instead.", metavar="FILE")
    ] = "",
    label: Annotated[
        str, option("The classifier's label of wanted pages.", metavar="NAME")
    ] = "keep",
    threshold: Annotated[float, fraction("Score from which a page is relevant.")] = "50%",  # type: ignore[assignment]
    hard: Annotated[
        bool, option("Follow links of relevant pages only (soft focus: decayed).", "--hard")
    ] = False,
    order: Annotated[
        str | None,
        option("best or breadth first (default: best with a focus).", metavar="ORDER"),
    ] = None,
    stay: Annotated[bool, option("Stay on the seeds' hosts.", "--stay")] = False,
    delay: Annotated[
        float, duration("Rest of a host between requests; a longer Crawl-delay wins.")
    ] = "1s",  # type: ignore[assignment]
    per_host: Annotated[int, option("Requests in flight a host.", min=1)] = 1,
    concurrency: Annotated[int, option("Requests in flight in all.", min=1)] = 32,
    host_pages: Annotated[float, count("Pages of one host at most.")] = "50k",  # type: ignore[assignment]
    query_pages: Annotated[
        float, count("Pages at most that differ in the values of parameters only.")
    ] = "2k",  # type: ignore[assignment]
    depth: Annotated[int, option("Links from a seed at most.", min=0)] = 50,
    max_bytes: Annotated[int, size("Larger pages are refused.")] = "8MB",  # type: ignore[assignment]
    timeout: Annotated[float, duration("Time for one request.")] = "60s",  # type: ignore[assignment]
    attempts: Annotated[int, option("Tries of a request that fails.", min=1)] = 3,
    backoff: Annotated[float, duration("First pause before another try, then doubled.")] = "1s",  # type: ignore[assignment]
    allow_private: Annotated[
        bool, option("Also fetch from private and loopback addresses, any port.", "--allow-private")
    ] = False,
    sitemaps: Annotated[
        str,
        option("Also take URLs from sitemaps: robots (those it names) or URLs.", metavar="WHICH,…"),
    ] = "",
    revisit: Annotated[
        float | None, duration("Ask again, on conditions, for what was fetched so long ago.")
    ] = None,
    replay: Annotated[
        str, option("Crawl these WARC files instead of the network.", metavar="PATH,…")
    ] = "",
    report: Annotated[
        str, option("Where the HTML report of a focus goes.", metavar="FILE.html")
    ] = "",
    warc: Annotated[str, option("Keep what was fetched as WARC.", metavar="DIR")] = "",
    warc_size: Annotated[int, size("Begin a new WARC file at this size.")] = "1GB",  # type: ignore[assignment]
    no_extract: Annotated[
        bool, option("Only fetch and archive; documents can be had later.", "--no-extract")
    ] = False,
    state: Annotated[
        str, option("Where the frontier is kept (default: OUT.crawl).", metavar="DIR")
    ] = "",
    exclude: Annotated[str, option("Leave these paths in a folder unread.", metavar="GLOB,…")] = "",
) -> None:
    """Fetch pages from seed URLs, led by a classifier; or read WARC files and folders.

    INPUT is seed URLs (one a line on stdin or in a text file, or given directly), or WARC, HTML,
    text, JSONL and Parquet files and folders of these, which are read instead of the network.
    robots.txt is obeyed, each host is asked slowly, private addresses are refused. A crawl that
    was stopped or killed goes on when it is run again.
    """
    from importlib.metadata import version

    from sabia.core.errors import UsageError
    from sabia.core.web import run as room
    from sabia.core.web import settings as given
    from sabia.core.web.urls import Limits

    if order not in (None, "best", "breadth"):
        raise UsageError(f"--order: {order!r} (expected best or breadth)")
    steering = given.FocusSettings(
        words=focus, classifier=classifier, label=label, threshold=threshold, hard=hard,
        order=order or ("best" if focus or classifier else "breadth"),
    )  # fmt: skip
    agent = given.user_agent(contact, version("sabia")) if contact else "sabia"
    fetching = given.FetchSettings(
        agent=agent, allow_private=allow_private, max_bytes=max_bytes, timeout_s=timeout,
        attempts=attempts, backoff_s=backoff,
    )  # fmt: skip
    settings = given.CrawlSettings(
        budget=int(budget), delay_s=delay, per_host=per_host, concurrency=concurrency,
        host_pages=int(host_pages), workers=job.jobs, seed=job.seed, warc=warc, state=state,
        warc_bytes=warc_size, extract=not no_extract, revisit_s=revisit,
        replay=tuple(filter(None, replay.split(","))), report=report,
        sitemaps=tuple(filter(None, sitemaps.split(","))),
        exclude=tuple(filter(None, exclude.split(","))), fetch=fetching, focus=steering,
        limits=Limits(depth=depth, queries=int(query_pages)),
    )  # fmt: skip
    room.run(job, settings, stay)
