"""The site as a link graph: topical hubs, a spam ring near the home page, faults, duplicates.

Exercise and prose pages cluster under hubs three clicks from home; spam links to spam at two
clicks; every page carries the same navigation bar. So a crawler that follows the links of good
pages first meets more good pages within a budget than one that goes breadth-first. The same
(pages, seed) always gives the same site; paths and texts do not depend on host or port.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sabia.examples.little_web import prose, sums
from sabia.examples.little_web.pages import Page

SHARES = {"exercise": 0.27, "prose": 0.30, "near-duplicate": 0.07, "copy": 0.04, "spam": 0.22}
SUMS_PER_PAGE = 40
HUB_SIZE = 15
PRIVATE_PAGES = 8
# fault → (encoding, does a good crawler end up with the page's text?)
FAULTS = {
    "throttled": ("utf-8", True),  # 429 with Retry-After, once
    "busy": ("utf-8", True),  # 503 with Retry-After, once
    "latin-1": ("latin-1", True),
    "windows-1252": ("windows-1252", True),  # declared nowhere
    "status-500": ("utf-8", False),
    "status-404": ("utf-8", False),
    "truncated": ("utf-8", False),  # fewer bytes than Content-Length says
    "wrong-type": ("utf-8", False),  # bytes of no meaning as application/pdf
    "endless-body": ("utf-8", False),  # 64 MB of HTML
    "gzip-bomb": ("utf-8", False),  # 64 kB that unpack to 64 MB
    "empty": ("utf-8", False),
}
REDIRECTS = {
    "/go/learn": "/learn/",
    "/go/old-library": "/go/older-library",
    "/go/older-library": "/library/",
    "/go/round": "/go/and-round",
    "/go/and-round": "/go/round",
    "/go/metadata": "http://169.254.169.254/latest/meta-data/",  # a crawler must refuse it
} | {f"/go/hop/{n}": f"/go/hop/{n + 1}" for n in range(9)}
ROBOTS = "User-agent: *\nDisallow: /private/\nDisallow: /*?sort=\n"
TITLES = {"exercise": {"en": "Worked sums, lesson {n}", "pt": "Somas resolvidas, lição {n}"}}
HUBS = {
    "en": ("Worked exercises: sums", "Reading: {name}", "Library in English"),
    "pt": ("Exercícios resolvidos: somas", "Leitura: {name}", "Biblioteca em português"),
}


@dataclass(frozen=True)
class Site:
    """Every static page by its path; traps and redirects are answered by the server."""

    seed: int
    pages: dict[str, Page]

    def truth(self, base_url: str = "") -> list[dict[str, object]]:
        """One row a page: url, path, kind, language, title, relevant, duplicate_of, fault, text."""
        return [
            {
                "url": base_url + page.path, "path": page.path, "kind": page.kind,
                "language": page.language, "title": page.title, "relevant": page.relevant,
                "duplicate_of": page.duplicate_of, "fault": page.fault, "text": page.text,
            }
            for page in self.pages.values()
        ]  # fmt: skip


def build_site(pages: int = 400, seed: int = 0) -> Site:
    """Make a site of about `pages` pages (at least 60)."""
    if pages < 60:
        raise ValueError(f"pages: {pages} (expected 60 or more, so that every kind occurs)")
    made = _Maker(pages, seed)
    content = [*made.exercises(), *made.prose()]
    content += [*made.near_duplicates(content), *made.copies(content), *made.broken()]
    whole = [*made.with_links(content), *made.private(), *made.spam(), *made.hubs(content)]
    return Site(seed, {page.path: page for page in whole})


class _Maker:
    def __init__(self, pages: int, seed: int) -> None:
        self.seed = seed
        self.counts = {kind: round(share * pages) for kind, share in SHARES.items()}

    def choice(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")

    def exercises(self) -> Iterator[Page]:
        for language in prose.LANGUAGES:
            stream = self._sum_stream(language)
            for number in range(1, self.counts["exercise"] // 2 + 1):
                yield self._exercise(f"/learn/{language}/sums/{number}.html", number, stream)

    def _sum_stream(self, language: str) -> Iterator[tuple[str, int, int]]:
        choice, shown = self.choice(f"sums {language}"), list(sums.shown_sums())
        while True:
            choice.shuffle(shown)
            yield from ((language, a, b) for a, b in shown)

    def _exercise(
        self, path: str, number: int, stream: Iterator[tuple[str, int, int]], kind: str = "exercise"
    ) -> Page:
        choice, body, language = self.choice(path), [], "en"
        for _ in range(SUMS_PER_PAGE):
            language, a, b = next(stream)
            body.append(sums.worked_exercise(a, b, language, choice))
        title = TITLES["exercise"][language].format(n=number)
        return Page(path, kind, language, title, tuple(body), relevant=kind == "exercise")

    def prose(self) -> Iterator[Page]:
        for index in range(self.counts["prose"]):
            language = prose.LANGUAGES[index % 2]
            topics = list(prose.lexicon(language)["topics"])
            topic = topics[index // 2 % len(topics)]
            yield self._article(f"/library/{language}/{topic}/{index}.html", language, topic)

    def _article(self, path: str, language: str, topic: str) -> Page:
        choice, words = self.choice(path), prose.lexicon(language)["topics"][topic]
        title = prose.title(words, language, choice)
        body = tuple(prose.paragraphs(words, language, choice))
        return Page(path, "prose", language, title, body, relevant=True)

    def near_duplicates(self, content: Sequence[Page]) -> Iterator[Page]:
        choice = self.choice("near")
        for original in choice.sample(list(content), self.counts["near-duplicate"]):
            path = original.path.replace(".html", "-revised.html")
            body = self._edited(original)
            yield replace(original, path=path, kind="near-duplicate", body=body,
                          duplicate_of=original.path)  # fmt: skip

    def _edited(self, page: Page) -> tuple[str, ...]:
        choice = self.choice(page.path + " edited")
        if page.kind == "exercise":
            body = list(page.body)
            a, b = choice.choice(sums.shown_sums())
            body[choice.randrange(len(body))] = sums.worked_exercise(a, b, page.language, choice)
            return tuple(body)
        words = prose.lexicon(page.language)["topics"][page.path.split("/")[3]]
        return tuple(prose.near_duplicate(list(page.body), words, page.language, choice))

    def copies(self, content: Sequence[Page]) -> Iterator[Page]:
        originals = [page for page in content if page.duplicate_of is None]
        for original in self.choice("copies").sample(originals, self.counts["copy"]):
            yield replace(original, path="/mirror" + original.path, kind="copy",
                          duplicate_of=original.path)  # fmt: skip

    def broken(self) -> Iterator[Page]:
        for number, (fault, (encoding, readable)) in enumerate(FAULTS.items()):
            path, language = f"/library/archive/{fault}.html", prose.LANGUAGES[number % 2 ^ 1]
            topics = list(prose.lexicon(language)["topics"])
            page = self._article(path, language, topics[number % len(topics)])
            yield replace(page, kind="broken", fault=fault, encoding=encoding, relevant=readable)

    def private(self) -> Iterator[Page]:
        stream = self._sum_stream("en")
        for number in range(1, PRIVATE_PAGES + 1):
            yield self._exercise(f"/private/sums/{number}.html", number, stream, "private")

    def with_links(self, content: Sequence[Page]) -> Iterator[Page]:
        groups: dict[str, list[Page]] = {}
        for page in content:
            groups.setdefault(_hub_of(page), []).append(page)
        for hub, members in groups.items():
            for index, page in enumerate(members):
                choice = self.choice(page.path + " links")
                near = [members[(index + step) % len(members)] for step in (1, 2, -1)]
                tracked = choice.choice(("", "?utm_source=little&utm_medium=web", "#reading"))
                links = [(other.path + tracked, other.title) for other in near]
                noise = f"/offers/{choice.randrange(self.counts['spam'])}.html"
                links += [(hub, "Up"), (f"{hub}?sort=title", "Sort"), (noise, "Sponsored")]
                yield replace(page, links=tuple(links))

    def spam(self) -> Iterator[Page]:
        count = self.counts["spam"]
        for number in range(count):
            path = f"/offers/{number}.html"
            choice = self.choice(path)
            language = choice.choice(prose.LANGUAGES)
            targets = choice.sample(range(count), min(12, count))
            links = [(f"/offers/{n}.html", f"Best offer {n}") for n in targets]
            links.append((f"/calendar/20{choice.randrange(31, 60)}/01", "Event calendar"))
            links.append((f"/offers/list?page={number}", "More offers"))
            title = prose.lexicon(language)["slogans"][0].title() + f" {number}"
            body = tuple(prose.spam(language, choice))
            yield Page(path, "spam", language, title, body, tuple(links))

    def hubs(self, content: Sequence[Page]) -> Iterator[Page]:
        members: dict[str, list[tuple[str, str]]] = {}
        for page in content:
            members.setdefault(_hub_of(page), []).append((page.path, page.title))
        for hub, links in members.items():
            yield from _paged(hub, _hub_title(hub), links)
        yield from self._sections(list(members))

    def _sections(self, hubs: Sequence[str]) -> Iterator[Page]:
        offers = [(f"/offers/{n}.html", f"Offer {n}") for n in range(self.counts["spam"])]
        portals = offers[: len(offers) // 2]
        shortcuts = [(path, "Shortcut " + path.rpartition("/")[2]) for path in REDIRECTS][:7]
        yield _menu("/offers/", "Offers of the day", portals)
        yield _menu("/news/", "Links of the day", [*offers[len(offers) // 2 :], *shortcuts])
        yield _menu("/about.html", "About this site", [("/private/sums/1.html", "Staff only")])
        for section, name in (("/learn/", "Learn"), ("/library/", "Library")):
            inside = [(hub, _hub_title(hub)) for hub in hubs if hub.startswith(section)]
            yield _menu(section, name, inside)
        yield _menu("/mirror/", "Mirrors", [(h, "Mirror") for h in hubs if h.startswith("/mirror")])
        yield _menu("/", "The little web", [("/mirror/", "Mirrors"), ("/go/learn", "Start here")])


def _hub_of(page: Page) -> str:
    return page.path.rpartition("/")[0] + "/"


def _hub_title(hub: str) -> str:
    parts = hub.strip("/").split("/")
    mirror = "Mirror: " if parts[0] == "mirror" else ""
    parts = parts[1:] if mirror else parts
    if parts[1] not in HUBS:
        return "Reading: archive"
    sums_title, reading, _ = HUBS[parts[1]]
    if parts[0] == "learn":
        return mirror + sums_title
    return mirror + reading.format(name=prose.lexicon(parts[1])["topics"][parts[2]]["name"])


def _paged(hub: str, title: str, links: Sequence[tuple[str, str]]) -> Iterator[Page]:
    for start in range(0, len(links), HUB_SIZE):
        number = start // HUB_SIZE + 1
        more = [(f"{hub}page-{number + 1}.html", f"{title}, more")]
        shown = [*links[start : start + HUB_SIZE], *(more if start + HUB_SIZE < len(links) else [])]
        path = hub if number == 1 else f"{hub}page-{number}.html"
        yield _menu(path, title if number == 1 else f"{title}, page {number}", shown)


def _menu(path: str, title: str, links: Sequence[tuple[str, str]]) -> Page:
    language = "pt" if "/pt/" in path else "en"
    return Page(path, "navigation", language, title, links=tuple(links))
