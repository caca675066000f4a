"""Arrow streams between commands: read as they arrive, whole or not at all, same rows as files."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import Command
from waiting import HANG_S

from sabia.core.shards.outputs import read_metadata

SABIA = str(Path(sys.executable).parent / "sabia")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "SABIA_PIPE": "arrow"}
WORDS = [
    "house",
    "river",
    "teacher",
    "garden",
    "train",
    "market",
    "song",
    "letter",
    "keeps",
    "opens",
    "paints",
    "the",
    "of",
    "to",
]
SCHEMA = pa.schema([("id", pa.string()), ("text", pa.string()), ("source", pa.string())])


def document(number: int) -> dict[str, str]:
    choice = random.Random(number)
    text = " ".join(choice.choices(WORDS, k=40 + number % 50)).capitalize() + "."
    return {"id": f"d{number}", "text": text, "source": "ab"[number % 2]}


def stream(rows: int, batch: int = 50, schema: pa.Schema = SCHEMA) -> bytes:
    """An Arrow stream of documents in small batches."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for start in range(0, rows, batch):
            made = [document(n) for n in range(start, min(rows, start + batch))]
            writer.write_batch(pa.RecordBatch.from_pylist(made, schema=schema))
    return sink.getvalue().to_pybytes()


def sabia(data: bytes, *words: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    """A command with this data on its stdin, which is a pipe."""
    return subprocess.run([*Command(), *words], input=data, capture_output=True, cwd=cwd,
                          env=ENVIRONMENT, timeout=HANG_S)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """a.arrow-stream, the same rows as a.parquet, and a small tokenizer."""
    made = tmp_path_factory.mktemp("streams")
    (made / "a").write_bytes(stream(700))
    words = ["tokenize", "a", "--vocab-size", "400", "-o", "first/"]
    assert sabia(b"", *words, cwd=made).returncode == 0
    (made / "first" / "_tokenizer").rename(made / "tokenizer")
    return made


REMOVED = "removed.parquet"
STAGES = {
    "classify": ["classify"],
    "classify --where": ["classify", "--where", "source == 'a'", "--removed", REMOVED],
    "rewrite": ["rewrite"],
    "tokenize": ["tokenize", "--tokenizer", "tokenizer", "--length", "64"],
    "tokenize --encoder": ["tokenize", "--tokenizer", "tokenizer", "--encoder", "tiktoken"],
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_stream_gives_the_rows_and_the_provenance_of_its_file(folder: Path, stage: str) -> None:
    words, data = STAGES[stage], (folder / "a").read_bytes()
    number, paths = list(STAGES).index(stage), []
    for name, given, stdin in (("f", ["a"], b""), ("s", [], data)):
        paths.append(folder / f"{number}-{name}.parquet")
        named = [f"{number}-{name}-{word}" if word == REMOVED else word for word in words]
        done = sabia(stdin, *named, *given, "-o", str(paths[-1]), cwd=folder)
        assert done.returncode == 0, done.stderr.decode()
    first, second = (pq.read_table(path) for path in paths)
    assert first.num_rows and first.equals(second)
    assert first.schema.equals(second.schema)
    made = [read_metadata(str(path)) or {} for path in paths]
    assert REMOVED in words or made[0]["fingerprint"] == made[1]["fingerprint"]
    assert made[0]["inputs"] == made[1]["inputs"]
    again = sabia(data, *named, "-o", str(paths[1]), cwd=folder)
    assert again.returncode == 0 and b"already done" in again.stderr, again.stderr.decode()
    other = sabia(stream(650), *named, "-o", str(paths[1]), cwd=folder)
    assert other.returncode == 2 and b"holds rows of other inputs" in other.stderr


@pytest.mark.slow
def test_rows_leave_the_last_stage_before_the_source_ends(folder: Path, tmp_path: Path) -> None:
    """The source writes some documents, then waits until the test has read a row of tokens."""
    data = stream(700, 20)
    end = data.rindex(b"d400")  # in the middle of a batch
    last = ["tokenize", "--tokenizer", str(folder / "tokenizer"), "--length", "64"]
    commands = [["classify"], ["rewrite"], last]
    stages: list[subprocess.Popen[bytes]] = []
    for words in commands:
        before = stages[-1].stdout if stages else subprocess.PIPE
        stages.append(subprocess.Popen(
            [SABIA, *words, "--quiet"], stdin=before,
            stdout=subprocess.PIPE, cwd=tmp_path, env=ENVIRONMENT,
        ))  # fmt: skip
    source, result = stages[0].stdin, stages[-1].stdout
    assert source is not None and result is not None
    source.write(data[:end])
    source.flush()
    reader = pa.ipc.open_stream(result)
    first = reader.read_next_batch()
    assert first.num_rows and first.column("input_ids")
    assert all(stage.poll() is None for stage in stages)

    def write_the_rest() -> None:
        with source:
            source.write(data[end:])

    writer = threading.Thread(target=write_the_rest)
    writer.start()
    rest = reader.read_all()
    writer.join()
    assert [stage.wait(HANG_S) for stage in stages] == [0, 0, 0]
    whole = sabia(b"", *last, "a", "-o", str(tmp_path / "t.parquet"), cwd=folder)
    assert whole.returncode == 0
    expected = pq.read_table(tmp_path / "t.parquet").column("input_ids").to_pylist()
    assert [
        *first.column("input_ids").to_pylist(),
        *rest.column("input_ids").to_pylist(),
    ] == expected


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["classify", "rewrite", "tokenize"])
def test_a_stream_that_is_cut_or_damaged_is_an_error_65(
    folder: Path, stage: str, tmp_path: Path
) -> None:
    data = (folder / "a").read_bytes()
    words = [stage, *(["--tokenizer", str(folder / "tokenizer")] if stage == "tokenize" else [])]
    choice = random.Random(stage)
    cuts = {"end mark": data[:-8], "part of it": data[:-4], "schema": data[:40], "magic": data[:5]}
    cuts |= {f"cut {n}": data[: choice.randrange(300, len(data) - 8)] for n in range(2)}
    cuts |= {"more": data + b"\0", "length": data[:4] + b"\xff" * 60}
    for name, damaged in cuts.items():
        done = sabia(damaged, *words, "-o", "o.parquet", cwd=tmp_path)
        assert done.returncode == 65, (name, done.stderr.decode())
        assert len(done.stderr.splitlines()) <= 3 and b"Traceback" not in done.stderr
        assert not list(tmp_path.iterdir())
        done = sabia(damaged, *words, cwd=tmp_path)
        assert done.returncode == 65 and not done.stdout.endswith(b"\xff\xff\xff\xff\0\0\0\0")


def test_scores_as_maps_are_read_from_a_copy(tmp_path: Path) -> None:
    """As versions before the struct wrote them: the names are in the rows."""
    kind = pa.map_(pa.string(), pa.float64())
    schema = pa.schema([("text", pa.string()), ("scores", kind)])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for name in ("first", "second"):
            rows = pa.table({"text": ["words"], "scores": pa.array([[(name, 1.0)]], kind)})
            writer.write_table(rows.cast(schema))
    done = sabia(sink.getvalue().to_pybytes(), "rewrite", "-o", "o.parquet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    scores = pq.read_table(tmp_path / "o.parquet").column("scores").to_pylist()
    assert scores == [{"first": 1.0, "second": None}, {"first": None, "second": 1.0}]


def test_a_stop_signal_while_a_stream_is_read(folder: Path, tmp_path: Path) -> None:
    process = subprocess.Popen([SABIA, "rewrite", "-o", "o.parquet"], stdin=subprocess.PIPE,
                               stderr=subprocess.PIPE, cwd=tmp_path, env=ENVIRONMENT)  # fmt: skip
    assert process.stdin is not None
    process.stdin.write((folder / "a").read_bytes()[:-100])
    process.stdin.flush()
    deadline = time.monotonic() + HANG_S
    while not list(tmp_path.glob(".o.parquet*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 75
    assert not list(tmp_path.iterdir())


def test_nothing_is_copied_to_a_temporary_file(folder: Path, tmp_path: Path) -> None:
    process = subprocess.Popen([SABIA, "rewrite", "-q", "-o", "o.parquet"], stdin=subprocess.PIPE,
                               cwd=tmp_path, env=ENVIRONMENT)  # fmt: skip
    assert process.stdin is not None
    data = (folder / "a").read_bytes()
    process.stdin.write(data[:-8])
    process.stdin.flush()
    deadline = time.monotonic() + HANG_S
    while not list(tmp_path.glob(".o.parquet*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    links = [link for link in Path(f"/proc/{process.pid}/fd").iterdir() if int(link.name) > 2]
    files = [os.readlink(link) for link in links]
    assert not [name for name in files if name.startswith("/tmp/#") or "(deleted)" in name]
    process.stdin.write(data[-8:])
    process.stdin.close()
    assert process.wait(HANG_S) == 0
    assert pq.read_metadata(tmp_path / "o.parquet").num_rows == 700
