"""Options of `sabia crawl`."""

from sabia.core.errors import UsageError
from sabia.core.options.option import (
    changed,
    choice,
    integer,
    needs,
    quantity,
    switch,
    text,
    unless,
)
from sabia.core.options.shared import InputOptions, RowOptions, Workers
from sabia.core.options.table import Options

STEERED = needs("focus", "classifier")


class Focus(Options, group="Steering"):
    """What counts as a relevant page."""

    focus: str = text(
        "Words, or a file of example texts, that wanted pages resemble", "TEXT",
        common=True, excludes=("classifier",),
    )  # fmt: skip
    """Either words or the path of a file with an example text on each line. The score of a page is
    the share of the words that it holds, or its similarity to the nearest example, in units of the
    similarity of the examples to each other."""
    classifier: str = text("fastText model that scores pages", "FILE", common=True)
    """Such as `sabia classify train` writes. The score of a page is the model's probability of
    `--label`."""
    label: str = text(
        "The classifier's label of wanted pages", "NAME", default="keep", only=needs("classifier")
    )
    threshold: float = quantity("share", "Score from which a page is relevant", "50%", only=STEERED)


class FrontierOptions(Options, group="Crawl"):
    """Which URLs are fetched."""

    budget: int = quantity("whole", "Maximum number of pages to fetch", "10k", common=True)
    """Redirects, refused pages and robots.txt do not count. A crawl that is run again with a larger
    budget goes on from its state."""
    stay: bool = switch("Stay on the hosts of the seeds", common=True)
    depth: int = integer("Maximum number of links from a seed", 50, least=0)
    host_pages: int = quantity("whole", "Maximum number of pages of a host", "50k")
    query_pages: int = quantity(
        "whole", "Maximum number of pages per URL that differ only in query values", "2k"
    )
    """Numbers in the path are not told apart either."""
    sitemaps: str = text("Also take URLs from sitemaps: robots, or their URLs", "WHICH,…")
    """`robots` stands for the sitemaps that robots.txt names, any other value is the URL of one. A
    sitemap lists URLs of its own host only, and of the host whose robots.txt names it."""
    state: str = text("Directory of the crawl's state", "DIR", unset="OUT.crawl", recorded=False)
    """Holds the frontier, and the documents until they are written. With rows on standard output
    and without this option, the state is deleted at the end."""
    replay: str = text("Crawl these WARC files instead of the network", "PATH,…")
    """WARC files, or directories of them, stand for the network: seeds, robots.txt, focus, limits
    and budget are the same, without pauses. A URL that is not in them is HTTP 404. So a policy is
    tried again without fetching anything; with `-j 1` the order of pages is always the same."""
    hard: bool = switch("Follow links of relevant pages only", group="Steering", only=STEERED)
    """Without it, links of a page that is not relevant inherit the mean of the page's score and of
    the score that led to it, decayed. Links of the seeds are always followed."""
    order: str = choice(
        "Which URLs to fetch first", "best", "breadth", default="", group="Steering",
        unset="best with --focus or --classifier, else breadth",
    )  # fmt: skip
    report: str = text(
        "Write an HTML report of the steering", "FILE.html", group="Steering", only=STEERED,
        recorded=False,
    )  # fmt: skip
    """The share of relevant pages among the first N, beside that of a breadth-first crawl of the
    same archive. For a crawl of the network that archive is its own `--warc`, in which
    breadth-first finds only what was fetched."""


class Requests(Options, group="Requests"):
    """How the network is asked."""

    contact: str = text(
        "E-mail address or URL for site owners; needed to fetch", "WHO", common=True,
        recorded=False,
    )  # fmt: skip
    """Sent with each request as part of the user agent."""
    allow_private: bool = switch("Also fetch from private addresses, on any port")
    """Private and loopback addresses. Link-local addresses, where clouds keep credentials, stay
    refused."""
    delay: float = quantity(
        "duration", "Minimum delay between requests to a host", "1s", recorded=False
    )
    """A longer `Crawl-delay` in robots.txt takes precedence, up to a minute."""
    per_host: int = integer("Requests in flight per host", 1, least=1, recorded=False)
    concurrency: int = integer("Requests in flight in total", 32, least=1, recorded=False)
    timeout: float = quantity("duration", "Time limit of a request", "60s", recorded=False)
    attempts: int = integer("Attempts at a request that fails", 3, least=1, recorded=False)
    backoff: float = quantity(
        "duration", "First pause before another attempt; then it doubles", "1s", recorded=False
    )
    revisit: float | None = quantity(
        "duration", "Refetch pages older than this, with conditional requests", recorded=False
    )
    """Pages fetched longer ago, such as `7d`, are asked for with their ETag and Last-Modified, and
    URLs whose failure may have passed are tried again."""


class ArchiveOptions(Options, group="Archive"):
    """What is kept of the answers."""

    warc: str = text("Also write what was fetched as WARC files", "DIR", recorded=False)
    """The files are `DIR/pages-00000.warc.gz` and so on: WARC 1.1 with response (or revisit),
    request and metadata records, each a gzip member of its own. Payloads are stored unpacked; the
    headers that described the packing are kept as `X-Crawl-…`."""
    warc_size: int = quantity(
        "size", "Start a new WARC file at this size", "1GB", only=needs("warc"), recorded=False
    )
    no_extract: bool = switch(
        "Only fetch and archive; extract later with `sabia crawl WARC`",
        only=(needs("warc"), unless("focus", "classifier")), excludes=("out",),
    )  # fmt: skip
    """Links are followed, but no text is extracted and no document written. The state is in
    `DIR.crawl` beside the WARC files."""


class Network(
    FrontierOptions,
    Requests,
    ArchiveOptions,
    only={Requests: unless("replay"), ArchiveOptions: unless("replay")},
):
    """Options of a crawl from seed URLs, which have no meaning where INPUT is files of pages."""


class CrawlOptions(RowOptions, Focus, Network, group="Crawl"):
    """Options of `sabia crawl`."""

    inputs: tuple[str, ...] = changed(
        InputOptions.inputs, help="Seed URLs, or files and folders of pages; none or - reads stdin"
    )
    """Seed URLs are given directly, or one a line in a text file or on standard input. WARC, HTML,
    text, JSON Lines and Parquet files, and folders of these, are read instead of the network."""
    jobs: int = changed(Workers.jobs, help="Processes that extract text")
    exclude: str = text("Paths in a folder to leave unread", "GLOB,…", group="Input and output")
    """Paths are relative to the folder that is given: `eval` is its folder `eval`, `*/eval` any
    such folder below it."""
    max_bytes: int = quantity("size", "Maximum size of a page or file", "8MB")

    def complete(self) -> None:
        """Where pages are scored, the most promising URLs come first."""
        self.order = self.order or ("best" if self.focus or self.classifier else "breadth")

    def check(self) -> None:
        """Best-first needs a score of pages."""
        super().check()
        if self.order == "best" and not (self.focus or self.classifier):
            raise UsageError("--order: best only with --focus or --classifier")


def parts(text: str) -> tuple[str, ...]:
    """The values of a list such as 'robots,https://example.org/sitemap.xml'."""
    return tuple(filter(None, text.split(",")))
