"""What a crawl is told, as one frozen record; the command's options, with their defaults."""

from dataclasses import dataclass, field

from sabia.core.web.urls import Limits

MIME_TYPES = ("text/html", "application/xhtml+xml", "text/plain")


@dataclass(frozen=True)
class FetchSettings:
    """How one URL is asked for. Times in seconds, sizes in bytes."""

    agent: str = "sabia"
    allow_private: bool = False
    max_bytes: int = 8_000_000
    timeout_s: float = 60.0
    attempts: int = 3
    backoff_s: float = 1.0
    max_wait_s: float = 60.0  # a longer Retry-After is not waited out; the URL goes back instead
    mime_types: tuple[str, ...] = MIME_TYPES


@dataclass(frozen=True)
class FocusSettings:
    """What counts as relevant and how that steers the frontier."""

    words: str = ""  # words, or the path of a file of example texts
    classifier: str = ""  # path of a fastText model
    label: str = "keep"
    threshold: float = 0.5
    hard: bool = False
    order: str = "best"
    exploration: float = 0.05


@dataclass(frozen=True)
class CrawlSettings:
    """A crawl: budget in pages, politeness a host, and the parts above."""

    budget: int = 10_000
    delay_s: float = 1.0
    per_host: int = 1
    concurrency: int = 32
    host_pages: int = 50_000
    exclude: tuple[str, ...] = ()
    workers: int = 1
    seed: int = 0
    warc: str = ""
    warc_bytes: int = 1_000_000_000
    extract: bool = True
    sitemaps: tuple[str, ...] = ()  # "robots" for those that robots.txt names, or URLs
    replay: tuple[str, ...] = ()  # WARC files that stand for the network
    report: str = ""  # where the HTML report goes
    revisit_s: float | None = None  # what was fetched longer ago is asked for again
    state: str = ""
    fetch: FetchSettings = field(default_factory=FetchSettings)
    focus: FocusSettings = field(default_factory=FocusSettings)
    limits: Limits = field(default_factory=Limits)


def user_agent(contact: str, version: str) -> str:
    """`sabia/VERSION (+CONTACT)`: the product token first, then whom to write to."""
    link = contact if "://" in contact else f"mailto:{contact}"
    return f"sabia/{version} (+{link})"
