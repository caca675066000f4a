"""A web with known answers: pages that are on a topic or not, links that half tell where they lead.

Made from a seed alone, for measuring how a crawl is steered. Hosts differ: few are about the topic
(60 % of their pages), some touch it (15 %), most do not (1 %). A page has one topic; the wanted one
has a neighbour that shares a third of its words, so that near misses exist. Every host has a home
and section pages, which are about nothing and list others: the way to a page leads through them.
Of the other links most stay on their host; pages on the topic link to such pages more often. Half
of the anchors hold words of the page behind them, a tenth of these words are misleading; of the
paths two fifths hold one. Nothing here knows how a crawler chooses.
"""

import gzip
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TOPICS = 14
WANTED, NEIGHBOUR = 0, 1
SHARE = {"about": 0.6, "touches": 0.15, "other": 0.01}
HOSTS = {"about": 0.08, "touches": 0.3, "other": 0.62}
GENERIC = ("read more", "next", "see also", "here", "more", "details", "link")
TO_WANTED = {"wanted": 0.35, "near": 0.12, "other": 0.04}


@dataclass
class Page:
    """kind: wanted, near or other (topics), or list (home and sections); links: (url, anchor)."""

    url: str
    host: int
    topic: int
    kind: str
    text: str = ""
    links: list[tuple[str, str]] = field(default_factory=list)

    @property
    def html(self) -> str:
        """The page as a browser gets it."""
        body = "".join(f"<p>{part}</p>" for part in self.text.split("\n"))
        links = "".join(f'<li><a href="{url}">{anchor}</a></li>' for url, anchor in self.links)
        title = " ".join(self.text.split()[:4])
        return (
            f"<!doctype html><html lang=en><head><title>{title}</title></head><body><main>"
            f"<article><h1>{title}</h1>{body}</article></main><ul>{links}</ul></body></html>"
        )


class Graph:
    """`pages` pages on `pages / 40` hosts; `wanted` are the URLs of pages on the topic."""

    def __init__(self, pages: int = 10_000, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.words = self._vocabularies()
        self.hosts = self._hosts(pages)
        self.pages = self._made(pages)
        self.by_url = {page.url: page for page in self.pages}
        self.wanted = {page.url for page in self.pages if page.kind == "wanted"}
        self._link()

    def seeds(self, count: int = 5) -> list[str]:
        """Homes of hosts that are about the topic: what a person would start from."""
        about = [h for h, kind in enumerate(self.hosts) if kind == "about"]
        chosen = random.Random(0).sample(about, min(count, len(about)))
        return [f"http://host{h}.example/" for h in chosen]

    def examples(self, count: int = 30) -> list[str]:
        """Texts on the topic that are no page of this web."""
        return [self._text("wanted", WANTED).replace("\n", " ") for _ in range(count)]

    def labelled(self, count: int = 300) -> list[dict[str, str]]:
        """Texts and labels (keep, drop) that are no page of this web, for a classifier."""
        kinds = [("wanted", WANTED), ("near", NEIGHBOUR), ("list", TOPICS)]
        kinds += [("other", topic) for topic in range(2, TOPICS)]
        made = []
        for number in range(count):
            kind, topic = kinds[0] if number % 3 == 0 else self.rng.choice(kinds[1:])
            label = "keep" if kind == "wanted" else "drop"
            made.append({"text": self._text(kind, topic).replace("\n", " "), "label": label})
        return made

    def write_warc(self, path: Path) -> None:
        """All pages as one WARC file of response records, gzip by record."""
        with path.open("wb") as file:
            for page in self.pages:
                file.write(record(page.url, page.html.encode()))

    def _vocabularies(self) -> list[list[str]]:
        syllables = [c + v for c in "bcdfglmnprstvz" for v in "aeiou"]
        everyone: list[str] = []
        while len(everyone) < 60 * (TOPICS + 1):
            word = "".join(self.rng.choices(syllables, k=self.rng.choice((2, 3, 4))))
            if word not in everyone:
                everyone.append(word)
        tables = [everyone[60 * i : 60 * i + 60] for i in range(TOPICS + 1)]
        tables[NEIGHBOUR][:20] = tables[WANTED][:20]
        return tables  # the last is what all pages share

    def _hosts(self, pages: int) -> list[str]:
        count = max(10, pages // 40)
        kinds = self.rng.choices(list(HOSTS), list(HOSTS.values()), k=count)
        kinds[0] = "about"
        return kinds

    def _made(self, pages: int) -> list[Page]:
        made = []
        for host in range(len(self.hosts)):
            for section in range(-1, 3):
                path = "" if section < 0 else f"section{section}/"
                url = f"http://host{host}.example/{path}"
                made.append(Page(url, host, TOPICS, "list", self._text("list", TOPICS)))
        weights = [self.rng.lognormvariate(0, 0.8) for _ in self.hosts]
        homes = self.rng.choices(range(len(self.hosts)), weights, k=max(0, pages - len(made)))
        for number, host in enumerate(homes):
            made.append(self._page(number, host))
        return made

    def _page(self, number: int, host: int) -> Page:
        wanted = self.rng.random() < SHARE[self.hosts[host]]
        near = not wanted and self.hosts[host] != "other" and self.rng.random() < 0.25
        topic = WANTED if wanted else NEIGHBOUR if near else self.rng.randrange(2, TOPICS)
        kind = "wanted" if wanted else "near" if near else "other"
        slug = self.rng.choice(self.words[topic]) if self.rng.random() < 0.4 else "page"
        url = f"http://host{host}.example/{slug}-{number}.html"
        return Page(url, host, topic, kind, self._text(kind, topic))

    def _text(self, kind: str, topic: int) -> str:
        own, common = self.words[topic], self.words[TOPICS]
        share = 0.0 if kind == "list" else self.rng.uniform(0.2, 0.5)
        lines = []
        for _ in range(self.rng.randrange(4, 9)):
            line = [
                self.rng.choice(own if self.rng.random() < share else common)
                for _ in range(self.rng.randrange(12, 30))
            ]
            lines.append(" ".join(line) + ".")
        return "\n".join(lines)

    def _link(self) -> None:
        of_host: dict[int, list[Page]] = {}
        pools: dict[bool, list[Page]] = {True: [], False: []}
        for page in self.pages:
            of_host.setdefault(page.host, []).append(page)
            pools[page.kind == "wanted"].append(page)
        for page in self.pages:
            home = of_host[page.host]
            page.links = [(p.url, "home" if i == 0 else "section") for i, p in enumerate(home[:4])]
            targets = self._targets(page, home, pools)
            page.links += [(target.url, self._anchor(target)) for target in targets]

    def _targets(self, page: Page, home: list[Page], pools: dict[bool, list[Page]]) -> list[Page]:
        if page.kind == "list":
            return self.rng.sample(home[4:], min(len(home) - 4, 18)) + self._away(page, pools, 2)
        count = self.rng.randrange(4, 9) if home[4:] else 0
        near = [self._choice(page, home[4:]) for _ in range(count)]
        return near + self._away(page, pools, self.rng.randrange(1, 5))

    def _away(self, page: Page, pools: dict[bool, list[Page]], count: int) -> list[Page]:
        wanted = TO_WANTED.get(page.kind, TO_WANTED["other"])
        return [self.rng.choice(pools[self.rng.random() < wanted]) for _ in range(count)]

    def _choice(self, page: Page, among: list[Page]) -> Page:
        """A page of the same host, of the two drawn the one on the topic if the page is."""
        first, second = self.rng.choice(among), self.rng.choice(among)
        return second if page.kind == "wanted" and second.kind == "wanted" else first

    def _anchor(self, target: Page) -> str:
        if self.rng.random() < 0.5 or target.kind == "list":
            return self.rng.choice(GENERIC)
        misled = self.rng.random() < 0.1
        words = self.words[self.rng.randrange(TOPICS) if misled else target.topic]
        return " ".join(self.rng.choices(words, k=self.rng.choice((1, 2))))


def record(url: str, body: bytes) -> bytes:
    """A WARC response record of an HTML page, compressed."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: "
    block = head + str(len(body)).encode() + b"\r\n\r\n" + body
    fields = (
        f"WARC/1.1\r\nWARC-Type: response\r\nWARC-Target-URI: {url}\r\n"
        "WARC-Date: 2026-01-01T00:00:00Z\r\n"
        f"WARC-Record-ID: <urn:uuid:{random.Random(url).getrandbits(128):032x}>\r\n"
        "Content-Type: application/http; msgtype=response\r\n"
        f"Content-Length: {len(block)}\r\n\r\n"
    )
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1, mtime=0) as zipped:
        zipped.write(fields.encode() + block + b"\r\n\r\n")
    return out.getvalue()


def breadth_first(graph: Graph, seeds: list[str]) -> Iterator[Page]:
    """The pages in the order of a breadth-first walk."""
    queue, seen = list(seeds), set(seeds)
    for url in queue:
        page = graph.by_url[url]
        yield page
        for target, _ in page.links:
            if target not in seen:
                seen.add(target)
                queue.append(target)
