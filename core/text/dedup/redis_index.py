"""`--redis`: deduplicate against datasketch's MinHashLSH in Redis, and insert what stays.

The layout is that of datasketch 2.0 with storage_config {"type": "redis", "basename": NAME}. With
K = pickle(id) (protocol 4) and H_i = the slots of band i as big-endian uint32:
NAME_keys is a hash of K to NAME_keysK, a list of H_0 … H_b-1; NAME_bucket_i (i as big-endian
uint16) a hash of H_i to NAME_bucket_iH_i, a set of the K. Our own: NAME_sabia, the parameters;
NAME_sabia_runs, a list of the keys of runs; NAME_sabia_origin, a hash of K to the number of the run
that inserted it. A run passes over what it and later runs inserted, so running again gives the same
answer. Nothing from Redis is unpickled. There are no n-grams: similarity is the share of equal
slots, whose deviation is sqrt(s (1 - s) / slots).
"""

import hashlib
import pickle
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sabia.core import notes, stop
from sabia.core.errors import BadData, Failed, MissingBackend, UsageError
from sabia.core.options.dedup import DedupOptions
from sabia.core.progress import progress
from sabia.core.shards.sources import Source
from sabia.core.text.dedup import lsh
from sabia.core.text.dedup.clusters import KEPT, Clusters, find_clusters
from sabia.core.text.dedup.signature_files import Corpus, blank_segment
from sabia.core.text.dedup.signature_pass import read_signatures

FORM = "redis://HOST:PORT/DB?name=NAME"
BATCH = 256  # documents of a round trip
PROTOCOL = 4  # of the pickles that are keys: the default of Python 3.8 to 3.13, whatever runs here
WAITS_S = {"socket_timeout": 60.0, "socket_connect_timeout": 10.0}

# Arguments: the number of the run, of bands (0: only look), then K and H_0 … of each document.
# A script runs alone and whole. It ends at a K of another run or program, and answers it.
INSERT = """
local name, run, bands = KEYS[1], ARGV[1], tonumber(ARGV[2])
local keys, origin = name .. '_keys', name .. '_sabia_origin'
for first = 3, #ARGV, bands + 1 do
  local key = ARGV[first]
  if redis.call('HEXISTS', keys, key) == 1 then
    if redis.call('HGET', origin, key) ~= run then return key end
  elseif bands > 0 then
    for band = 0, bands - 1 do
      local bucket, hash = name .. '_bucket_' .. struct.pack('>H', band), ARGV[first + 1 + band]
      redis.call('HSET', bucket, hash, bucket .. hash)
      redis.call('SADD', bucket .. hash, key)
    end
    redis.call('DEL', keys .. key)
    redis.call('RPUSH', keys .. key, unpack(ARGV, first + 1, first + bands))
    redis.call('HSET', origin, key, run)
    redis.call('HSET', keys, key, keys .. key)
  end
end
"""


class RedisIndex:
    """The index as it was before the run `key`, whose documents it takes.

    `make` writes the parameters down where there is no index yet. Raises UsageError where
    parameters differ, MissingBackend without the package, Failed where the server does not serve.
    """

    def __init__(self, url: str, config: DedupOptions, seed: int, key: str, make: bool = True):
        self.said = "--redis " + re.sub("//.*@", "//", url).partition("?")[0]  # without a password
        try:
            import redis

            options = redis.connection.parse_url(url)
        except ImportError as error:
            raise MissingBackend("--redis: package missing; pip install redis") from error
        except ValueError as error:
            raise UsageError(f"{self.said}: {error} (expected {FORM})") from error
        self.config, self.sketch, self.key = config, lsh.sketch_of(config, seed), key.encode()
        name = options.pop("name", "")
        if not name:
            raise UsageError(f"{self.said}: no name (expected {FORM})")
        if self.sketch.bands < 2:
            raise UsageError("--redis: datasketch takes two bands or more; lower --threshold")
        self.said, self.name, self.failure = f"{self.said}?name={name}", name, redis.RedisError
        pool = redis.ConnectionPool(**WAITS_S | options)
        self.client = redis.Redis(connection_pool=pool)
        identity = self._agree(f"{self.sketch} threshold={config.threshold} ", make)
        runs = self._do(self.client.lrange, f"{name}_sabia_runs", 0, -1)
        self.number = runs.index(self.key) if self.key in runs else len(runs)
        whole = b" ".join([identity, *runs[: self.number]])
        self.print = hashlib.blake2b(whole).hexdigest()[:32]  # of the index and the runs before us

    def _do(self, call: Callable[..., Any], *words: Any) -> Any:
        try:
            return call(*words)
        except (self.failure, TypeError) as error:  # TypeError: an option in the URL
            why = str(error).rpartition("caused error: ")[2]  # without the command, which is bytes
            raise Failed(f"{self.said}: {why}; mend it and run again") from error

    def _agree(self, made: str, make: bool) -> bytes:
        """What the index was made with, and random digits that no other index has."""
        there = self._do(self.client.exists, f"{self.name}_keys")
        if make and not there:
            self._do(self.client.setnx, f"{self.name}_sabia", made + secrets.token_hex(16))
        found: bytes = self._do(self.client.get, f"{self.name}_sabia") or b""
        if there and not found:
            raise UsageError(f"{self.said}: another program began this index; give another name")
        if found and not found.startswith(made.encode()):
            has = f"index has {found!r}, this run {made!r}; use the same, or another name"
            raise UsageError(f"{self.said}: {has}")
        return found

    def register(self) -> None:
        """Take our place in the order of runs, before the first document is compared."""
        runs = f"{self.name}_sabia_runs"
        if self.key not in self._do(self.client.lrange, runs, 0, -1):
            self.number = self._do(self.client.rpush, runs, self.key) - 1

    def _hashes(self, slots: np.ndarray) -> list[list[bytes]]:
        """bytes[n][bands]: datasketch's H of each document and band."""
        wide = np.ascontiguousarray(slots, ">u4").view(f"V{4 * self.sketch.rows}")
        return wide.reshape(len(slots), self.sketch.bands).tolist()

    def likest(self, slots: np.ndarray) -> Iterator[tuple[float, float, bytes]]:
        """(-similarity, order, K) of the likest document to each of n, (1, 0, b"") without any."""
        pipe, name = self.client.pipeline(transaction=False), self.name.encode()
        buckets = [name + b"_bucket_" + n.to_bytes(2, "big") for n in range(self.sketch.bands)]
        for hashes in self._hashes(slots):
            pipe.sunion([bucket + one for bucket, one in zip(buckets, hashes, strict=True)])
        near = self._do(pipe.execute)
        keys = list(set().union(*near))
        for key in keys:
            pipe.hget(name + b"_sabia_origin", key)
            pipe.lrange(name + b"_keys" + key, 0, self.sketch.bands - 1)
        held, known = self._do(pipe.execute), {}
        for key, order, hashes in zip(keys, held[::2], held[1::2], strict=True):
            there = b"".join(hashes)
            if len(there) not in (0, 4 * slots.shape[1]) or not (order or b"0").isdigit():
                raise BadData(f"{self.said}: {readable(key)!r} is damaged or of other parameters")
            if there and (order is None or int(order) < self.number):
                known[key] = float(order or "inf"), np.frombuffer(there, ">u4")
        for own, there in zip(slots, near, strict=True):
            like = [(key, *known[key]) for key in there & known.keys()]
            found = [(-float((other == own).mean()), order, key) for key, order, other in like]
            yield min(found, default=(1.0, 0.0, b""))

    def insert(self, ids: Sequence[str], slots: np.ndarray | None = None) -> None:
        """Add documents, each whole or not at all; those of this run stay as they are.

        Without slots only look. Raises BadData where an id stands for a document of others.
        """
        hashes = [[]] * len(ids) if slots is None else self._hashes(slots)
        keys = [pickle.dumps(one, PROTOCOL) for one in ids]
        words = [word for key, each in zip(keys, hashes, strict=True) for word in (key, *each)]
        bands = 0 if slots is None else self.sketch.bands
        taken = self._do(self.client.eval, INSERT, 1, self.name, self.number, bands, *words)
        if taken is not None:
            why = "stands for another document there; ids have to differ between runs"
            raise BadData(f"{self.said}: the id {readable(taken)!r} {why}")


def readable(key: bytes) -> str:
    """The id in a key; a key that is no pickled string is shown as its bytes."""
    for start in (4, 7, 13, 16):  # the text lies behind a head of this length, before two bytes
        text = key[start:-2].decode("utf-8", "replace")
        if pickle.dumps(text, PROTOCOL) == key:
            return text
    return key.decode("utf-8", "backslashreplace")


def take_out(
    index: RedisIndex, sources: Sequence[Source], corpus: Corpus, engine: str, jobs: int
) -> tuple[Clusters, Corpus]:
    """Clusters of the indexed documents that some are like and, as rows behind them, the corpus.

    Inserts what stays. Raises BadData where an id cannot be a key.
    """
    config, slots = index.config, read_signatures(sources, index.sketch, engine, jobs)
    if len(slots) != corpus.count:
        raise BadData("an input changed while it was being deduplicated; run again")
    index.register()
    rows, least = np.flatnonzero(corpus.counts > 0), config.threshold * config.verify
    like = [
        (row, *found)
        for batch in _batches(rows, "asking Redis")
        for row, found in zip(batch.tolist(), index.likest(slots[batch]), strict=True)
        if -found[0] >= least
    ]
    known = sorted({(order, key) for _, _, order, key in like})
    place = {key: number for number, (_, key) in enumerate(known)}
    ids = pa.array([readable(key) for _, key in known], pa.string())
    blank = blank_segment(ids, corpus.bands, config.with_shingles)
    whole = Corpus([blank, *corpus.segments], corpus.starts + len(known))
    near = [(place[key], len(known) + row, -unlike) for row, unlike, _, key in like]
    clusters = find_clusters(whole, config, engine, len(known), near)
    stay = np.flatnonzero((clusters.reason[len(known) :] == KEPT) & (corpus.counts > 0))
    ids = corpus.take(stay)
    counts = pc.value_counts(ids)
    twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    if len(twice):
        raise BadData(f"{index.said}: the id {twice[0].as_py()!r} occurs twice; it is a key")
    for low in range(0, len(stay), BATCH):  # all, before the first goes in
        index.insert(ids[low : low + BATCH].to_pylist())
    for number, batch in enumerate(_batches(stay, "inserting into Redis")):
        index.insert(ids.slice(number * BATCH, BATCH).to_pylist(), slots[batch])
    params = f"num_perm={config.permutations}, params=({index.sketch.bands}, {index.sketch.rows})"
    done = f"{len(like):,} documents like one there, {len(stay):,} inserted"
    notes.note(f"{index.said}: {done}; MinHashLSH({params}) reads it")
    return clusters, whole


def _batches(rows: np.ndarray, said: str) -> Iterator[np.ndarray]:
    with progress(len(rows), f"dedup: {said}") as bar:
        for low in range(0, len(rows), BATCH):
            stop.check()
            yield (part := rows[low : low + BATCH])
            bar.advance(len(part))
