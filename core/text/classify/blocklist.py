"""Lists of blocked domains and URLs: nine bytes per entry, one vectorized look-up per batch.

A list is a file, plain or .gz, or a directory of categories like the UT1 lists of Toulouse
(`adult/domains`, `adult/urls`, …). The category is the file's name up to the first dot; for files
named `domains` or `urls` it is the name of the directory. A line is a domain (`example.com`,
`*.example.com`), which blocks its subdomains too; an address (`example.com/path`, with or without
scheme), which blocks what is below it (prefixes end at `/`, `?` or the end); a line of a hosts file
(`0.0.0.0 host`); or the rule of an ad blocker for a domain (`||example.com^`, its options are
ignored). Comments (# ! [) and other rules are skipped. Hosts are compared in lower case without
`www.`. Entries are 64-bit hashes: the probability of a false match is about entries / 2**64.
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
_MAX_PARTS = 8  # labels of a host, and components of a path, that are looked up


@dataclass(frozen=True)
class BlockList:
    """Sorted hashes uint64[e], the category of each uint8[e], names of the categories."""

    hashes: np.ndarray
    category: np.ndarray
    categories: tuple[str, ...]

    def look_up(self, urls: Sequence[str | None]) -> np.ndarray:
        """int64[n]: index in `categories` of the first one that blocks each URL; -1 for none."""
        keys = [_keys(url or "") for url in urls]
        counts = np.array([len(keys_of_url) for keys_of_url in keys], np.int64)
        hashes = np.array([_hash(key) for keys_of_url in keys for key in keys_of_url], np.uint64)
        categories = np.full(len(urls), -1)
        if not len(self.hashes) or not len(hashes):
            return categories
        index = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        match = np.flatnonzero(self.hashes[index] == hashes)[::-1]  # the widest entry is set last
        categories[np.repeat(np.arange(len(urls)), counts)[match]] = self.category[index[match]]
        return categories

    def reasons(self, urls: Sequence[str | None]) -> list[str]:
        """`blocked url: category`, or an empty string."""
        indices = self.look_up(urls).tolist()
        return [f"blocked url: {self.categories[i]}" if i >= 0 else "" for i in indices]


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
    """The keys that may block a URL, the widest first: its domains, then its paths."""
    host, rest = _parts(url)
    if not host:
        return []
    labels = host.split(".")
    first = max(len(labels) - _MAX_PARTS, 0)
    keys = [".".join(labels[i:]) for i in range(len(labels) - 1, first - 1, -1)]
    keys += [host] if first else []
    path = unquote(rest)
    cuts = [i for i, char in enumerate(path) if char in "/?" and i][:_MAX_PARTS]
    stems = dict.fromkeys(path[:cut].rstrip("/") for cut in [*cuts, len(path)])
    return keys + [f"{host}{stem}" for stem in stems if stem]


def entry(line: str) -> str:
    """The key of one line of a list; empty for comments and other rules."""
    line = line.strip()
    if not line or line[0] in "#![":
        return ""
    match = _HOSTS_LINE.match(line) or _AD_RULE.match(line)
    text = match[1] if match else line.partition(" #")[0].strip()
    if not match and (text.startswith(("@@", "|", "/")) or re.search(r"[\s*^$]", text[2:])):
        return ""
    host, rest = _parts(text.removeprefix("*.").removeprefix("."))
    if not _HOST.fullmatch(host):
        return ""
    return host + unquote(rest).rstrip("/")


def _files(path: str) -> Iterator[tuple[str, Path]]:
    """(category, path) of each file of a list."""
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
    """The entries of all lists. Raises UsageError for a path that does not exist or has none."""
    categories: dict[str, int] = {}
    blocks: list[np.ndarray] = []
    owners: list[np.ndarray] = []
    for path in paths:
        before = len(blocks)
        for category, file in _files(path):
            number = categories.setdefault(category, len(categories))
            keys = (entry(line) for line in _lines(file))
            hashes = np.fromiter((_hash(key) for key in keys if key), np.uint64)
            if len(hashes):
                blocks.append(hashes)
                owners.append(np.full(len(hashes), number, np.uint8))
        if len(blocks) == before:
            raise UsageError(f"--block-urls: {path}: the list has no domain or address")
    if len(categories) > 255:
        raise UsageError(f"--block-urls: {len(categories)} categories (expected up to 255)")
    all_hashes = np.concatenate(blocks)
    order = np.argsort(all_hashes, kind="stable")
    return BlockList(all_hashes[order], np.concatenate(owners)[order], tuple(categories))
