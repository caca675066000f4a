"""Digests of the pages of an SQLite file in WAL mode, by which a flipped bit in it is found.

SQLite checks the frames of its log (FILE-wal), but not the pages of FILE itself, which change only
when it copies the log there. So that is done here, at set sizes of the log: FILE.xxh3 gets the
64-bit XXH3 of every page and the 128-bit XXH3 of all these, and only then is the log emptied. After
a crash, a page of FILE is as in FILE.xxh3, or the log has it. Format of the log:
https://www.sqlite.org/fileformat2.html#walformat.
"""

import os
import sqlite3
from pathlib import Path

from xxhash import xxh3_64_digest, xxh3_128_digest

from sabia.core import digests, notes
from sabia.core.errors import BadData
from sabia.core.shards.atomic import write_atomic

LOG_BYTES = 64 << 20  # the log is copied from this size on, or a SHARE of the file if that is more
SHARE = 1 / 64
_HEADER, _FRAME = 32, 24  # bytes before the first page of the log, and before each page
_READ = 256  # pages read at a time


class PageDigests:
    """Compares a file, which need not exist, with its digests when it is created.

    `open` takes the connection, the only one to the file, before anything is written.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.log = path, path.with_name(f"{path.name}-wal")
        self.beside = path.with_name(f"{path.name}.xxh3")
        self._page = _page_bytes(path)
        self._table = self._digests()
        stored = self._stored()
        if stored is None and self._table:
            digests.note_missing(str(path))
        count = max(len(self._table), len(stored or b"")) // 8
        table = self._table if stored is None else stored
        self._damaged = {
            number
            for number in range(1, count + 1)
            if table[8 * number - 8 : 8 * number] != self._table[8 * number - 8 : 8 * number]
        }
        self._logged = self._pages_of_log()
        self._refuse(self._damaged.difference(self._logged))

    def open(self, db: sqlite3.Connection) -> None:
        """Check that SQLite can read from the log the pages that are not as written in the file."""
        self._db = db
        db.execute("PRAGMA wal_autocheckpoint=0")
        readable = max(0, db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1])
        self._refuse(self._damaged.difference(self._logged[:readable]))
        if lost := len(self._logged) - readable:
            notes.note(
                f"{self.log}: the last {lost} of {len(self._logged)} pages cannot be read (written"
                " as the run was killed, or damaged); the crawl goes on from before them"
            )
        if self._table:
            self.copy_log()  # before it is written again from its start

    def keep(self) -> None:
        """Copy the log to the file once it is long; outside transactions."""
        limit = max(LOG_BYTES, len(self._table) // 8 * self._page * SHARE)
        if self.log.stat().st_size >= limit:
            self.copy_log()

    def copy_log(self) -> None:
        """Copy the log to the file, write the digests, empty the log."""
        self._page = _page_bytes(self.path)
        changed = set(self._pages_of_log())
        busy, pages, copied = self._db.execute("PRAGMA wal_checkpoint(FULL)").fetchone()
        if busy or copied < pages:  # a statement is still reading: the log keeps these pages
            return
        count, table = self.path.stat().st_size // self._page, self._table
        changed.update(range(len(table) // 8 + 1, count + 1))
        table.extend(bytes(max(0, 8 * count - len(table))))
        with self.path.open("rb") as file:
            for number in changed:
                page = os.pread(file.fileno(), self._page, (number - 1) * self._page)
                table[8 * number - 8 : 8 * number] = xxh3_64_digest(page)
        write_atomic(self.beside, bytes(table) + xxh3_128_digest(bytes(table)))
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Before the connection is closed, which empties the log."""
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            self.copy_log()
        except BaseException:
            self.beside.unlink(missing_ok=True)
            raise

    def _refuse(self, damaged: set[int]) -> None:
        if damaged:
            raise BadData(
                f"{self.path}: bytes from {(min(damaged) - 1) * self._page} on are not as they were"
                f" written (damaged bits, or another program wrote there); --force starts anew,"
                f" without {self.beside.name} it is read as it is"
            )

    def _stored(self) -> bytes | None:
        """What `copy_log` wrote; None if there is no file."""
        try:
            whole = self.beside.read_bytes()
        except FileNotFoundError:
            return None
        if xxh3_128_digest(whole[:-16]) != whole[-16:]:
            raise BadData(
                f"{self.beside}: not as it was written (damaged bits); without it"
                f" {self.path.name} is read as it is"
            )
        return whole[:-16]

    def _digests(self) -> bytearray:
        """Those of all pages in the file."""
        table = bytearray()
        if self.path.exists():
            with self.path.open("rb") as file:
                while block := file.read(_READ * self._page):
                    for start in range(0, len(block), self._page):
                        table += xxh3_64_digest(block[start : start + self._page])
        return table

    def _pages_of_log(self) -> list[int]:
        """The page number of each frame of the log, in order."""
        if not self.log.exists():
            return []
        step = _FRAME + self._page
        with self.log.open("rb") as file:
            count = max(0, self.log.stat().st_size - _HEADER) // step
            places = (_HEADER + n * step for n in range(count))
            return [int.from_bytes(os.pread(file.fileno(), 4, at), "big") for at in places]


def _page_bytes(path: Path) -> int:
    """The size of a page: bytes 16 and 17 of the file, where 1 is 65,536; 4,096 if there is none
    or they hold another size, which is then found as damage."""
    head = b""
    if path.exists():
        with path.open("rb") as file:
            head = file.read(18)
    size = int.from_bytes(head[16:18], "big")
    size = 1 << 16 if size == 1 else size
    return size if size >= 512 and size & (size - 1) == 0 else 4096
