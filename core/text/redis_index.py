"""An index of documents in Redis that other programs read as their own: datasketch's MinHashLSH.

The layout is that of datasketch 2.0 with storage_config {"type": "redis", "basename": NAME}. With
K = pickle(id) (protocol 4) and H_i = the slots of band i as big-endian uint32:
NAME_keys is a hash of K to NAME_keysK, a list of H_0 … H_b-1; NAME_bucket_i (i as big-endian
uint16) a hash of H_i to NAME_bucket_iH_i, a set of the K. Beside these, our own: NAME_sabia, the
parameters as JSON; NAME_sabia_runs, a list of the keys of runs; NAME_sabia_origin, a hash of K to
the number of the run that inserted it. A run passes over what it and later runs inserted, so
running again gives the same answer. Documents go in by MULTI/EXEC, each whole or not at all.
Keys of other programs are unpickled without any class: what lies in Redis cannot run code here.
"""

import hashlib
import io
import json
import pickle
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import numpy as np

from sabia.core.errors import BadData, Failed, MissingBackend, UsageError
from sabia.core.options.dedup import DedupOptions
from sabia.core.text import lsh

VERSION = 1
FORM = "redis://HOST:PORT/DB?name=NAME"
TIMEOUT_S = 60.0
_SCHEMES = ("redis", "rediss", "unix")
_LATER = np.inf  # the order of documents that other programs inserted


@dataclass(frozen=True)
class Address:
    """Server (its URL may hold a password), basename of the index, both as messages say them."""

    server: str
    name: bytes
    said: str

    @classmethod
    def of(cls, text: str) -> "Address":
        """redis://host:6379/0?name=web; raises UsageError."""
        try:
            parts = urlsplit(text)
        except ValueError as error:
            raise UsageError(f"--redis: {error} (expected {FORM})") from error
        host = parts.netloc.rpartition("@")[2]
        said = f"--redis {parts.scheme}://{host}{parts.path}"
        asked = parse_qs(parts.query)
        names = asked.pop("name", [])
        if parts.scheme not in _SCHEMES or len(names) != 1:
            raise UsageError(f"{said}: expected {FORM}")
        server = parts._replace(query=urlencode(asked, doseq=True)).geturl()
        return cls(server, names[0].encode(), f"{said}?name={names[0]}")


@dataclass(frozen=True)
class Known:
    """An indexed document: its key, its place in the order of runs, slots uint32[bands * rows]."""

    key: bytes
    order: float
    slots: np.ndarray


def placed(one: Known) -> tuple[float, bytes]:
    """What indexed documents are sorted by, the earliest first."""
    return one.order, one.key


class RedisIndex:
    """The index as it was before the run `key`, whose documents it takes.

    `make` writes the parameters down where there is no index yet. Raises UsageError where
    parameters differ, MissingBackend without the package, Failed where the server does not serve.
    """

    def __init__(self, url: str, config: DedupOptions, seed: int, key: str, make: bool = True):
        self.address, self.key = Address.of(url), key
        self.sketch = lsh.sketch_of(config, seed)
        if self.sketch.bands < 2:
            raise UsageError("--redis: datasketch takes two bands or more; lower --threshold")
        name = self.address.name
        self.documents = name + b"_keys"
        self.buckets = [name + b"_bucket_" + i.to_bytes(2, "big") for i in range(self.sketch.bands)]
        self.about, self.runs = name + b"_sabia", name + b"_sabia_runs"
        self.origin = name + b"_sabia_origin"
        self.client = _client(self.address)
        with self._served():
            self.identity = self._agree(_made(config, seed), make)
            runs = self.client.lrange(self.runs, 0, -1)
        said = key.encode()
        self.number = runs.index(said) if said in runs else len(runs)
        self.before = runs[: self.number]

    @property
    def print(self) -> str:
        """A hash of which index this is and of the runs that it holds before ours."""
        return hashlib.blake2b(b" ".join([self.identity, *self.before])).hexdigest()[:32]

    def _agree(self, made: dict[str, Any], make: bool) -> bytes:
        """The identity of the index, whose parameters are ours."""
        found = self.client.get(self.about)
        if found is None and self.client.exists(self.documents):
            raise UsageError(
                f"{self.address.said}: another program began this index, over n-grams of its own;"
                " give another name"
            )
        if found is None and not make:
            return b""
        if found is None:
            fresh = json.dumps(made | {"identity": secrets.token_hex(16)})
            self.client.set(self.about, fresh, nx=True)
            found = self.client.get(self.about)
        try:
            said = dict(json.loads(found))
        except (ValueError, TypeError) as error:
            raise BadData(f"{self.address.said}: its parameters are damaged ({error})") from error
        for name, value in made.items():
            if said.get(name) != value:
                has = f"index has {name} {said.get(name)!r}, this run {value!r}"
                raise UsageError(f"{self.address.said}: {has}; use the same, or another name")
        return bytes(said["identity"], "ascii")

    def register(self) -> None:
        """Take our place in the order of runs, before the first document goes in."""
        with self._served():
            if self.key.encode() not in self.client.lrange(self.runs, 0, -1):
                self.number = self.client.rpush(self.runs, self.key) - 1

    def candidates(self, slots: np.ndarray) -> list[list[Known]]:
        """Of n documents, those of earlier runs that share a band, earliest first."""
        pipe = self.client.pipeline(transaction=False)
        for hashes in self._hashes(slots):
            pipe.sunion([bucket + one for bucket, one in zip(self.buckets, hashes, strict=True)])
        with self._served():
            sets = [set(keys) for keys in pipe.execute()]
        known = self._known(list(set().union(*sets)))
        return [sorted((known[key] for key in keys & known.keys()), key=placed) for keys in sets]

    def _known(self, keys: list[bytes]) -> dict[bytes, Known]:
        """Those of the keys that are documents of earlier runs."""
        if not keys:
            return {}
        pipe = self.client.pipeline(transaction=False)
        for key in keys:
            pipe.lrange(self.documents + key, 0, len(self.buckets) - 1)
        with self._served():
            hashes = pipe.execute()
            origins = self.client.hmget(self.origin, keys)
        orders = [_LATER if said is None else int(said) for said in origins]
        return {
            key: Known(key, order, self._slots(key, one))
            for key, order, one in zip(keys, orders, hashes, strict=True)
            if one and (order < self.number or order == _LATER)
        }

    def _slots(self, key: bytes, hashes: list[bytes]) -> np.ndarray:
        whole = b"".join(hashes)
        if len(whole) != 4 * self.sketch.bands * self.sketch.rows:
            raise BadData(
                f"{self.address.said}: {readable(key)!r} has {len(hashes)} bands in"
                f" {len(whole)} bytes (expected {self.sketch.bands} of {4 * self.sketch.rows});"
                " a program inserted it with other parameters"
            )
        return np.frombuffer(whole, ">u4")

    def refuse_taken(self, ids: Sequence[str]) -> None:
        """Raise BadData where an id stands for a document of another run or program."""
        keys = [_key(one) for one in ids]
        with self._served():
            there = self.client.hmget(self.documents, keys)
            origins = self.client.hmget(self.origin, keys)
        own = str(self.number).encode()
        for one, taken, origin in zip(ids, there, origins, strict=True):
            if taken is not None and origin != own:
                raise BadData(
                    f"{self.address.said}: the id {one!r} stands for another document there;"
                    " ids have to differ between runs"
                )

    def insert(self, ids: Sequence[str], slots: np.ndarray) -> None:
        """Add documents, all or none; what is there already stays as it is."""
        keys, hashes = [_key(one) for one in ids], self._hashes(slots)
        pipe = self.client.pipeline(transaction=True)
        pipe.hset(self.documents, mapping={key: self.documents + key for key in keys})
        pipe.hset(self.origin, mapping=dict.fromkeys(keys, self.number))
        for key, each in zip(keys, hashes, strict=True):
            pipe.delete(self.documents + key)
            pipe.rpush(self.documents + key, *each)
        for bucket, column in zip(self.buckets, zip(*hashes, strict=True), strict=True):
            pipe.hset(bucket, mapping={one: bucket + one for one in column})
            for key, one in zip(keys, column, strict=True):
                pipe.sadd(bucket + one, key)
        with self._served():
            pipe.execute()

    def _hashes(self, slots: np.ndarray) -> list[list[bytes]]:
        """bytes[n][bands]: datasketch's H of each document and band."""
        wide = np.ascontiguousarray(slots, ">u4").view(f"V{4 * self.sketch.rows}")
        return wide.reshape(len(slots), self.sketch.bands).tolist()

    @contextmanager
    def _served(self) -> Iterator[None]:
        import redis

        try:
            yield
        except redis.RedisError as error:
            why = str(error).rpartition("caused error: ")[2]  # without the command, which is bytes
            raise Failed(f"{self.address.said}: {why}; mend it and run again") from error


def _client(address: Address) -> Any:
    try:
        import redis
    except ImportError as error:
        raise MissingBackend("--redis: package 'redis' is missing; pip install redis") from error
    try:
        return redis.Redis.from_url(
            address.server, socket_timeout=TIMEOUT_S, socket_connect_timeout=10.0
        )
    except (ValueError, TypeError) as error:
        raise UsageError(f"{address.said}: {error}") from error


def _made(config: DedupOptions, seed: int) -> dict[str, Any]:
    """What all runs over an index must have in common."""
    sketch = lsh.sketch_of(config, seed)
    said = {name: getattr(config, name) for name in ("ngram", "permutations", "threshold")}
    return said | {"version": VERSION, "bands": sketch.bands, "rows": sketch.rows, "seed": seed}


def _key(one: str) -> bytes:
    return pickle.dumps(one, protocol=4)  # the default of Python 3.8 to 3.13, of whatever runs here


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """No class and no function at all."""
        raise pickle.UnpicklingError(f"{module}.{name} in a key")


def readable(key: bytes) -> str:
    """The id in a key; a key that is no plain value is shown as its bytes."""
    try:
        return str(_Plain(io.BytesIO(key)).load())
    except Exception:  # whatever bytes of strangers make the unpickler raise
        return key.decode("utf-8", "backslashreplace")


def names(known: Iterable[Known]) -> list[str]:
    """The ids of indexed documents."""
    return [readable(one.key) for one in known]
