"""What is known of the web so far: one SQLite file in WAL mode that survives kill -9.

Every page's end (document, links found, figures of host, page family and link words, position in
the WARC file) is one transaction, so after a crash each URL is either as before its fetch or
wholly done; what was in flight is fetched again, nothing else is. A URL is known by a 64-bit hash
of its canonical form. Ties in priority go to the URL found first, which makes runs repeatable.
"""

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from sabia.core.errors import UsageError
from sabia.core.web.urls import host_of, template_of

PENDING, IN_FLIGHT, DONE, GONE = 0, 1, 2, 3
_ENTRY = "number,url,host,depth,hops,tries,worth,anchor"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS pages (
  number INTEGER PRIMARY KEY, fp INTEGER UNIQUE NOT NULL, url TEXT NOT NULL, host TEXT NOT NULL,
  state INTEGER NOT NULL, priority REAL NOT NULL, depth INTEGER NOT NULL, hops INTEGER NOT NULL,
  tries INTEGER NOT NULL DEFAULT 0, worth REAL NOT NULL, anchor TEXT NOT NULL, reason TEXT);
CREATE INDEX IF NOT EXISTS best ON pages (host, state, priority DESC, number);
CREATE TABLE IF NOT EXISTS documents (
  place INTEGER PRIMARY KEY, number INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS figures (
  kind TEXT NOT NULL, name TEXT NOT NULL, tried REAL NOT NULL, good REAL NOT NULL,
  PRIMARY KEY (kind, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS seen (digest BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS robots (
  origin TEXT PRIMARY KEY, state TEXT NOT NULL, text TEXT NOT NULL, time REAL NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


@dataclass(frozen=True)
class Link:
    """A URL to remember. `worth` is what the page that named it was worth."""

    url: str
    priority: float
    depth: int
    worth: float
    anchor: str = ""
    hops: int = 0


@dataclass(frozen=True)
class Entry:
    """A URL taken from the frontier."""

    number: int
    url: str
    host: str
    depth: int
    hops: int
    tries: int
    worth: float
    anchor: str


class Frontier:
    """Pending URLs by host, finished pages, figures. One process uses it at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.db = sqlite3.connect(path, isolation_level=None)
        self.db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;" + _SCHEMA)
        self.db.execute("UPDATE pages SET state=? WHERE state=?", (PENDING, IN_FLIGHT))

    def close(self) -> None:
        """Close the file; everything is already in it."""
        self.db.close()

    def belongs_to(self, identity: dict[str, Any]) -> None:
        """Tie the file to a crawl's seeds and steering; UsageError if it is another's."""
        said = json.dumps(identity, sort_keys=True)
        found = self.fact("identity")
        if found is None:
            self.set_fact("identity", said)
        elif found != said:
            raise UsageError(
                f"{self.path}: the state of another crawl (other seeds or steering);"
                " --force starts anew, --state elsewhere keeps both"
            )

    def fact(self, name: str) -> str | None:
        """A remembered value."""
        row = self.db.execute("SELECT value FROM facts WHERE name=?", (name,)).fetchone()
        return row[0] if row else None

    def set_fact(self, name: str, value: str) -> None:
        """Remember a value (inside the transaction that is open, if any)."""
        self.db.execute("INSERT OR REPLACE INTO facts VALUES (?,?)", (name, value))

    def forget(self) -> None:
        """Drop everything that was remembered."""
        for table in ("pages", "documents", "figures", "seen", "robots", "facts"):
            self.db.execute(f"DELETE FROM {table}")

    def begin(self) -> None:
        """Open the transaction of one page."""
        self.db.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """Make the page durable against kill -9."""
        self.db.execute("COMMIT")

    def add(self, links: Sequence[Link]) -> int:
        """Remember URLs; pending ones rise to the better priority. Returns how many are new."""
        before = self.db.total_changes
        rows = [
            (fingerprint(k.url), k.url, host_of(k.url), PENDING, k.priority, k.depth, k.hops,
             k.worth, k.anchor[:200])
            for k in links
        ]  # fmt: skip
        self.db.executemany(
            "INSERT OR IGNORE INTO pages (fp,url,host,state,priority,depth,hops,worth,anchor)"
            " VALUES (?,?,?,?,?,?,?,?,?)",
            rows,
        )
        new = self.db.total_changes - before
        self.db.executemany(
            "UPDATE pages SET priority=?, worth=max(worth,?), depth=min(depth,?)"
            " WHERE fp=? AND state=? AND priority<?",
            [(r[4], r[7], r[5], r[0], PENDING, r[4]) for r in rows],
        )
        return new

    def hosts(self) -> dict[str, float]:
        """Hosts with pending URLs and the best priority of each."""
        return dict(
            self.db.execute(
                "SELECT host, max(priority) FROM pages WHERE state=? GROUP BY host", (PENDING,)
            )
        )

    def best_of(self, host: str) -> float | None:
        """The best pending priority of a host."""
        row = self.db.execute(
            "SELECT priority FROM pages WHERE host=? AND state=?"
            " ORDER BY priority DESC, number LIMIT 1",
            (host, PENDING),
        ).fetchone()
        return row[0] if row else None

    def take(self, host: str) -> Entry | None:
        """The host's best pending URL, now in flight."""
        row = self.db.execute(
            "UPDATE pages SET state=?, tries=tries+1 WHERE number=(SELECT number FROM pages"
            " WHERE host=? AND state=? ORDER BY priority DESC, number LIMIT 1)"
            f" RETURNING {_ENTRY}",
            (IN_FLIGHT, host, PENDING),
        ).fetchone()
        return Entry(*row) if row else None

    def rescore(self, host: str, priority: Callable[[Entry], float]) -> int:
        """Give all pending URLs of a host their priority by today's knowledge; how many."""
        rows = self.db.execute(
            f"SELECT {_ENTRY} FROM pages WHERE host=? AND state=?", (host, PENDING)
        ).fetchall()
        entries = [Entry(*row) for row in rows]
        self.db.executemany(
            "UPDATE pages SET priority=? WHERE number=?",
            [(priority(entry), entry.number) for entry in entries],
        )
        return len(entries)

    def end(self, entry: Entry, state: int, reason: str | None = None) -> None:
        """Set what became of a URL: DONE, GONE with a reason, or PENDING again."""
        self.db.execute(
            "UPDATE pages SET state=?, reason=? WHERE number=?", (state, reason, entry.number)
        )

    def drop_family(self, template: str, host: str, reason: str) -> int:
        """Give up the pending URLs of a page family (see urls.template_of); how many they were."""
        pending = self.db.execute(
            "SELECT number, url FROM pages WHERE host=? AND state=?", (host, PENDING)
        )
        numbers = [(GONE, reason, n) for n, url in pending if template_of(url) == template]
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
        """True when this digest was not seen before; remembers it."""
        found = self.db.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,))
        return found.rowcount == 1

    def keep_document(self, place: int, entry: Entry, document: dict[str, Any]) -> None:
        """Store the document of the page that was fetched as number `place`."""
        packed = zstandard.compress(json.dumps(document, ensure_ascii=False).encode(), 3)
        self.db.execute("INSERT INTO documents VALUES (?,?,?)", (place, entry.number, packed))

    def documents(self) -> Iterator[dict[str, Any]]:
        """All documents in the order of fetching."""
        for (packed,) in self.db.execute("SELECT body FROM documents ORDER BY place"):
            yield json.loads(zstandard.decompress(packed))

    def document_count(self) -> int:
        """How many documents are kept."""
        return int(self.db.execute("SELECT count(*) FROM documents").fetchone()[0])

    def refusals(self) -> Iterator[tuple[str, str, str]]:
        """(url, host, reason) of what was given up, in the order found."""
        yield from self.db.execute(
            "SELECT url, host, reason FROM pages WHERE state=? AND reason IS NOT NULL"
            " ORDER BY number",
            (GONE,),
        )

    def keep_robots(self, origin: str, state: str, text: str, time_s: float) -> None:
        """Remember an origin's robots.txt."""
        self.db.execute(
            "INSERT OR REPLACE INTO robots VALUES (?,?,?,?)", (origin, state, text, time_s)
        )

    def robots(self, origin: str, since_s: float) -> tuple[str, str] | None:
        """(state, text) of an origin's robots.txt if it was read after `since_s`."""
        return self.db.execute(
            "SELECT state, text FROM robots WHERE origin=? AND time>?", (origin, since_s)
        ).fetchone()


def fingerprint(url: str) -> int:
    """A signed 64-bit hash of a canonical URL."""
    digest = hashlib.blake2b(url.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)
