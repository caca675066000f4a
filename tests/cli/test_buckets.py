"""Commands on a bucket of an S3 server that fails, stalls and cuts requests.

They need moto and s3fs, which are no part of the `dev` extra because moto brings 200 MB of packages
of its own: `pip install --target DIR 'moto[server]' s3fs` and PYTHONPATH=DIR.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import Command
from waiting import until

pytest.importorskip("moto.server")
pytest.importorskip("s3fs")

from bucket_server import Proxy, bucket_server, environment

from sabia.core.shards.stores import objects

ROWS = 100
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with bucket_server() as proxy:
        yield proxy


@pytest.fixture
def bucket(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    server.clear()
    yield server
    server.share, server.most, server.gate, server.retry_after = 0.0, 10**9, None, "0"
    server.kinds = ("fail", "stall", "cut")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("pages"), random.Random(1)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 8))) for _ in range(2000)]
    for n in range(3):
        texts = [" ".join(draw.choices(words, k=60)) for _ in range(ROWS)]
        texts[10], texts[20] = texts[3], f"{texts[4]} more"
        ids = [f"{n}-{i}" for i in range(ROWS)]
        pq.write_table(pa.table({"id": ids, "text": texts}), folder / f"s{n}.parquet")
    return folder


def sabia(*words: str, code: int = 0) -> str:
    done = subprocess.run([*Command(*words)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def sent(pages: Path) -> str:
    for path in pages.iterdir():
        objects.upload(path, f"s3://bucket/pages/{path.name}")
    return "s3://bucket/pages"


def fetched(url: str, to: Path) -> Path:
    for name in objects.objects_below(url):
        objects.download(f"{url}/{name}", to / name)
    return to


STAGES = {
    "classify": ("classify",),
    "dedup": ("dedup",),
    "removed": ("dedup", "--removed", "OUT.removed"),
    "workers": ("dedup", "-j", "2"),
    "tokenize": ("tokenize", "--vocab-size", "500", "--length", "64"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_outputs_equal_local_ones_with_failures_and_a_second_run_reads_no_shard(
    stage: str, bucket: Proxy, pages: Path, tmp_path: Path
) -> None:
    given, here, there = sent(pages), tmp_path / "here", f"s3://bucket/{stage}"
    bucket.clear()
    bucket.share = 0.05
    sabia(*(word.replace("OUT", str(here)) for word in STAGES[stage]), str(pages), "-o", str(here))
    words = [word.replace("OUT", there) for word in STAGES[stage]]
    sabia(*words, given, "-o", there)
    assert len(bucket.faults) >= 1
    bucket.share = 0.0
    got = fetched(there, tmp_path / "there")
    shards = sorted(path.name for path in here.glob("part-*"))
    assert shards == sorted(path.name for path in got.glob("part-*"))
    for name in shards:
        one, other = (pq.read_table(folder / name) for folder in (here, got))
        assert one.replace_schema_metadata().equals(other.replace_schema_metadata())
    if stage == "tokenize":
        for name in ("tokenizer.json", "tokenizer_config.json"):
            mine, its = (folder / "_tokenizer" / name for folder in (here, got))
            assert mine.read_bytes() == its.read_bytes()
    if stage == "removed":
        removed = fetched(f"{there}.removed", tmp_path / "there.removed")
        assert len(list(removed.glob("part-*"))) == 3
        for path in (tmp_path / "here.removed").glob("part-*"):
            one, other = pq.read_table(path), pq.read_table(removed / path.name)
            assert one.replace_schema_metadata().equals(other.replace_schema_metadata())
    bucket.clear()
    assert "3 shards already done" in sabia(*words, given, "-o", there)
    read = [path for path in bucket.read_objects() if "/part-" in path]
    assert not read
    if stage != "removed":  # its record holds the columns of all inputs, which footers tell
        assert not [path for path in bucket.read_objects() if "/pages/" in path]


def test_rows_on_a_bucket_are_streamed_into_pipes_and_files(
    bucket: Proxy, pages: Path, tmp_path: Path
) -> None:
    given = sent(pages)
    sabia("dedup", given, "-o", "s3://bucket/one/o.jsonl.zst")
    sabia("dedup", "s3://bucket/one/o.jsonl.zst", "-o", str(tmp_path / "o.parquet"))
    sabia("dedup", str(pages), "-o", str(tmp_path / "p.parquet"))
    one, other = (pq.read_table(tmp_path / f"{n}.parquet", columns=["id", "text"]) for n in "op")
    assert one.equals(other)
    found = objects.objects_below("s3://bucket/one")
    assert list(found) == [".o.jsonl.zst.sabia.json", "o.jsonl.zst"]


def test_the_wait_that_the_server_asks_for(bucket: Proxy) -> None:
    bucket.share, bucket.most, bucket.kinds, bucket.retry_after = 1.0, 1, ("fail",), "1.5"
    objects.put("s3://bucket/x", b"1")
    (_, _, first), (_, _, second) = bucket.requests
    assert bucket.faults == ["fail"]
    assert second - first >= 1.5


def test_a_stall_longer_than_the_time_limit(bucket: Proxy, pages: Path, monkeypatch) -> None:
    monkeypatch.setenv("FSSPEC_S3", json.dumps({"config_kwargs": {"read_timeout": 1}}))
    given = sent(pages)
    bucket.clear()
    bucket.share, bucket.most, bucket.kinds, bucket.stall_s = 1.0, 1, ("stall",), 4.0
    sabia("dedup", given, "-o", "s3://bucket/stalled")
    assert bucket.faults == ["stall"]
    assert len(objects.objects_below("s3://bucket/stalled")) == 4


def test_an_upload_that_is_killed_shows_nothing(bucket: Proxy, tmp_path: Path) -> None:
    import threading

    big = tmp_path / "big"
    big.write_bytes(random.Random(2).randbytes(objects.PART_BYTES * 2 + 5))
    bucket.gate = threading.Event()
    code = (
        "from sabia.core.shards.stores.objects import upload\n"
        f"upload({str(big)!r}, 's3://bucket/killed/big')"
    )
    child = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: any("partNumber" in path for _, path, _ in bucket.requests))
    child.send_signal(signal.SIGKILL)
    child.wait()
    bucket.gate.set()
    assert not objects.objects_below("s3://bucket/killed")
    bucket.gate = None
    objects.upload(big, "s3://bucket/killed/big")
    assert any("partNumber=3" in path for _, path, _ in bucket.requests)
    assert objects.read_object("s3://bucket/killed/big") == big.read_bytes()


def one_line(text: str) -> str:
    (line,) = (line for line in text.splitlines() if "error:" in line)
    return line


def test_no_credentials_and_no_bucket_are_said_in_one_line(
    bucket: Proxy, pages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = one_line(sabia("dedup", "s3://none/pages", "-o", "s3://bucket/o", code=2))
    assert "s3://none/pages: no such object, folder or bucket" in said
    said = one_line(sabia("dedup", str(pages), "-o", "s3://none/o", code=1))
    assert "s3://none/o" in said
    assert "bucket does not exist" in said
    given = sent(pages)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    said = one_line(sabia("dedup", given, "-o", "s3://bucket/o", code=1))
    assert "Unable to locate credentials" in said
    assert os.environ.get("AWS_ACCESS_KEY_ID") is None


def test_a_server_that_stays_busy_is_an_error(bucket: Proxy, monkeypatch) -> None:
    monkeypatch.setattr(objects, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(objects, "LONGEST_WAIT_S", 0.02)
    bucket.share, bucket.kinds = 1.0, ("fail",)
    with pytest.raises(objects.Failed, match=r"^s3://bucket/x: .*reduce your request rate"):
        objects.put("s3://bucket/x", b"1")
    assert len(bucket.faults) >= objects.ATTEMPTS * objects.REQUEST_ATTEMPTS


TRAIN = ("--shape", "d=32,layers=2,heads=2", "--batch", "4", "--save-every", "4", "-q")


def rows_of_tokens(pages: Path, tmp_path: Path) -> str:
    sabia("tokenize", "--vocab-size", "500", "--length", "64", str(pages), "-o", "s3://bucket/rows")
    fetched("s3://bucket/rows", tmp_path / "rows")
    return "s3://bucket/rows"


def trained(*words: str, code: int = 0) -> str:
    """As `sabia`, without the metrics on stdout."""
    return sabia(*words, *TRAIN, "--to", "jsonl", code=code)


def weights(folder: Path) -> bytes:
    return (folder / "final" / "model.safetensors").read_bytes()


def test_a_run_on_a_bucket_equals_a_local_one_with_failures(
    bucket: Proxy, pages: Path, tmp_path: Path
) -> None:
    rows, here = rows_of_tokens(pages, tmp_path), tmp_path / "here"
    trained("pretrain", str(tmp_path / "rows"), "--tokens", "4k", "-o", str(here))
    bucket.clear()
    bucket.share = 0.05
    trained("pretrain", rows, "--tokens", "4k", "-o", "s3://bucket/run")
    assert bucket.faults
    bucket.share = 0.0
    there = fetched("s3://bucket/run", tmp_path / "there")
    assert weights(there) == weights(here)
    assert {path.name for path in there.iterdir()} == {*os.listdir(here)} - {".lock"}
    assert "already finished" in sabia(
        "pretrain", rows, *TRAIN[:-1], "--tokens", "4k", "-o", "s3://bucket/run", "--to", "jsonl"
    )
    # a model, its tokenizer and rows, all of the bucket
    words = ("--tokens", "2k", "--batch", "4", "-q", "--to", "jsonl")
    sabia("pretrain", rows, "--model", "s3://bucket/run/final", *words, "-o", str(tmp_path / "a"))
    mine = ("--model", str(here / "final"))
    sabia("pretrain", str(tmp_path / "rows"), *mine, *words, "-o", str(tmp_path / "b"))
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    words = ("--recipe", "w8", "--samples", "4", "-q", "--to", "jsonl")
    sabia("quantize", rows, "--model", "s3://bucket/run/final", *words, "-o", "s3://bucket/small")
    sabia("quantize", str(tmp_path / "rows"), *mine, *words, "-o", str(tmp_path / "small"))
    small = fetched("s3://bucket/small", tmp_path / "small2")
    names = [path.name for path in (tmp_path / "small").glob("*.safetensors")]
    assert names
    for name in names:
        assert (small / name).read_bytes() == (tmp_path / "small" / name).read_bytes()


def machine(folder: Path) -> str:
    """A cache with compiled code and nothing else."""
    (folder / "sabia").mkdir(parents=True)
    for name in ("numba", "inductor"):
        (folder / "sabia" / name).symlink_to(Path(os.environ["XDG_CACHE_HOME"]) / "sabia" / name)
    return str(folder)


def test_a_killed_run_goes_on_on_another_machine(
    bucket: Proxy, pages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, here, run = rows_of_tokens(pages, tmp_path), tmp_path / "here", "s3://bucket/killed-run"
    tokens = ("--tokens", "12k")
    trained("pretrain", str(tmp_path / "rows"), *tokens, "-o", str(here))
    monkeypatch.setenv("XDG_CACHE_HOME", machine(tmp_path / "one"))
    words = ("pretrain", rows, *tokens, *TRAIN, "-o", run, "--to", "jsonl")
    child = subprocess.Popen([*Command(*words)], stdout=subprocess.DEVNULL, start_new_session=True)
    until(lambda: any(name.endswith("COMMITTED") for name in objects.objects_below(run)))
    child.kill()
    child.wait()
    assert not objects.exists(f"{run}/final")
    monkeypatch.setenv("XDG_CACHE_HOME", machine(tmp_path / "two"))
    trained("pretrain", rows, *tokens, "-o", run)
    there = fetched(run, tmp_path / "there")
    assert weights(there) == weights(here)
    first = json.loads((there / "metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] > 4  # those before the checkpoint are not done again


def test_phases_with_a_scratch_folder_on_the_bucket(
    bucket: Proxy, pages: Path, tmp_path: Path
) -> None:
    given, here = sent(pages), tmp_path / "here"
    sabia("dedup", str(pages), "-o", str(here))
    words = ("dedup", given, "--scratch", "s3://bucket/scratch", "-o", "s3://bucket/phases")
    bucket.share = 0.05
    for shard in ("0/2", "1/2"):
        sabia(*words, "--phase", "sketch", "--shard", shard)
    sabia(*words, "--phase", "compare")
    sabia(*words, "--phase", "write", "--stats", "s3://bucket/stats.json")
    bucket.share = 0.0
    there = fetched("s3://bucket/phases", tmp_path / "there")
    for path in here.glob("part-*"):
        one, other = pq.read_table(path), pq.read_table(there / path.name)
        assert one.replace_schema_metadata().equals(other.replace_schema_metadata())
    assert json.loads(objects.read_object("s3://bucket/stats.json"))["rows_in"] == 3 * ROWS


def test_google_storage_through_the_same_interface(
    pages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an emulator (PyPI: gcp-storage-emulator), where there is one: its answers are those of the
    JSON interface, but nobody is refused."""
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    pytest.importorskip("gcsfs")
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        port = line.getsockname()[1]
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    try:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        for path in pages.iterdir():
            objects.upload(path, f"gs://bucket/pages/{path.name}")
        big = tmp_path / "big"
        big.write_bytes(random.Random(2).randbytes(objects.PART_BYTES * 2 + 5))
        objects.upload(big, "gs://bucket/big")
        assert objects.read_object("gs://bucket/big") == big.read_bytes()
        objects.remove("gs://bucket/big")
        assert not objects.exists("gs://bucket/big")
        sabia("dedup", str(pages), "-o", str(tmp_path / "here"))
        sabia("dedup", "gs://bucket/pages", "-o", "gs://bucket/o")
        there = fetched("gs://bucket/o", tmp_path / "there")
        for path in (tmp_path / "here").glob("part-*"):
            one, other = pq.read_table(path), pq.read_table(there / path.name)
            assert one.replace_schema_metadata().equals(other.replace_schema_metadata())
        again = sabia("dedup", "gs://bucket/pages", "-o", "gs://bucket/o")
        assert "3 shards already done" in again
        said = one_line(sabia("dedup", str(pages), "-o", "gs://none/o", code=1))
        assert "gs://none/o/part-00000.parquet: no such object or bucket" in said
    finally:
        server.stop()


def test_files_of_tokens_a_classifier_and_a_plan(
    bucket: Proxy, pages: Path, tmp_path: Path
) -> None:
    given = sent(pages)
    words = ("tokenize", "--vocab-size", "500", "--format", "arrow")
    sabia(*words, str(pages), "-o", str(tmp_path / "here"))
    sabia(*words, given, "-o", "s3://bucket/arrow")
    there = fetched("s3://bucket/arrow", tmp_path / "there")
    for path in (tmp_path / "here").glob("*.arrow"):
        one, other = (pa.ipc.open_stream(folder / path.name).read_all()
                      for folder in (tmp_path / "here", there))  # fmt: skip
        assert one.replace_schema_metadata().equals(other.replace_schema_metadata())
    assert list(there.glob("*.arrow"))
    rows = [{"id": str(i), "text": f"{'good words' if i % 2 else 'bad pills'} {i}",
             "kind": "good" if i % 2 else "bad"} for i in range(60)]  # fmt: skip
    lines = tmp_path / "labels.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    objects.upload(lines, "s3://bucket/labels.jsonl")
    words = ("classify", "train", "--label", "kind")
    sabia(*words, "s3://bucket/labels.jsonl", "-o", "s3://bucket/m/kind.bin")
    sabia(*words, str(lines), "-o", str(tmp_path / "kind.bin"))
    model = objects.read_object("s3://bucket/m/kind.bin")
    assert model == (tmp_path / "kind.bin").read_bytes()
    words = ("classify", "--model", "kind=s3://bucket/m/kind.bin")
    sabia(*words, given, "-o", "s3://bucket/classified")
    assert "3 shards already done" in sabia(*words, given, "-o", "s3://bucket/classified")
    sabia("plan-cluster", "--params", "7B", "--tokens", "1T", "-o", "s3://bucket/plan.parquet")
    assert pq.read_table(pa.BufferReader(objects.read_object("s3://bucket/plan.parquet"))).num_rows


def test_training_after_pretraining_eval_and_rewrite_equal_local_ones_with_failures(
    bucket: Proxy, pages: Path, tmp_path: Path
) -> None:
    rows_of_tokens(pages, tmp_path)
    here = tmp_path / "here"
    here.mkdir()
    trained("pretrain", str(tmp_path / "rows"), "--tokens", "2k", "-o", str(tmp_path / "base"))
    task = 'name = "t"\nkind = "exact_match"\ndata = "items.jsonl"\nprompt = "{{ q }}"\n'
    task, draw = f'{task}answer = "a"\nmax_new_tokens = 4\n', random.Random(2)
    sums = [draw.choices("0123456789", k=2) for _ in range(24)]
    asked = [{"role": "user", "content": f"{a}+{b}="} for a, b in sums]
    files = {
        "chats.jsonl": [
            {"messages": [turn, {"role": "assistant", "content": f"{a}{b}"}]}
            for turn, (a, b) in zip(asked, sums, strict=True)
        ],
        "prompts.jsonl": [{"messages": [turn], "answer": "[0-9]"} for turn in asked],
        "items.jsonl": [{"q": f"{a}+{b}=", "a": a} for a, b in sums],
        "pages.jsonl": [
            {"id": str(i), "text": f"What is {a}+{b}? The answer is {b}. First {a}, then {b}."}
            for i, (a, b) in enumerate(sums)
        ],
    }
    for name, rows in files.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        objects.upload(tmp_path / name, f"s3://bucket/in/{name}")
    for path in (tmp_path / "base" / "final").iterdir():
        objects.upload(path, f"s3://bucket/base/{path.name}")
    (tmp_path / "t.toml").write_text(task)
    objects.upload(tmp_path / "t.toml", "s3://bucket/in/t.toml")
    places = {"s3://bucket/in": "s3://bucket/base", str(tmp_path): str(tmp_path / "base" / "final")}
    bucket.share = 0.05
    for given, model in places.items():
        out = "s3://bucket/out" if given.startswith("s3") else str(here)
        small = ("--batch", "4", "--steps", "3", "-q", "--to", "jsonl")
        sabia("sft", f"{given}/chats.jsonl", "--model", model, *small, "--length", "64",
              "-o", f"{out}/sft")  # fmt: skip
        sabia("grpo", f"{given}/prompts.jsonl", "--model", f"{out}/sft/final", "--reward", "regex",
              "--prompts", "2", "--group", "4", "--steps", "2", "--max-new-tokens", "4", "-q",
              "--to", "jsonl", "-o", f"{out}/grpo")  # fmt: skip
        sabia("eval", "--task", f"{given}/t.toml", "--model", f"m={out}/grpo/final", "-q",
              "-o", f"{out}/scores.parquet")  # fmt: skip
        sabia("rewrite", f"{given}/pages.jsonl", "--recipe", "reason-first", "-q",
              "-o", f"{out}/rewritten.parquet")  # fmt: skip
    assert bucket.faults
    bucket.share = 0.0
    there = fetched("s3://bucket/out", tmp_path / "there")
    for run in ("sft", "grpo"):
        assert weights(there / run) == weights(here / run)
    for name in ("scores", "rewritten"):
        one, other = (pq.read_table(at / f"{name}.parquet") for at in (here, there))
        assert one.num_rows and one.replace_schema_metadata().equals(
            other.replace_schema_metadata()
        )
