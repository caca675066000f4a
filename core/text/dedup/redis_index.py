"""`--redis`: deduplicate against datasketch's MinHashLSH in Redis, and insert the kept documents.

The layout is that of datasketch 2.0 with storage_config {"type": "redis", "basename": NAME}. With
K = pickle(id) (protocol 4) and H_i = the slots of band i as big-endian uint32:
NAME_keys is a hash of K to NAME_keysK, a list of H_0 … H_b-1; NAME_bucket_i (i as big-endian
uint16) a hash of H_i to NAME_bucket_iH_i, a set of the K. sabia adds NAME_sabia, the parameters;
NAME_sabia_runs, a list of the keys of runs; NAME_sabia_origin, a hash of K to the number of the run
that inserted it. A run ignores what it and later runs inserted, so a repeated run gives the same
result. Nothing from Redis is unpickled. n-grams are not stored: similarity is the share of equal
slots, whose standard deviation is sqrt(s (1 - s) / slots).
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
from sabia.core.notes import progress
from sabia.core.options.dedup import DedupOptions
from sabia.core.shards.arrow_arrays import text_buffers
from sabia.core.shards.executors.processes import map_threads
from sabia.core.shards.sources import Source, batches_of
from sabia.core.shards.spools import Spool
from sabia.core.text.dedup import lsh
from sabia.core.text.dedup.clusters import Clusters, find_clusters
from sabia.core.text.dedup.signature_files import Corpus, blank_segment
from sabia.kernels.minhash.definitions import SketchConfig
from sabia.kernels.minhash.interface import signatures

URL_FORMAT = "redis://HOST:PORT/DB?name=NAME"
BATCH = 256  # documents per round trip
PROTOCOL = 4  # of the pickles that are keys: the default of Python 3.8 to 3.13, whatever runs here
TIMEOUTS_S = {"socket_timeout": 60.0, "socket_connect_timeout": 10.0}

# Arguments: the run number, the number of bands (0: only check), then K and H_0 … per document.
# A script runs atomically. It ends at a K of another run or program and returns it.
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
    """The index as it was before the run `key`, whose documents are added to it.

    `make` stores the parameters if there is no index yet. Raises UsageError where parameters
    differ, MissingBackend without the package, Failed if the server does not answer.
    """

    def __init__(self, url: str, config: DedupOptions, seed: int, key: str, make: bool = True):
        self.label = "--redis " + re.sub("//.*@", "//", url).partition("?")[0]  # without a password
        try:
            import redis

            options = redis.connection.parse_url(url)
        except ImportError as error:
            raise MissingBackend("--redis: package missing; pip install redis") from error
        except ValueError as error:
            raise UsageError(f"{self.label}: {error} (expected {URL_FORMAT})") from error
        self.config, self.sketch, self.key = config, lsh.sketch_of(config, seed), key.encode()
        name = options.pop("name", "")
        if not name:
            raise UsageError(f"{self.label}: no name (expected {URL_FORMAT})")
        if self.sketch.bands < 2:
            raise UsageError("--redis: datasketch takes two bands or more; lower --threshold")
        self.label, self.name, self.failure = f"{self.label}?name={name}", name, redis.RedisError
        pool = redis.ConnectionPool(**TIMEOUTS_S | options)
        self.client = redis.Redis(connection_pool=pool)
        identity = self._parameters(f"{self.sketch} threshold={config.threshold} ", make)
        runs = self._do(self.client.lrange, f"{name}_sabia_runs", 0, -1)
        self.number = runs.index(self.key) if self.key in runs else len(runs)
        # of the index and the runs before this one
        whole = b" ".join([identity, *runs[: self.number]])
        self.print = hashlib.blake2b(whole).hexdigest()[:32]

    def _do(self, call: Callable[..., Any], *words: object) -> Any:
        try:
            return call(*words)
        except (self.failure, TypeError) as error:  # TypeError: an option in the URL
            why = str(error).rpartition("caused error: ")[2]  # without the command, which is bytes
            raise Failed(f"{self.label}: {why}; fix it and run again") from error

    def _parameters(self, made: str, make: bool) -> bytes:
        """The parameters of the index, and random digits that identify it."""
        exists = self._do(self.client.exists, f"{self.name}_keys")
        if make and not exists:
            self._do(self.client.setnx, f"{self.name}_sabia", made + secrets.token_hex(16))
        stored: bytes = self._do(self.client.get, f"{self.name}_sabia") or b""
        if exists and not stored:
            raise UsageError(f"{self.label}: this index was not created by sabia; change ?name=")
        if stored and not stored.startswith(made.encode()):
            has = f"index has {stored!r}, this run {made!r}; use the same, or another name"
            raise UsageError(f"{self.label}: {has}")
        return stored

    def register(self) -> None:
        """Append this run to the list of runs, before the first document is compared."""
        runs = f"{self.name}_sabia_runs"
        if self.key not in self._do(self.client.lrange, runs, 0, -1):
            self.number = self._do(self.client.rpush, runs, self.key) - 1

    def _hashes(self, slots: np.ndarray) -> list[list[bytes]]:
        """bytes[n][bands]: datasketch's H of each document and band."""
        wide = np.ascontiguousarray(slots, ">u4").view(f"V{4 * self.sketch.rows}")
        return wide.reshape(len(slots), self.sketch.bands).tolist()

    def most_similar(self, slots: np.ndarray) -> Iterator[tuple[float, float, bytes]]:
        """(-similarity, run, K) of the most similar document to each of n; (1, 0, b"") if none."""
        pipe, name = self.client.pipeline(transaction=False), self.name.encode()
        buckets = [name + b"_bucket_" + n.to_bytes(2, "big") for n in range(self.sketch.bands)]
        for hashes in self._hashes(slots):
            pipe.sunion([bucket + one for bucket, one in zip(buckets, hashes, strict=True)])
        near = self._do(pipe.execute)
        keys = list(set().union(*near))
        for key in keys:
            pipe.hget(name + b"_sabia_origin", key)
            pipe.lrange(name + b"_keys" + key, 0, self.sketch.bands - 1)
        replies, known = self._do(pipe.execute), {}
        for key, order, hashes in zip(keys, replies[::2], replies[1::2], strict=True):
            there = b"".join(hashes)
            if len(there) not in (0, 4 * slots.shape[1]) or not (order or b"0").isdigit():
                raise BadData(f"{self.label}: {readable(key)!r} is damaged or of other parameters")
            if there and (order is None or int(order) < self.number):
                known[key] = float(order or "inf"), np.frombuffer(there, ">u4")
        for own, there in zip(slots, near, strict=True):
            like = [(key, *known[key]) for key in there & known.keys()]
            candidates = [(-float((other == own).mean()), order, key) for key, order, other in like]
            yield min(candidates, default=(1.0, 0.0, b""))

    def insert(self, ids: Sequence[str], slots: np.ndarray | None = None) -> None:
        """Add documents, each atomically; documents of this run are left unchanged.

        Without slots only check. Raises BadData if an id belongs to a document of another run.
        """
        hashes = [[]] * len(ids) if slots is None else self._hashes(slots)
        keys = [pickle.dumps(one, PROTOCOL) for one in ids]
        words = [word for key, each in zip(keys, hashes, strict=True) for word in (key, *each)]
        bands = 0 if slots is None else self.sketch.bands
        taken = self._do(self.client.eval, INSERT, 1, self.name, self.number, bands, *words)
        if taken is not None:
            why = "belongs to another document there; ids must differ between runs"
            raise BadData(f"{self.label}: the id {readable(taken)!r} {why}")


def readable(key: bytes) -> str:
    """The id in a key; a key that is not a pickled string is shown as its bytes."""
    # the text follows a header of one of these lengths and ends two bytes early
    for start in (4, 7, 13, 16):
        text = key[start:-2].decode("utf-8", "replace")
        if pickle.dumps(text, PROTOCOL) == key:
            return text
    return key.decode("utf-8", "backslashreplace")


def read_signatures(
    sources: Sequence[Source], sketch: SketchConfig, engine: str, jobs: int
) -> np.ndarray:
    """The slots of all documents, uint32[n, bands * rows], in an unnamed file."""

    def work(item: tuple[int, pa.RecordBatch]) -> np.ndarray:
        return signatures(*text_buffers(item[1].column("text")), sketch, engine)

    spool, count = Spool(), 0
    for slots in map_threads(work, batches_of(sources, ["text"]), jobs):
        spool.append(slots)
        count += len(slots)
    return spool.array(np.uint32, (count, sketch.bands * sketch.rows))


def find_and_insert(
    index: RedisIndex, sources: Sequence[Source], corpus: Corpus, engine: str, jobs: int
) -> tuple[Clusters, Corpus]:
    """Clusters over the matching documents of the index, followed by the rows of the corpus.

    Inserts the kept documents. Raises BadData where an id cannot be a key.
    """
    config, slots = index.config, read_signatures(sources, index.sketch, engine, jobs)
    if len(slots) != corpus.count:
        raise BadData("an input changed while it was being deduplicated; run again")
    index.register()
    counted = [row + np.flatnonzero(counts) for row, counts in corpus.column("counts")]
    rows = np.concatenate([np.empty(0, np.int64), *counted])
    least = config.threshold * config.verify
    matches = [
        (row, *match)
        for batch in _batches(rows, "asking Redis")
        for row, match in zip(batch.tolist(), index.most_similar(slots[batch]), strict=True)
        if -match[0] >= least
    ]
    known = sorted({(order, key) for _, _, order, key in matches})
    number_of = {key: number for number, (_, key) in enumerate(known)}
    ids = pa.array([readable(key) for _, key in known], pa.string())
    blank = blank_segment(ids, corpus.bands, config.with_shingles)
    extended = Corpus([blank, *corpus.segments], corpus.starts + len(known))
    near = [(number_of[key], len(known) + row, -unlike) for row, unlike, _, key in matches]
    clusters = find_clusters(extended, config, engine, len(known), near)
    kept = np.intersect1d(clusters.rows(kept=True, first=len(known)) - len(known), rows)
    ids = corpus.take(kept)
    counts = pc.value_counts(ids)
    repeated = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    if len(repeated):
        name = repeated[0].as_py()
        raise BadData(f"{index.label}: the id {name!r} is twice in the input; ids must be unique")
    for low in range(0, len(kept), BATCH):  # check all before the first is inserted
        index.insert(ids[low : low + BATCH].to_pylist())
    for number, batch in enumerate(_batches(kept, "inserting into Redis")):
        index.insert(ids.slice(number * BATCH, BATCH).to_pylist(), slots[batch])
    params = f"num_perm={config.permutations}, params=({index.sketch.bands}, {index.sketch.rows})"
    done = f"{len(matches):,} documents similar to an indexed one, {len(kept):,} inserted"
    notes.note(f"{index.label}: {done}; MinHashLSH({params}) reads it")
    return clusters, extended


def _batches(rows: np.ndarray, label: str) -> Iterator[np.ndarray]:
    with progress(len(rows), f"dedup: {label}") as bar:
        for low in range(0, len(rows), BATCH):
            stop.check()
            yield (part := rows[low : low + BATCH])
            bar.advance(len(part))
