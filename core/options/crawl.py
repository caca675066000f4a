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
from sabia.core.options.shared import Appending, InputOptions, Redo, RowOptions, Workers
from sabia.core.options.table import Options

SCORED = needs("focus", "classifier")


class Focus(Options, group="Relevance"):
    """Which pages are relevant."""

    focus: str = text("Score pages by similarity to these words or to a file of example texts",
                      "TEXT", common=True, excludes=("classifier",))  # fmt: skip
    """Either words, or the path of a file with one example text per line. With words, the score of
    a page is the fraction of the words that it contains. With examples, the score is the TF-IDF
    similarity to the nearest example, divided by the mean similarity of the examples to each
    other, at most 1. Links of pages with a high score are followed first."""
    classifier: str = text("Score pages by this fastText model", "FILE", common=True)
    """Such as `sabia classify train` writes. The score of a page is the probability that the model
    gives to `--label`."""
    label: str = text("Label of relevant pages in the --classifier model", "NAME", default="keep",
                      only=needs("classifier"))  # fmt: skip
    threshold: float = quantity("share", "Minimum score of a relevant page", "50%", only=SCORED)


class FrontierOptions(Options, group="Crawl"):
    """Which URLs are fetched."""

    budget: int = quantity("whole", "Maximum number of pages to fetch", "10k", common=True)
    """Redirects, refused pages and robots.txt are not counted. The same command with a larger
    budget continues the crawl."""
    stay: bool = switch("Fetch only from the hosts of the seed URLs", common=True)
    depth: int = integer("Maximum number of links between a seed and a page", 50, least=0)
    host_pages: int = quantity("whole", "Maximum number of pages per host", "50k")
    query_pages: int = quantity(
        "whole", "Maximum number of pages per URL that differ only in query values", "2k"
    )
    """URLs that differ only in numbers, hashes or months of the path are counted together too."""
    sitemaps: str = text(
        "Also fetch the URLs in sitemaps: those that robots.txt names (robots), or these URLs",
        "WHICH,…",
    )  # fmt: skip
    """`robots` means the sitemaps that the robots.txt of each host names; any other value is the
    URL of a sitemap. A sitemap may list URLs of its own host, and of the host whose robots.txt
    names it; other URLs are ignored."""
    state: str = text("Directory of the crawl state", "DIR", unset="OUT.crawl", recorded=False)
    """It contains the frontier (the URLs to fetch), and the documents until they are written. If
    rows go to standard output and this option is not given, the state is deleted at the end."""
    replay: str = text("Fetch from these WARC files instead of the network", "PATH,…")
    """WARC files, or directories of them. Seeds, robots.txt, relevance, limits and budget apply as
    in a crawl of the network, but without delays. A URL that is not in the files is answered with
    HTTP 404. Use it to test crawl settings without network access; with `-j 1` the order of the
    pages is always the same."""
    hard: bool = switch("Follow links of relevant pages only", group="Relevance", only=SCORED)
    """Without it, links of a page that is not relevant are followed later: they get the mean of the
    page's score and 0.7 times the score that the page itself inherited. Links of the seeds are
    always followed."""
    order: str = choice("Fetch order: the most promising URL first, or breadth-first", "best",
                        "breadth", default="", group="Relevance",
                        unset="best with --focus or --classifier, else breadth")  # fmt: skip
    report: str = text("Write an HTML report of the harvest rate (fraction of relevant pages)",
                       "FILE.html", group="Relevance", only=SCORED, recorded=False)  # fmt: skip
    """It shows the fraction of relevant pages among the first N pages, compared with a
    breadth-first crawl of the same archive. For a crawl of the network that archive is `--warc`,
    so breadth-first can fetch only the pages that this crawl fetched."""


class Requests(Options, group="Requests"):
    """How requests are sent."""

    contact: str = text("Your e-mail address or URL, sent to site owners; required for the network",
                        "WHO", common=True, recorded=False)  # fmt: skip
    """It is part of the user agent of each request."""
    allow_private: bool = switch("Also fetch from private and loopback addresses, on any port")
    """Link-local addresses, where cloud providers serve credentials, are always refused."""
    delay: float = quantity("duration", "Minimum delay between requests to a host", "1s",
                            recorded=False)  # fmt: skip
    """A longer `Crawl-delay` in robots.txt takes precedence, up to one minute."""
    per_host: int = integer("Maximum number of concurrent requests per host", 1, least=1,
                            recorded=False)  # fmt: skip
    concurrency: int = integer("Maximum number of concurrent requests in total", 32, least=1,
                               recorded=False)  # fmt: skip
    timeout: float = quantity("duration", "Time limit of a request", "60s", recorded=False)
    attempts: int = integer("Maximum number of attempts per request", 3, least=1, recorded=False)
    backoff: float = quantity("duration",
                              "Delay before the second attempt; doubled for each further attempt",
                              "1s", recorded=False)  # fmt: skip
    revisit: float | None = quantity(
        "duration", "Refetch pages older than this, such as 7d, with conditional requests",
        recorded=False,
    )  # fmt: skip
    """Needs the state of a completed crawl. A page is requested with its ETag and
    Last-Modified, so an unchanged page is not sent again. URLs that failed with a temporary error
    are also tried again."""


class ArchiveOptions(Options, group="Archive"):
    """How responses are archived."""

    warc: str = text("Also write responses to WARC files in this directory", "DIR", recorded=False)
    """The files are `DIR/pages-00000.warc.gz` and so on: WARC 1.1 with response (or revisit),
    request and metadata records, each in its own gzip member. Response bodies are stored
    decompressed; the original headers that described the compression are renamed to
    `X-Crawl-…`."""
    warc_size: int = quantity("size", "Size at which a new WARC file is started", "1GB",
                              only=needs("warc"), recorded=False)  # fmt: skip
    no_extract: bool = switch("Only fetch and archive; extract later with `sabia crawl WARC`",
                              only=(needs("warc"), unless("focus", "classifier")),
                              excludes=("out",))  # fmt: skip
    """Links are followed, but no text is extracted and no documents are written. The crawl state
    is in `DIR.crawl` next to the directory of `--warc`."""


class Network(
    FrontierOptions,
    Requests,
    ArchiveOptions,
    only={Requests: unless("replay"), ArchiveOptions: unless("replay")},
):
    """Options of a crawl from seed URLs; they are refused if INPUT is files of pages."""


class CrawlOptions(RowOptions, Appending, Focus, Network, group="Crawl"):
    """Options of `sabia crawl`."""

    inputs: tuple[str, ...] = changed(
        InputOptions.inputs,
        help="Seed URLs, or files and directories of pages; none or - reads stdin",
    )  # fmt: skip
    """Seed URLs are given on the command line, or one per line in a text file or on standard input.
    WARC, HTML, text, JSON Lines and Parquet files, and directories of these, are read instead of
    fetching from the network."""
    force: bool = changed(Redo.force, help="Delete the crawl state and start over")
    """For INPUT files: extract the text again."""
    jobs: int = changed(Workers.jobs, help="Number of processes that extract text")
    exclude: str = text("Paths to skip in input directories, relative to the directory", "GLOB,…",
                        group="Input and output")  # fmt: skip
    """`eval` skips the subdirectory `eval`; `*/eval` skips each directory `eval` below the top
    level. Only for directories of pages, not for seed URLs."""
    markdown: bool = switch("Write the text of pages as Markdown", common=True, later=True,
                            only=unless("no_extract"))  # fmt: skip
    """The same parts of a page are chosen as without it. Headings, lists, block quotes, tables,
    code blocks, code spans, formulas (between dollar signs, in TeX), superscripts and subscripts
    are kept; targets of links, images, bold and italic type are not. Only the text of HTML pages
    changes."""
    max_bytes: int = quantity("size", "Maximum size of a page or file", "8MB")
    """Larger pages and files are rejected."""

    def complete(self) -> None:
        """If pages are scored, the most promising URLs are fetched first by default."""
        self.order = self.order or ("best" if self.focus or self.classifier else "breadth")

    def check(self) -> None:
        """Best-first order needs a score of pages."""
        super().check()
        if self.order == "best" and not (self.focus or self.classifier):
            raise UsageError("--order: best only with --focus or --classifier")


def comma_separated(text: str) -> tuple[str, ...]:
    """The values of a list such as 'robots,https://example.org/sitemap.xml'."""
    return tuple(filter(None, text.split(",")))
