"""`sabia tokenize` as a user runs it: files, pipes, workers, mixes, kills and re-runs."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import Command
from in_process import sabia as called
from token_files_read import read_arrow, read_megatron

from sabia.core.text.tokenize.tokenizer import load_tokenizer

SABIA = Command()
PLAIN = [sys.executable, "-m", "sabia.cli.main"]
WORDS = {
    "en": "the sum of two small numbers is found by adding units then tens and a carry",
    "pt": "a soma de dois números pequenos se acha somando unidades depois dezenas e sobra",
}


def sabia(*words, **settings):
    settings = {"capture_output": True, "check": True, "timeout": 60} | settings
    return subprocess.run([*SABIA, *map(str, words)], **settings)


def documents(count, seed=0):
    draw = random.Random(seed)
    for i in range(count):
        language = draw.choice(["en", "pt"])
        size = draw.randint(300, 700) if i % 40 == 7 else draw.randint(3, 60)
        text = " ".join(draw.choice(WORDS[language].split()) for _ in range(size)) + f" {i}."
        yield {"text": text, "language": language, "source": draw.choice(["web", "edu"])}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two shards, one file with both, a tokenizer trained on them, and their rows."""
    root = tmp_path_factory.mktemp("tokenize")
    rows = list(documents(400))
    (root / "shards").mkdir()
    for part in range(2):
        name = root / "shards" / f"part-{part}.parquet"
        pq.write_table(pa.Table.from_pylist(rows[part * 200 : part * 200 + 200]), name)
    pq.write_table(pa.Table.from_pylist(rows), root / "all.parquet", row_group_size=64)
    made = sabia("tokenize", root / "shards", "--train-tokenizer", "--vocab-size", 400,
                 "--length", 64, "-o", root / "rows", "--stats", root / "stats.json")  # fmt: skip
    return root, rows, made


def table(path):
    names = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    return pa.concat_tables(pq.read_table(n).replace_schema_metadata(None) for n in names)


def ids_without_padding(rows):
    for row in rows.to_pylist():
        at = 0
        for size in row["document_lengths"]:
            yield row["input_ids"][at : at + size]
            at += size


def tokenizer_of(root):
    return ["--tokenizer", root / "rows" / "_tokenizer", "--length", 64]


def test_rows_hold_every_document_and_say_how_well_they_fit(world):
    root, rows, made = world
    tokenizer = load_tokenizer(root / "rows" / "_tokenizer")
    packed = table(root / "rows")
    stream = [i for piece in ids_without_padding(packed) for i in piece]
    texts = tokenizer.decode(stream).split("<|endoftext|>")
    assert texts[-1] == "" and texts[:-1] == [row["text"] for row in rows]
    used = [sum(row["document_lengths"]) for row in packed.to_pylist()]
    assert sum(size < 64 for size in used) <= 2  # at most one padded row a shard
    report = json.loads((root / "stats.json").read_text())["bytes_per_token"]
    for language in ("en", "pt"):
        texts = [row["text"] for row in rows if row["language"] == language]
        tokens = sum(len(tokenizer.encode_ordinary(text)) for text in texts)
        ratio = sum(len(text.encode()) for text in texts) / tokens
        assert report["language"][language] == pytest.approx(ratio, abs=1e-3)
    assert set(report["source"]) == {"web", "edu"}
    words = made.stderr.decode()
    assert "encoder tiktoken: same ids on 400 probed documents" in words
    assert "bytes per token: language en" in words


def test_metadata_names_the_tokenizer(world):
    root, _, _ = world
    report = json.loads(pq.read_schema(root / "rows" / "part-00000.parquet").metadata[b"sabia"])
    tokenizer = load_tokenizer(root / "rows" / "_tokenizer")
    assert report["options"]["fingerprint"] == tokenizer.fingerprint
    assert report["options"]["vocab_size"] == tokenizer.vocab_size <= 400
    assert load_tokenizer(report["options"]["tokenizer"]).fingerprint == tokenizer.fingerprint


def test_a_re_run_trains_and_packs_nothing_again(world):
    root, _, _ = world
    command = ("tokenize", root / "shards", "--train-tokenizer", "--vocab-size", 400,
               "--length", 64, "-o", root / "rows")  # fmt: skip
    before = {p: p.stat().st_mtime_ns for p in (root / "rows").rglob("*.parquet")}
    words = sabia(*command).stderr.decode()
    assert "already trained on this input" in words and "2 shards already done" in words
    assert before == {p: p.stat().st_mtime_ns for p in (root / "rows").rglob("*.parquet")}


def test_workers_files_and_pipes_give_the_same_rows(world, tmp_path):
    root, _, _ = world
    wanted = table(root / "rows")
    sabia("tokenize", root / "shards", *tokenizer_of(root), "-j", 2, "-o", tmp_path / "two.parquet")
    assert table(tmp_path / "two.parquet").equals(wanted)
    whole = sabia("tokenize", root / "all.parquet", *tokenizer_of(root)).stdout
    with (
        (root / "all.parquet").open("rb") as file,
        subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE) as cat,
    ):
        piped = sabia("tokenize", *tokenizer_of(root), "--to", "arrow", stdin=cat.stdout).stdout
    rows = pq.read_table(pa.BufferReader(whole)).replace_schema_metadata(None)
    assert pa.ipc.open_stream(piped).read_all().replace_schema_metadata(None).equals(rows)
    stream = [i for piece in ids_without_padding(rows) for i in piece]
    assert stream == [i for piece in ids_without_padding(wanted) for i in piece]


def test_training_reads_stdin_twice(world, tmp_path):
    root, _, _ = world
    with (
        (root / "all.parquet").open("rb") as file,
        subprocess.Popen(["cat"], stdin=file, stdout=subprocess.PIPE) as cat,
    ):
        sabia("tokenize", "--train-tokenizer", "--vocab-size", 400, "--length", 64,
              "-o", tmp_path / "t.parquet", stdin=cat.stdout)  # fmt: skip
    tokenizer = load_tokenizer(tmp_path / "t.tokenizer")
    assert tokenizer.definition == load_tokenizer(root / "rows" / "_tokenizer").definition


def test_mix_has_the_weights_and_is_reproducible(world, tmp_path):
    root, rows, _ = world
    mix = ("tokenize", root / "shards", *tokenizer_of(root), "--mix", "web=0.75,edu=0.25",
           "--tokens", 16_384, "--stats", tmp_path / "s.json")  # fmt: skip
    sabia(*mix, "--seed", 5, "-o", tmp_path / "a")
    sabia(*mix, "--seed", 5, "-o", tmp_path / "b.parquet")
    sabia(*mix, "--seed", 6, "-o", tmp_path / "c.parquet")
    packed = table(tmp_path / "a")
    assert packed.equals(table(tmp_path / "b.parquet"))
    assert not packed.equals(table(tmp_path / "c.parquet"))
    sources = packed.column("source").to_pylist()
    assert (sources.count("web"), sources.count("edu")) == (192, 64)  # of 256 rows
    assert 70 <= sources[:100].count("web") <= 80
    report = json.loads((tmp_path / "s.json").read_text())["counters"]
    assert report["achieved_share[web]"] == pytest.approx(0.75)
    again = sabia(*mix, "--seed", 5, "-o", tmp_path / "a").stderr.decode()
    assert "already done" in again
    capped = sabia(*mix, "--max-repeat", 1, "-o", tmp_path / "d.parquet").stderr.decode()
    assert "1.00 passes" in capped
    texts = {row["text"] for row in rows if row["source"] == "web"}
    tokenizer = load_tokenizer(root / "rows" / "_tokenizer")
    pieces = [p for r in packed.to_pylist() if r["source"] == "web"
              for p in ids_without_padding(pa.Table.from_pylist([r]))]  # fmt: skip
    whole = {t for t in (tokenizer.decode(p) for p in pieces) if t.endswith("<|endoftext|>")}
    assert any(t.removesuffix("<|endoftext|>") in texts for t in whole)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_and_run_again_gives_the_same_rows(world, tmp_path, number):
    root, _, _ = world
    for part in range(4):
        rows = list(documents(1500, seed=part + 10))
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"in-{part}.parquet")
    inputs = sorted(tmp_path.glob("in-*.parquet"))
    command = [*PLAIN, "tokenize", *inputs, *tokenizer_of(root), "-o", tmp_path / "out"]
    command = [str(word) for word in command]
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.time() + 30
    while not (tmp_path / "out" / "part-00000.parquet").exists() and time.time() < deadline:
        time.sleep(0.002)
    running.send_signal(number)
    code = running.wait(10)
    assert code in ((75, 0) if number == signal.SIGTERM else (-9, 0))
    for path in (tmp_path / "out").glob("part-*.parquet"):
        pq.read_table(path)  # whatever has a final name is whole
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    sabia("tokenize", *inputs, *tokenizer_of(root), "-o", tmp_path / "never")
    assert table(tmp_path / "out").equals(table(tmp_path / "never"))


def test_megatron_files_hold_the_documents(world, tmp_path):
    root, rows, _ = world
    command = ("tokenize", root / "shards", *tokenizer_of(root)[:2], "--format", "megatron",
               "-o", tmp_path / "m", "-j", 2)  # fmt: skip
    sabia(*command)
    tokenizer = load_tokenizer(tmp_path / "m" / "_tokenizer")
    packed = [doc for part in range(2) for doc in read_megatron(tmp_path / f"m/part-0000{part}")[1]]
    assert packed == [[*tokenizer.encode_ordinary(row["text"]), 0] for row in rows]
    assert "2 shards already done" in sabia(*command).stderr.decode()
    (tmp_path / "m" / "part-00001.json").unlink()
    again = sabia(*command).stderr.decode()
    assert "1 shards already done" in again and "200 rows in" in again


def test_arrow_directory_holds_the_rows(world, tmp_path):
    root, _, _ = world
    sabia(
        "tokenize", root / "shards", *tokenizer_of(root), "--format", "arrow", "-o", tmp_path / "a"
    )
    assert read_arrow(tmp_path / "a").equals(table(root / "rows"))


def test_an_extended_tokenizer_and_a_report(world, tmp_path):
    root, _, _ = world
    sabia("tokenize", root / "shards", "--vocab-size", 300, "-o", tmp_path / "b")
    base = tmp_path / "b" / "_tokenizer"
    sabia("tokenize", root / "shards", "--extend", base, "--vocab-size", 320, "--compare", base,
          "--report", tmp_path / "r.json", "-o", tmp_path / "x")  # fmt: skip
    report = json.loads((tmp_path / "r.json").read_text())
    new, old = report[str(tmp_path / "x" / "_tokenizer")], report[str(base)]
    assert (new["vocab_size"], old["vocab_size"]) == (320, 300)
    assert new["all"]["bytes_per_token"] > old["all"]["bytes_per_token"]
    assert set(new["languages"]) == {"en", "pt"}
    pieces = json.loads((tmp_path / "x" / "_tokenizer" / "extension.json").read_text())["pieces"]
    assert len(pieces) == 20


def test_the_engine_does_not_change_the_rows_nor_their_fingerprint(world, tmp_path):
    root, _, _ = world
    for engine in ("kernel", "tokenizers", "tiktoken"):
        report = sabia("tokenize", root / "shards", *tokenizer_of(root), "--encoder", engine,
                     "-o", tmp_path / "e").stderr.decode()  # fmt: skip
        assert ("2 shards already done" in report) == (engine != "kernel")
    assert table(tmp_path / "e").equals(table(root / "rows"))


def test_text_that_is_not_utf8_is_rejected(world, tmp_path):
    root, _, _ = world
    texts = pa.array([b"good text", b"bad \xc3( text", b"good again"])
    broken = pa.StringArray.from_buffers(3, texts.buffers()[1], texts.buffers()[2])
    pq.write_table(pa.table({"text": broken}), tmp_path / "d.parquet")
    report = sabia(
        "tokenize", tmp_path / "d.parquet", *tokenizer_of(root), "-o", tmp_path / "o.parquet"
    )
    assert "1 rejected" in report.stderr.decode()
    (row,) = pq.read_table(tmp_path / "o.rejects.parquet").to_pylist()
    assert row["reason"] == "text is not UTF-8" and "bad \ufffd( text" in row["record"]


def test_usage_errors_say_what_to_do(world, tmp_path):
    root, _, _ = world
    cases = [
        ([*tokenizer_of(root), "--train-tokenizer"], "--train-tokenizer: only without --tokenizer"),
        ([], "give --save-tokenizer DIR"),
        (["--tokenizer", tmp_path], "--tokenizer: /"),
        (["--extend", tmp_path, "-o", tmp_path / "x"], "--extend: /"),
        ([*tokenizer_of(root), "--tokens", "1M"], "--tokens: only with --mix"),
        ([*tokenizer_of(root), "--mix", "news=1"], "no documents of source 'news'"),
        ([*tokenizer_of(root), "--extend", "x"], "--extend: only without --tokenizer"),
        (["--extend", "x", "--model", "unigram"], "--model: only without --extend"),
        ([*tokenizer_of(root), "--vocab-size", "9k"], "--vocab-size: only without --tokenizer"),
        ([*tokenizer_of(root), "--digits", "three"], "--digits: only without --tokenizer"),
        (
            [*tokenizer_of(root), "--vocab-multiple", 8],
            "--vocab-multiple: only without",
        ),
        ([*tokenizer_of(root), "--train-bytes", "1MB"], "--train-bytes: only without --tokenizer"),
        ([*tokenizer_of(root), "--compare", "x"], "--compare: only with --report"),
        ([*tokenizer_of(root), "--format", "arrow"], "writes a local directory; give -o DIR"),
        ([*tokenizer_of(root), "--format", "csv"], "expected rows, arrow or megatron"),
        ([*tokenizer_of(root), "--packing", "tight"], "expected sequential or best-fit"),
        # as they are by default: given, they have no meaning all the same
        ([*tokenizer_of(root), "--reserved", 12], "--reserved: only without --tokenizer"),
        ([*tokenizer_of(root), "--max-repeat", 4], "--max-repeat: only with --mix"),
        ([*tokenizer_of(root), "--seed", 0], "--seed: only with --mix"),
        ([*tokenizer_of(root), "--mix", "web=1", "-j", 2], "--jobs: only without --mix"),
        ([*tokenizer_of(root), "--format", "megatron"], "--length: only with --format rows"),
        ([*tokenizer_of(root)[:2], "--format", "megatron", "--by", "edu=1"], "--by: only with"),
        (["--model", "unigram", "--pattern", "cl100k"], "--pattern: only with --model bpe"),
        ([*tokenizer_of(root), "--by", "edu"], "--by: 'edu' (expected SCORE=EDGE"),
    ]
    for words, message in cases:
        done = sabia("tokenize", root / "all.parquet", *words, check=False)
        assert done.returncode == 2 and not done.stdout, words
        assert message in done.stderr.decode()
    sliced = sabia("tokenize", root / "shards", "--train-tokenizer", "-o", tmp_path / "x",
                   "--shard", "0/2", check=False)  # fmt: skip
    assert sliced.returncode == 2 and b"a slice cannot train" in sliced.stderr


def test_slices_make_the_parts_of_the_whole(world, tmp_path):
    root, _, _ = world
    for task in range(2):
        array = {"TASK_ID": task, "TASK_MIN": 0, "TASK_STEP": 1, "TASK_COUNT": 2}
        env = os.environ | {f"SLURM_ARRAY_{name}": str(v) for name, v in array.items()}
        report = sabia(
            "tokenize",
            root / "shards",
            *tokenizer_of(root),
            "-o",
            tmp_path / "o",
            "--shard",
            "auto",
            env=env,
        )
        assert f"slice {task} of 2: 1 of 2 shards" in report.stderr.decode()
    assert table(tmp_path / "o").equals(table(root / "rows"))


def test_dry_run_touches_nothing(world, tmp_path):
    root, _, _ = world
    plan = sabia(
        "tokenize", root / "shards", "--train-tokenizer", "-o", tmp_path / "o", "--dry-run"
    )
    lines = plan.stdout.decode().splitlines()
    assert [line.split()[0] for line in lines] == ["read", "read", "write", "write"]
    assert b"would be trained" in plan.stderr
    assert not (tmp_path / "o").exists()


def test_sources_are_split_by_a_score_and_mixed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open("docs.jsonl", "w") as file:
        for number in range(60):
            text = f"document {number} says " + "one two three four " * 8
            row = {"text": text, "source": "web", "scores": {"edu": number % 4}}
            file.write(json.dumps(row) + "\n")
    words = ["tokenize", "docs.jsonl", "--vocab-size", "300", "--length", "32", "--by", "edu=1,3"]
    done = called(*words, "--save-tokenizer", "t", "-o", "plain.parquet")
    assert done.exit_code == 0, done.output
    plain = pq.read_table("plain.parquet").column("source").to_pylist()
    assert {"web/edu0", "web/edu1", "web/edu2"} <= set(plain)
    done = called(*words[:-1], "edu=2", "--save-tokenizer", "t", "-o", "plain.parquet")
    assert "60 rows in" in done.output  # other edges make other rows
    assert "web/edu2" not in pq.read_table("plain.parquet").column("source").to_pylist()
    mix = ["--mix", "web/edu2=0.75,web/edu0=0.25", "--tokens", "640", "--tokenizer", "t"]
    rows = ["--length", "32", "--by", "edu=1,3"]
    done = called(*words[:2], *rows, *mix, "-o", "mixed.parquet")
    assert done.exit_code == 0, done.output
    mixed = pq.read_table("mixed.parquet").column("source").to_pylist()
    assert mixed.count("web/edu2") == 15 and mixed.count("web/edu0") == 5
