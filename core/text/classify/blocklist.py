"""Lists of blocked domains and URLs: many million entries at nine bytes each, one look-up a batch.

A list is a file, plain or .gz, or a directory of categories as the UT1 lists of Toulouse have it
(`adult/domains`, `adult/urls`, …); a file's category is its name up to the first dot, one named
`domains` or `urls` takes its directory's. Lines: a domain (`example.com`, `*.example.com`), which
blocks its subdomains too; an address (`example.com/path`, with or without scheme), which blocks
what is below it (prefixes end at `/`, `?` or the end); a line of a hosts file (`0.0.0.0 host`); a
blocking rule of an ad blocker for a domain (`||example.com^`, options aside). Comments (# ! [) and
other rules are left out. Hosts are compared in lower case without `www.`; entries are kept as
64-bit hashes, so a wrong hit has odds of about entries / 2**64.
"""

import functools
import gzip
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from sabia.core.errors import BadData, UsageError

SCORE = "blocked_url"
_HOSTS_LINE = re.compile(r"(?:0\.0\.0\.0|127\.0\.0\.1|::1?)\s+(\S+)")
_AD_RULE = re.compile(r"\|\|([^\s/^$*]+)\^(?:\$.*)?$")
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
_HOST = re.compile(r"[^\s/?#:@\\]+\.[^\s/?#:@\\.]+\.?|(?:\d{1,3}\.){3}\d{1,3}")
_MOST_PARTS = 8  # labels of a host and steps of a path that are looked up


@dataclass(frozen=True)
class BlockList:
    """Sorted hashes uint64[e], the category of each uint8[e], names of the categories."""

    hashes: np.ndarray
    category: np.ndarray
    categories: tuple[str, ...]

    def look_up(self, urls: Sequence[str | None]) -> np.ndarray:
        """The first category that blocks each URL as a place in `categories`, -1 where none does;
        int64[n]."""
        keys = [_keys(url or "") for url in urls]
        counts = np.array([len(own) for own in keys], np.int64)
        wanted = np.array([_hash(key) for own in keys for key in own], np.uint64)
        found = np.full(len(urls), -1)
        if not len(self.hashes) or not len(wanted):
            return found
        place = np.minimum(np.searchsorted(self.hashes, wanted), len(self.hashes) - 1)
        hit = np.flatnonzero(self.hashes[place] == wanted)[::-1]  # the widest entry is set last
        found[np.repeat(np.arange(len(urls)), counts)[hit]] = self.category[place[hit]]
        return found

    def reasons(self, urls: Sequence[str | None]) -> list[str]:
        """`blocked url: category`, or an empty string."""
        places = self.look_up(urls).tolist()
        return [f"blocked url: {self.categories[at]}" if at >= 0 else "" for at in places]


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def _parts(url: str) -> tuple[str, str]:
    """(host in lower case without port, user and www., the rest from `/` or `?`)."""
    bare = _SCHEME.sub("", url.strip()).removeprefix("//")
    size = re.match(r"[^/?#]*", bare)
    host = size[0] if size else ""
    rest = bare[len(host) :].partition("#")[0]
    host = host.rpartition("@")[2]
    host = host if host.startswith("[") else host.partition(":")[0]
    return host.lower().rstrip(".").removeprefix("www."), rest


def _keys(url: str) -> list[str]:
    """What may be listed of a URL, the widest first: its domains, then its paths."""
    host, rest = _parts(url)
    if not host:
        return []
    labels = host.split(".")
    first = max(len(labels) - _MOST_PARTS, 0)
    keys = [".".join(labels[i:]) for i in range(len(labels) - 1, first - 1, -1)]
    keys += [host] if first else []
    path = unquote(rest)
    cuts = [place for place, char in enumerate(path) if char in "/?" and place][:_MOST_PARTS]
    stems = dict.fromkeys(path[:cut].rstrip("/") for cut in [*cuts, len(path)])
    return keys + [f"{host}{stem}" for stem in stems if stem]


def entry(line: str) -> str:
    """The key of a line of a list, or an empty string where it has none."""
    line = line.strip()
    if not line or line[0] in "#![":
        return ""
    found = _HOSTS_LINE.match(line) or _AD_RULE.match(line)
    text = found[1] if found else line.partition(" #")[0].strip()
    if not found and (text.startswith(("@@", "|", "/")) or re.search(r"[\s*^$]", text[2:])):
        return ""
    host, rest = _parts(text.removeprefix("*.").removeprefix("."))
    if not _HOST.fullmatch(host):
        return ""
    return host + unquote(rest).rstrip("/")


def _files(path: str) -> Iterator[tuple[str, Path]]:
    """(category, file) of the files of a list."""
    root = Path(path)
    if not root.exists():
        raise UsageError(f"--block-urls: {path}: No such file or directory")
    files = sorted(root.rglob("*")) if root.is_dir() else [root]
    for file in files:
        stem = file.name.partition(".")[0]
        if root.is_dir() and (not file.is_file() or stem not in ("domains", "urls")):
            continue
        yield (file.parent.name if stem in ("domains", "urls") else stem), file


def _lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                yield line.decode("utf-8", "replace")
    except (OSError, EOFError) as error:
        raise BadData(f"--block-urls: {path}: {error}") from error


def digest(paths: Sequence[str]) -> str:
    """Hash of the files' content, for fingerprints."""
    total = hashlib.blake2b(digest_size=16)
    for path in paths:
        for category, file in _files(path):
            total.update(category.encode() + b"\0")
            with open(file, "rb") as data:
                while block := data.read(1 << 20):
                    total.update(block)
    return total.hexdigest()


@functools.lru_cache(maxsize=2)
def load(paths: tuple[str, ...]) -> BlockList:
    """The entries of all lists. Raises UsageError for a path that is not there or has none."""
    categories: dict[str, int] = {}
    blocks: list[np.ndarray] = []
    owners: list[np.ndarray] = []
    for path in paths:
        before = len(blocks)
        for category, file in _files(path):
            number = categories.setdefault(category, len(categories))
            keys = (entry(line) for line in _lines(file))
            own = np.fromiter((_hash(key) for key in keys if key), np.uint64)
            blocks += [own] if len(own) else []
            owners += [np.full(len(own), number, np.uint8)] if len(own) else []
        if len(blocks) == before:
            raise UsageError(f"--block-urls: {path}: no domain or address in it")
    if len(categories) > 255:
        raise UsageError(f"--block-urls: {len(categories)} categories (expected up to 255)")
    hashes = np.concatenate(blocks)
    order = np.argsort(hashes, kind="stable")
    return BlockList(hashes[order], np.concatenate(owners)[order], tuple(categories))
