"""The crawl's state: one SQLite file in WAL mode that survives kill -9.

All results of a page (document, links, counts of host, page family and link words, position in the
WARC files) are written in one transaction, so after a crash each URL is either as before its fetch
or completely done. Which URLs are in flight is known only to the running process: after a crash
these are still pending and are fetched again. A URL is identified by a 64-bit hash of its canonical
form. Of URLs with equal priority the one that was added first comes first, so runs are repeatable.
Digests of the file's pages are beside it (see page_digests).
"""

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from sabia.core.errors import BadData, UsageError
from sabia.core.urls import comparison_key
from sabia.core.web.page_digests import PageDigests
from sabia.core.web.robots import RobotsFile
from sabia.core.web.url_rules import host_of, template_of

PENDING, DONE, GIVEN_UP = 0, 2, 3
PAGE, SITEMAP = 0, 1
_VERSION = 3
_KNOWN_URLS = 500_000  # kept in memory, to read the file less often
_ENTRY = "number,url,host,depth,hops,tries,worth,anchor,via,kind"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS pages (
  number INTEGER PRIMARY KEY, fp INTEGER UNIQUE NOT NULL, url TEXT NOT NULL, host TEXT NOT NULL,
  state INTEGER NOT NULL, priority REAL NOT NULL, depth INTEGER NOT NULL, hops INTEGER NOT NULL,
  tries INTEGER NOT NULL DEFAULT 0, worth REAL NOT NULL, anchor TEXT NOT NULL, via TEXT NOT NULL,
  kind INTEGER NOT NULL, reason TEXT);
CREATE INDEX IF NOT EXISTS best ON pages (host, priority DESC, number) WHERE state=0;
CREATE TABLE IF NOT EXISTS visits (
  number INTEGER PRIMARY KEY, time REAL NOT NULL, etag TEXT NOT NULL, modified TEXT NOT NULL,
  digest TEXT NOT NULL, record TEXT NOT NULL, date TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS documents (
  place INTEGER PRIMARY KEY, number INTEGER UNIQUE NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS judged (place INTEGER PRIMARY KEY, score REAL NOT NULL);
CREATE TABLE IF NOT EXISTS figures (
  kind TEXT NOT NULL, name TEXT NOT NULL, tried REAL NOT NULL, good REAL NOT NULL,
  PRIMARY KEY (kind, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS seen (digest BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS robots (
  origin TEXT PRIMARY KEY, state TEXT NOT NULL, text TEXT NOT NULL, time REAL NOT NULL,
  keep REAL NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_REST = "rest of "  # with the name of a host: a fact


@dataclass(frozen=True)
class DiscoveredUrl:
    """A URL to add. `relevance` is that of the page that links to it.

    `via` is how it was found: seed, link, redirect or sitemap; `changed_s` is the page's last
    change according to a sitemap (seconds since 1970).
    """

    url: str
    priority: float
    depth: int
    relevance: float
    anchor: str = ""
    hops: int = 0
    via: str = "link"
    kind: int = PAGE
    changed_s: float | None = None


@dataclass(frozen=True)
class Entry:
    """A URL taken from the frontier; `tries` counts earlier failed attempts."""

    number: int
    url: str
    host: str
    depth: int
    hops: int
    tries: int
    relevance: float
    anchor: str
    via: str = "link"
    kind: int = PAGE


@dataclass(frozen=True)
class Visit:
    """An earlier fetch: its validators, payload digest, and the id and date of its WARC record."""

    time_s: float
    etag: str = ""
    modified: str = ""
    digest: str = ""
    record: str = ""
    date: str = ""

    def conditions(self) -> dict[str, str]:
        """The headers of a conditional request (RFC 9110, 13.1)."""
        asked = {"If-None-Match": self.etag, "If-Modified-Since": self.modified}
        return {name: value for name, value in asked.items() if value}


class Frontier:
    """Pending URLs by host, finished pages, counts. Only one process may use it at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.digests = path, PageDigests(path)
        self.db = sqlite3.connect(path, isolation_level=None)
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # locked, or a full disk
                raise
            raise BadData(f"{path}: {error} (expected the state of a crawl)") from error
        self._taken: dict[str, set[int]] = {}  # numbers of URLs in flight, by host
        self._known: dict[str, float] = {}  # URLs in the file, with their priority

    def _open(self) -> None:
        """Check the layout; create the tables that do not exist."""
        self.digests.open(self.db)
        (version,) = self.db.execute("PRAGMA user_version").fetchone()
        (tables,) = self.db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if tables and version != _VERSION:
            raise UsageError(
                f"{self.path}: the state of another version of sabia (layout {version}, expected"
                f" {_VERSION}); --force starts anew, --state elsewhere keeps both"
            )
        self.db.executescript(
            f"PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;PRAGMA user_version={_VERSION};"
            + _SCHEMA
        )
        self.digests.copy_log()

    def close(self) -> None:
        """Close the file; everything is already in it."""
        try:
            self.digests.close()
        finally:
            self.db.close()

    def belongs_to(self, identity: dict[str, Any]) -> None:
        """Store the identity of the crawl; UsageError if the file has another one."""
        text = json.dumps(identity, sort_keys=True)
        stored = self.fact("identity")
        if stored is None:
            self.set_fact("identity", text)
        elif stored != text:
            raise UsageError(
                f"{self.path}: the state of another crawl (other seeds or steering);"
                " --force starts anew, --state elsewhere keeps both"
            )

    def fact(self, name: str) -> str | None:
        """A stored value."""
        row = self.db.execute("SELECT value FROM facts WHERE name=?", (name,)).fetchone()
        return row[0] if row else None

    def set_fact(self, name: str, value: str) -> None:
        """Store a value (inside the open transaction, if any)."""
        self.db.execute("INSERT OR REPLACE INTO facts VALUES (?,?)", (name, value))

    def rest(self, host: str, until_s: float) -> None:
        """Store until when a host must not be asked again (seconds since 1970)."""
        self.begin()
        self.set_fact(f"{_REST}{host}", repr(until_s))

    def rests(self) -> dict[str, float]:
        """What `rest` stored, by host."""
        rows = self.db.execute("SELECT name, value FROM facts WHERE substr(name,1,?)=?",
                               (len(_REST), _REST))  # fmt: skip
        return {name.removeprefix(_REST): float(until_s) for name, until_s in rows}

    def forget(self) -> None:
        """Delete all stored data."""
        for table in ("pages", "visits", "documents", "figures", "seen", "robots", "facts"):
            self.db.execute(f"DELETE FROM {table}")
        self._known.clear()

    @property
    def begun(self) -> bool:
        """Is a transaction open?"""
        return self.db.in_transaction

    def begin(self) -> None:
        """Open a transaction for the results of a page, unless one is open."""
        if not self.db.in_transaction:
            self.db.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Commit, so that the data survives kill -9."""
        self.db.execute("COMMIT")
        self.digests.keep()

    def add(self, links: Sequence[DiscoveredUrl]) -> int:
        """Add URLs; known pending ones get the higher priority, and those whose page changed after
        it was fetched become pending again. Returns the number of new URLs."""
        links = [k for k in links if self._known.get(k.url, -1e300) < k.priority or k.changed_s]
        if len(self._known) > _KNOWN_URLS:
            self._known.clear()
        self._known.update((link.url, link.priority) for link in links)
        rows = [
            (fingerprint(k.url), k.url, host_of(k.url), PENDING, k.priority, k.depth, k.hops,
             k.relevance, k.anchor[:200], k.via, k.kind)
            for k in links
        ]  # fmt: skip
        insert = (
            "INSERT OR IGNORE INTO pages"
            " (fp,url,host,state,priority,depth,hops,worth,anchor,via,kind)"
            " VALUES (?,?,?,?,?,?,?,?,?,?,?)"
        )
        added = [bool(self.db.execute(insert, row).rowcount) for row in rows]
        old = [row for row, new in zip(rows, added, strict=True) if not new]
        self.db.executemany(
            "UPDATE pages SET priority=?, worth=max(worth,?), depth=min(depth,?)"
            " WHERE fp=? AND state=? AND priority<?",
            [(r[4], r[7], r[5], r[0], PENDING, r[4]) for r in old],
        )
        changed = [(fingerprint(k.url), k.changed_s) for k in links if k.changed_s]
        self.db.executemany(
            "UPDATE pages SET state=0, tries=0 WHERE fp=? AND state=2 AND EXISTS"
            " (SELECT 1 FROM visits v WHERE v.number=pages.number AND v.time<?)",
            changed,
        )
        return sum(added)

    def skips(self, url: str, priority: float) -> bool:
        """True for a URL that is known to be stored with this priority or a higher one."""
        return self._known.get(url, -1e300) >= priority

    def hosts(self) -> dict[str, float]:
        """Hosts with pending URLs and the best priority of each."""
        query = "SELECT host, max(priority) FROM pages WHERE state=0 GROUP BY host"
        return dict(self.db.execute(query))

    def best_of(self, host: str) -> float | None:
        """The highest priority of a host's pending URLs that are not in flight."""
        row = next(self._pending(host, "number, priority"), None)
        return row[1] if row else None

    def take(self, host: str) -> tuple[Entry | None, float | None]:
        """The host's best pending URL, now in flight, and the priority of the next one."""
        rows = self._pending(host, f"{_ENTRY}, priority")
        row, following = next(rows, None), next(rows, None)
        if row is None:
            return None, None
        self._taken.setdefault(host, set()).add(row[0])
        return Entry(*row[:-1]), following[-1] if following else None

    def release(self, entry: Entry) -> None:
        """Mark the URL as no longer in flight; `end` has stored its result, if there is one."""
        self._taken.get(entry.host, set()).discard(entry.number)

    def _pending(self, host: str, columns: str) -> Iterator[tuple[Any, ...]]:
        """Pending rows of a host, best first, without those in flight."""
        taken = self._taken.get(host, ())
        query = (
            f"SELECT {columns} FROM pages WHERE host=? AND state=0 ORDER BY priority DESC, number"
        )
        return (row for row in self.db.execute(query, (host,)) if row[0] not in taken)

    def rescore(self, host: str, priority: Callable[[Entry], float]) -> int:
        """Recompute the priority of all pending URLs of a host; returns their number."""
        rows = self.db.execute(f"SELECT {_ENTRY} FROM pages WHERE host=? AND state=0", (host,))
        entries = [Entry(*row) for row in rows]
        updates = [(priority(entry), entry.number) for entry in entries]
        self.db.executemany("UPDATE pages SET priority=? WHERE number=?", updates)
        return len(entries)

    def end(self, entry: Entry, state: int, reason: str | None = None) -> None:
        """Set the state of a URL: DONE, GIVEN_UP with a reason, or PENDING for a retry."""
        tries = entry.tries + 1 if state == PENDING else entry.tries
        row = (state, reason, tries, entry.number)
        self.db.execute("UPDATE pages SET state=?, reason=?, tries=? WHERE number=?", row)

    def visited(self, entry: Entry, visit: Visit) -> None:
        """Store a visit, for the next one of this URL."""
        row = (entry.number, *vars(visit).values())
        self.db.execute("INSERT OR REPLACE INTO visits VALUES (?,?,?,?,?,?,?)", row)

    def visit(self, entry: Entry) -> Visit | None:
        """The last visit of this URL."""
        query = "SELECT time,etag,modified,digest,record,date FROM visits WHERE number=?"
        row = self.db.execute(query, (entry.number,)).fetchone()
        return Visit(*row) if row else None

    def revisit(self, before_s: float, transient: Sequence[str]) -> int:
        """Make URLs pending again that were fetched before a time or given up for transient
        reasons (globs); returns their number."""
        self._known.clear()
        done = self.db.execute(
            "UPDATE pages SET state=0, tries=0 WHERE state=2 AND (kind=? OR number IN"
            " (SELECT number FROM visits WHERE time<?))",
            (SITEMAP, before_s),
        )
        globs = " OR ".join("reason GLOB ?" for _ in transient)
        update = f"UPDATE pages SET state=0, tries=0, reason=NULL WHERE state=3 AND ({globs})"
        return done.rowcount + self.db.execute(update, transient).rowcount

    def drop_family(self, template: str, host: str, reason: str) -> int:
        """Give up the pending URLs of a page family (a template); returns their number."""
        pending = self.db.execute("SELECT number, url FROM pages WHERE host=? AND state=0", (host,))
        numbers = [(GIVEN_UP, reason, n) for n, url in pending if template_of(url) == template]
        self.db.executemany("UPDATE pages SET state=?, reason=? WHERE number=?", numbers)
        return len(numbers)

    def tally(self, kind: str, names: Sequence[str], good: float) -> None:
        """Count one more trial of each name and add `good` (0 to 1) to its successes."""
        self.db.executemany(
            "INSERT INTO figures VALUES (?,?,1,?) ON CONFLICT (kind,name)"
            " DO UPDATE SET tried=tried+1, good=good+excluded.good",
            [(kind, name, good) for name in names],
        )

    def figures(self, kind: str) -> dict[str, tuple[float, float]]:
        """(tried, good) by name."""
        rows = self.db.execute("SELECT name,tried,good FROM figures WHERE kind=?", (kind,))
        return {name: (tried, good) for name, tried, good in rows}

    def first_time(self, digest: bytes) -> bool:
        """Store a digest; True if it is new."""
        inserted = self.db.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,))
        return inserted.rowcount == 1

    def keep_document(self, order: int, entry: Entry, document: dict[str, Any]) -> None:
        """Store the document of the page that was fetched as number `order`."""
        packed = zstandard.compress(json.dumps(document, ensure_ascii=False).encode(), 3)
        row = (order, entry.number, packed)
        self.db.execute("INSERT OR REPLACE INTO documents VALUES (?,?,?)", row)

    def judged(self, order: int, score: float) -> None:
        """Store the score of the page that was fetched as number `order`."""
        self.db.execute("INSERT OR REPLACE INTO judged VALUES (?, ?)", (order, score))

    def scores(self) -> list[float]:
        """Scores of the pages judged, in the order in which they were fetched."""
        return [row[0] for row in self.db.execute("SELECT score FROM judged ORDER BY place")]

    def drop_document(self, entry: Entry) -> None:
        """Delete the document of a page."""
        self.db.execute("DELETE FROM documents WHERE number=?", (entry.number,))

    def drop_page(self, entry: Entry) -> None:
        """Delete the document and the last visit of a page."""
        self.drop_document(entry)
        self.db.execute("DELETE FROM visits WHERE number=?", (entry.number,))

    def documents(self) -> Iterator[dict[str, Any]]:
        """All documents in the order in which they were fetched."""
        for (packed,) in self.db.execute("SELECT body FROM documents ORDER BY place"):
            yield json.loads(zstandard.decompress(packed))

    def document_count(self) -> int:
        """Number of stored documents."""
        return int(self.db.execute("SELECT count(*) FROM documents").fetchone()[0])

    def waiting(self) -> int:
        """Number of pending URLs."""
        return int(self.db.execute("SELECT count(*) FROM pages WHERE state=0").fetchone()[0])

    def given_up(self, transient: Sequence[str]) -> int:
        """Number of URLs given up for these reasons (globs)."""
        globs = " OR ".join("reason GLOB ?" for _ in transient)
        query = f"SELECT count(*) FROM pages WHERE state=3 AND ({globs})"
        return int(self.db.execute(query, transient).fetchone()[0])

    def refusals(self) -> Iterator[tuple[str, str, str]]:
        """(url, host, reason) of URLs given up, in the order in which they were added."""
        given_up = "state=? AND reason IS NOT NULL"
        query = f"SELECT url, host, reason FROM pages WHERE {given_up} ORDER BY number"
        yield from self.db.execute(query, (GIVEN_UP,))

    def keep_robots(self, origin: str, robots: RobotsFile, time_s: float) -> None:
        """Store the robots.txt of an origin, fetched at this time."""
        row = (origin, robots.state, robots.text, time_s, robots.keep_s)
        self.db.execute("INSERT OR REPLACE INTO robots VALUES (?,?,?,?,?)", row)

    def robots(self, origin: str) -> tuple[RobotsFile, float] | None:
        """(robots.txt, time of fetching) of an origin if it is stored."""
        query = "SELECT text, state, keep, time FROM robots WHERE origin=?"
        row = self.db.execute(query, (origin,)).fetchone()
        return (RobotsFile(*row[:3]), row[3]) if row else None


def fingerprint(url: str) -> int:
    """A signed 64-bit hash of what identifies a canonical URL."""
    digest = hashlib.blake2b(comparison_key(url).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
