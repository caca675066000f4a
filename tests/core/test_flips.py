"""Single flipped bits in every kind of file that commands keep: found, or without effect.

`pytest -q -s -m slow tests/core/test_flips.py | grep '^|'` prints the table of RESULTS.md.
"""

import contextlib
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from in_process import sabia, stage

from sabia.core import digests
from sabia.core.errors import BadData
from sabia.core.generate.cache import CallCache
from sabia.core.shards.atomic import read_json
from sabia.core.shards.inputs import from_path
from sabia.core.shards.job import Job
from sabia.core.shards.manifest import rows_made
from sabia.core.shards.outputs import open_file, read_metadata
from sabia.core.shards.token_rows import arrow_messages
from sabia.core.shards.token_rows.row_store import open_row_files
from sabia.core.shards.token_rows.row_writer import IndexedRows
from sabia.core.text.contamination.benchmark_index import BenchmarkItem, Index
from sabia.core.text.dedup.phases import _stored
from sabia.core.text.dedup.removal_pass import RemovalPlan
from sabia.core.text.dedup.signature_files import Segment
from sabia.core.text.dedup.span_cuts import CutPolicy, Cuts
from sabia.core.text.tokenize.packing import PackedRows, to_batch
from sabia.core.text.tokenize.token_files import MegatronSink
from sabia.core.train.token_rows import TokenRows
from sabia.core.web import page_digests
from sabia.core.web.frontier import DONE, GIVEN_UP, DiscoveredUrl, Frontier, Visit
from sabia.core.web.robots import RobotsFile

Read = Callable[[Path], Any]
WORDS = ["uma", "corpus", "língua", "the", "of", "model", "東京", "data.\n", "as it is"]


def documents(rows: int) -> pa.RecordBatch:
    """Random documents with an extra column, nulls, named scores; a third are copies."""
    draw = random.Random(rows)
    texts = [" ".join(draw.choices(WORDS, k=draw.randrange(1, 80))) for _ in range(rows)]
    texts = [draw.choice(texts) if draw.random() < 0.3 else text for text in texts]
    columns = {
        "id": pa.array([f"d{n}" for n in range(rows)]),
        "text": pa.array(texts),
        "url": pa.array([None if n % 3 else f"http://a.example/{n // 6}" for n in range(rows)]),
        "source": pa.array(["web"] * rows),
        "scores": pa.array([{"edu": draw.random(), "lid": None} for _ in range(rows)]),
        "votes": pa.array([draw.randrange(99) if n % 5 else None for n in range(rows)]),
        "vector": pa.array([[draw.gauss(0, 1) for _ in range(4)] for _ in range(rows)]),
    }
    return pa.RecordBatch.from_pydict(columns)


def shard(rows: int, ending: str) -> Callable[[Path], tuple[Path, Read]]:
    """A shard of documents, and what a stage reads of it."""

    def make(folder: Path) -> tuple[Path, Read]:
        path, batch = folder / f"a.{ending}", documents(rows)
        if ending == "arrows":
            with path.open("wb") as file:
                writer = digests.ArrowRows(file, batch.schema)
                for start in range(0, rows, 997):
                    writer.write(batch.slice(start, 997))
                writer.close()
        else:
            with open_file(str(path), batch.schema, {"fingerprint": "a"}) as file:
                for start in range(0, rows, 1_000):
                    file.write(batch.slice(start, 1_000))

        def read(path: Path) -> Any:
            [source] = from_path(str(path), "document")
            return source.rows(), pa.Table.from_batches(list(source.batches()))

        return path, read

    return make


def finished_output(folder: Path) -> tuple[Path, Read]:
    """An output that a repeated run would skip: another provenance makes it again."""
    path, _ = shard(3_000, "parquet")(folder)

    def read(path: Path) -> Any:
        rows = rows_made(str(path), {"fingerprint": "a"})
        if rows is None:
            raise BadData(f"{path}: is made again")
        return rows, read_metadata(str(path))

    return path, read


def inputs(folder: Path, rows: int = 300) -> Path:
    """Two shards of documents in a folder beside."""
    where = folder.with_name(f"{folder.name}-in")
    where.mkdir()
    for part in range(2):
        batch = documents(rows).slice(part * rows // 2, rows // 2)
        pq.write_table(pa.Table.from_batches([batch]), where / f"{part}.parquet")
    return where


def manifest(folder: Path) -> tuple[Path, Read]:
    """`_manifest.json` of an output directory."""
    stage("dedup", inputs=[str(inputs(folder))], out=folder, method="url")

    def read(path: Path) -> Any:
        try:
            content = read_json(path)
        except ValueError as error:
            raise BadData(f"{path}: {str(error).splitlines()[0]}") from error
        return {name: content[name] for name in ("command", "shards", "options", "seed")}

    return folder / "_manifest.json", read


METHODS: dict[str, dict[str, Any]] = {
    "exact": {"engine": "numpy"},
    "minhash": {"engine": "numpy"},
    "substring": {"span": 30, "engine": "numpy"},
    "line": {"unit": "line", "engine": "numpy"},
    "url": {"keep": "first"},
    "semantic": {"embeddings": "vector"},
}


def scratch(method: str, what: str) -> Callable[[Path], tuple[Path, Read]]:
    """The sketch of a shard, or the plan of all, which phases of dedup leave for one another."""

    def make(folder: Path) -> tuple[Path, Read]:
        given = {"inputs": [str(inputs(folder))], "method": method, **METHODS[method],
                 "scratch": str(folder), "out": folder.with_name(f"{folder.name}-out")}  # fmt: skip
        for phase in ("sketch", "compare"):
            stage("dedup", **given, phase=phase)
        path = sorted(folder.glob(f"{what}-*"))[0]
        if what == "plan":
            return path, cuts if method in ("substring", "line") else removals
        return path, segment if method in ("exact", "minhash") else sketch

    return make


def sketch(path: Path) -> Any:
    """The content of a sketch that is a stream."""
    return [(ids.to_pylist(), [a.tobytes() for a in arrays]) for _, ids, arrays in _stored([path])]


def segment(path: Path) -> Any:
    """The content of a sketch of MinHash, or of a segment of an index."""
    opened = Segment.open(path)
    return opened.rows, opened.bands, {n: s.file.read() for n, s in opened.spools.items()}


def cuts(path: Path) -> Any:
    """The content of a plan that cuts texts."""
    plan = Cuts.open(path, CutPolicy("cut", 0.5, "line"))
    assert plan.count
    mine = plan.of_rows(0, 300)
    return plan.starts, mine.tobytes(), plan.kept_ids(mine["kept"]).to_pylist()


def removals(path: Path) -> Any:
    """The content of a plan that removes documents."""
    plan = RemovalPlan.open(path)
    return (
        plan.starts,
        [b"".join(p.tobytes() for p in plan.rows(n)) for n in (0, 1)],
        plan.clusters().to_pylist(),
    )


def dedup_index(folder: Path) -> tuple[Path, Read]:
    """`--index`, as `--against` reads it."""
    given = inputs(folder)
    index = folder / "index"
    out = folder.with_name(f"{folder.name}-out")
    stage("dedup", inputs=[str(given / "0.parquet")], out=out / "0", engine="numpy",
          index=str(index))  # fmt: skip
    words = ["dedup", given / "1.parquet", "-o", out / "1.jsonl", "--engine", "numpy", "--against",
             index, "--force", "-q"]  # fmt: skip

    def read(path: Path) -> Any:
        done = sabia(*words)
        if done.exit_code == 65:
            raise BadData(done.output.strip().splitlines()[-1].partition(": ")[2])
        assert done.exit_code == 0, done.output
        return (out / "1.jsonl").read_text()

    return index, read


def contamination_index(folder: Path) -> tuple[Path, Read]:
    """The index of benchmark items."""
    draw = random.Random(0)
    items = [
        BenchmarkItem("arc", f"i{n}", " ".join(draw.choices(WORDS, k=30)), ("a b", "c"), "b c d")
        for n in range(300)
    ]
    Index.build(items, "numpy").save(str(folder / "index.parquet"))

    def read(path: Path) -> Any:
        index = Index.load(str(path))
        parts = [(*p.owner, p.kind, p.words.tobytes()) for p in index.parts]
        return parts, index.tasks

    return folder / "index.parquet", read


def megatron(folder: Path) -> tuple[Path, Read]:
    """`.bin`, `.idx` and their record, as a repeated run sees them."""
    job = Job("tokenize", out=str(folder))
    draw = np.random.default_rng(0)
    tokens = [draw.integers(0, 60_000, draw.integers(1, 99)).tolist() for _ in range(300)]
    batch = pa.RecordBatch.from_pydict({"source": ["a"] * 300, "tokens": tokens})
    sink, made = MegatronSink(job, 60_000), {"fingerprint": "a"}
    sink.write(0, batch.schema, made, iter([batch]))

    def read(path: Path) -> Any:
        if (rows := sink.rows_made(0, made)) is None:
            raise BadData(f"{path}: is made again")
        return rows

    return folder, read


def frontier(stopped: bool) -> Callable[[Path], tuple[Path, Read]]:
    """The state of a crawl; stopped: with kill -9, so that a part of it is in SQLite's log."""

    def make(folder: Path) -> tuple[Path, Read]:
        state = folder / "frontier.sqlite"
        opened = Frontier(folder.with_name(f"{folder.name}-run") / state.name)
        for number in range(400):
            if number == 200:
                opened.digests.copy_log()
            fill(opened, number)
        if not stopped:
            opened.close()
        for path in opened.path.parent.iterdir():
            if not path.name.endswith("-shm"):  # which SQLite makes anew
                shutil.copy(path, folder / path.name)
        if stopped:
            assert state.with_name(f"{state.name}-wal").stat().st_size > 1 << 16
            opened.close()
        return folder, content_of_state

    return make


def fill(opened: Frontier, number: int) -> None:
    """A page and what the crawl learned from it, in one transaction."""
    opened.begin()
    opened.add([DiscoveredUrl(f"http://h{number % 7}.org/{number}-{k}", k / 9, 1, 0.5)
                for k in range(5)])  # fmt: skip
    entry, _ = opened.take(f"h{number % 7}.org")
    assert entry
    opened.visited(entry, Visit(float(number), "etag", "", "digest"))
    opened.keep_document(number, entry, {"text": " ".join(WORDS) * 9, "url": entry.url})
    opened.end(entry, DONE if number % 5 else GIVEN_UP, None if number % 5 else "HTTP 404")
    opened.judged(number, number / 400)
    opened.tally("word", WORDS[: number % 5], 0.5)
    opened.keep_robots(f"http://h{number % 7}.org", RobotsFile("Disallow: /x", "ok"), 1.0)
    opened.first_time(number.to_bytes(16, "big"))
    opened.rest("h1.org", 1e9 + number)
    opened.set_fact("counters", f'{{"fetched": {number}}}')
    opened.commit()


def content_of_state(folder: Path) -> Any:
    """All rows of all tables, and the order in which URLs would be fetched."""
    opened = Frontier(folder / "frontier.sqlite")
    try:
        tables = "pages", "visits", "documents", "judged", "figures", "seen", "robots", "facts"
        rows = [opened.db.execute(f"SELECT * FROM {name}").fetchall() for name in tables]
        order = [list(opened._pending(host, "number")) for host in sorted(opened.hosts())]
        return rows, order, opened.hosts()
    finally:
        opened.close()


def token_rows(ending: str) -> Callable[[Path], tuple[Path, Read]]:
    """A shard of token rows, half of them with padding, and what a training reads of it."""

    def make(folder: Path) -> tuple[Path, Read]:
        path, draw = folder / f"a.{ending}", np.random.default_rng(0)
        lengths = [draw.integers(1, 33, 2) for _ in range(300)]
        packed = PackedRows(
            ids=draw.integers(0, 60_000, (300, 64), dtype=np.int32),
            piece_rows=np.repeat(np.arange(300), 2), piece_lengths=np.concatenate(lengths),
            piece_sources=np.repeat(np.arange(300) % 3 // 2, 2),
            piece_documents=pa.array([f"document {n}" for n in range(600)]),
            piece_offsets=np.arange(600),
        )  # fmt: skip
        batch = to_batch(packed, ["web", "books"])
        with contextlib.ExitStack() as stack:
            if ending == "arrows":
                target = stack.enter_context(path.open("wb"))
                stream = IndexedRows(target, batch.schema, pa.ipc.new_stream)
                file: Any = stack.enter_context(contextlib.closing(stream))
            else:
                file = stack.enter_context(open_file(str(path), batch.schema, {}))
            for start in range(0, 300, 100):
                file.write(batch.slice(start, 100))

        def read(path: Path) -> Any:
            arrow_messages._opened.cache_clear()
            shutil.rmtree(folder.with_name("unpacked"), ignore_errors=True)
            made = TokenRows(tuple(open_row_files(
                from_path(str(path), "tokens"), folder.with_name("unpacked"), 1, _refuse
            )))  # fmt: skip
            arrays = made.batch(np.arange(len(made)))
            content = {name: array.tobytes() for name, array in arrays.items()}
            return content, made.source_names, made.source_sizes, made.tokens, made.row_length

        return path, read

    return make


def _refuse(_row: dict[str, Any], reason: str, shard: str) -> None:
    raise AssertionError(f"{shard}: {reason}")


def calls(folder: Path) -> tuple[Path, Read]:
    """Replies of a model; one that is damaged is requested again."""
    cache = CallCache(folder)
    replies = {f"{n:064x}": {"text": " ".join(WORDS[: n % 9]), "tokens": n} for n in range(300)}
    cache.append(replies.items())
    cache.close()

    def read(path: Path) -> Any:
        cache = CallCache(path)
        kept = {key: reply for key in replies if (reply := cache.get(key)) is not None}
        if kept.keys() != replies.keys() and kept.items() <= replies.items():
            raise BadData(f"{path}: a call is made again")
        return kept

    return folder, read


KINDS: dict[str, Callable[[Path], tuple[Path, Read]]] = {
    "Parquet, 12,000 rows": shard(12_000, "parquet"),
    "Parquet, 300 rows": shard(300, "parquet"),
    "Arrow stream, 12,000 rows": shard(12_000, "arrows"),
    "Arrow stream, 300 rows": shard(300, "arrows"),
    "Arrow file, 300 rows": shard(300, "arrow"),
    "JSON lines, zstd": shard(300, "jsonl.zst"),
    "JSON lines, gzip": shard(300, "jsonl.gz"),
    "finished output": finished_output,
    "manifest": manifest,
    "index of dedup": dedup_index,
    "index of benchmarks": contamination_index,
    "Megatron files": megatron,
    "token rows, Arrow file": token_rows("arrow"),
    "token rows, Arrow stream": token_rows("arrows"),
    "token rows, Parquet": token_rows("parquet"),
    "replies of a model": calls,
    "state of a crawl": frontier(stopped=False),
    "state of a killed crawl": frontier(stopped=True),
    **{f"sketch of {method}": scratch(method, "sketch") for method in METHODS},
    **{f"plan of {method}": scratch(method, "plan") for method in METHODS},
}


def flip(path: Path, number: int, draw: random.Random) -> str:
    """Flip a bit, every third time in the last 4 kB; of a folder, in one of its files."""
    whole = bytearray(path.read_bytes())
    low = 0 if number % 3 else max(0, len(whole) - 4096)
    bit = draw.randrange(8 * low, 8 * len(whole))
    whole[bit // 8] ^= 1 << bit % 8
    path.write_bytes(whole)
    return f"{path.name}: bit {bit} of {8 * len(whole)}"


@pytest.mark.parametrize("flips", [30, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_flips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, flips: int) -> None:
    monkeypatch.setattr(page_digests.notes, "note", _noted)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a"
    folder.mkdir()
    path, read = KINDS[kind](folder)
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    before = {file: file.read_bytes() for file in files}
    filled = [file for file in files if before[file]]
    expected, draw, ended = read(path), random.Random(kind), Counter[str]()
    for number in range(flips):
        for file in path.rglob("*") if path.is_dir() else ():
            if file.is_file():
                file.unlink()
        for file, content in before.items():
            file.write_bytes(content)
        where = flip(draw.choice(filled), number, draw)
        try:
            same = read(path) == expected
            ended["no effect" if same else f"other: {where}"] += 1
        except BadData as error:
            assert str(folder) in str(error) and "\n" not in str(error), error
            ended["found"] += 1
    print(f"\n| {kind} | {flips:,} | {ended['found']:,} | {ended['no effect']} |"
          f" {flips - ended['found'] - ended['no effect']} |")  # fmt: skip
    assert ended.keys() <= {"found", "no effect"}, ended


def _noted(message: str) -> None:
    """A note that names a file which cannot be read is as good as an error."""
    if "cannot be read" in message:
        raise BadData(message)
