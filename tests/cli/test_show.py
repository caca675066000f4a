"""`sabia show` from the shell: every kind of row, selection, differences, pages, terminals."""

import json
import os
import pty
import random
import re
import resource
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len
from sparse_rows import sparse_rows
from training_cases import ENVIRONMENT, Commands, make_tokens

from sabia.core.bench.score_rows import scores_of, to_batches
from sabia.core.generate.requests import Completion
from sabia.core.judge.verdict import Grade, Verdict
from sabia.core.recipes.grpo.sample_journal import Journal
from sabia.core.shards import schemas
from sabia.core.shards.outputs import open_file
from sabia.core.text.tokenize.tokenizer import load_tokenizer

WORDS = ["alpha", "beta", "gamma", "delta", "number", "tree", "ünïcödé", "漢字", "🎉", "a\u0301"]
EVIL = "\x1b[2J\x1b]0;title\x07 \x9b31m \u202ereversed\u2066 \x00\x7f \r\b tab\tend \ud800 \u2028"


def written(count: int, seed: int) -> list[dict[str, Any]]:
    """Documents, copies of every sixth, and near copies of every tenth."""
    draw = np.random.default_rng(seed)
    rows = [
        {"text": " ".join(draw.choice(WORDS, draw.integers(40, 90))) + ". The answer is 7. First "
         "take 3. Then add 4.", "url": f"https://a.example/{n}", "source": f"s{n % 3}"}
        for n in range(count)
    ]  # fmt: skip
    near = [
        row | {"text": f"{row['text']} omega", "url": f"{row['url']}/near"} for row in rows[::10]
    ]
    return [*rows, *({**row, "url": f"{row['url']}/copy"} for row in rows[::6]), *near]


@pytest.fixture(scope="module")
def sabia(tmp_path_factory):
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory, sabia: Commands) -> Path:
    """The outputs of a pipeline, and records of all other kinds."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "raw").mkdir()
    for seed in range(2):
        pq.write_table(pa.Table.from_pylist(written(60, seed)), folder / f"raw/{seed}.parquet")
    make_tokens(folder / "other")
    calls = [
        ("classify", "raw", "--where", "word_count > 60", "--removed", folder / "poor",
         "-o", "long"),
        ("dedup", "raw", "--removed", folder / "removed", "-o", "kept"),
        ("dedup", "raw", "--decisions", "--no-verify", "-o", "decisions"),
        ("rewrite", "kept", "-o", "rewritten"),
        ("tokenize", "kept", "--tokenizer", folder / "other" / "_tokenizer", "--length", "96",
         "-o", "rows"),
    ]  # fmt: skip
    for name, given, *words, out in calls:
        done = sabia(name, folder / given, *words, folder / out)
        assert done.returncode == 0, done.stderr
    chats = [
        {"id": f"chat-{n}", "messages": [{"role": "user", "content": f"question {n} {EVIL[:20]}"},
                                         {"role": "assistant", "content": f"reply {n}"}]}
        for n in range(300)
    ]  # fmt: skip
    lines = [json.dumps(one) for one in chats]
    (folder / "chats.jsonl").write_text("\n".join([*lines[:3], "{broken", *lines[3:], ""]))
    prompts = [one | {"answer": f"answer {n}"} for n, one in enumerate(chats)]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in prompts))
    preference = {"prompt": chats[0]["messages"][:1], "chosen": "better", "rejected": "worse"}
    (folder / "preferences.jsonl").write_text(json.dumps(preference))
    run = folder / "run"
    samples, names = [], []
    for prompt in range(60):
        for number in range(5):
            samples.append((
                Completion(f"r{prompt}", number, [3, 4, 5], f"text {prompt}/{number}", [-0.5] * 3,
                           [-0.5] * 3, "stop"),
                Grade(number / 4, (("right", Verdict.MET if number else Verdict.UNMET, 1.0),)),
            ))  # fmt: skip
            names.append(f"chat-{prompt}")
    Journal(run / "samples").finish(0, 0, names, samples, [{}] * 300)
    (run / "run.json").write_text(json.dumps({"identity": {"command": "grpo"}}))
    scores = [
        row for item in range(3) for row in scores_of(
            "model", "task", f"item-{item}", 0, {"exact": item % 2, "f1": 0.25},
            {"answer": "wrong one", "prompt": "long text " * 20})
    ]  # fmt: skip
    with open_file(str(folder / "scores.parquet"), to_batches(scores)[0].schema, {}) as file:
        for batch in to_batches(scores):
            file.write(batch)
    return folder


def show(sabia: Commands, *words: object) -> str:
    done = sabia("show", *words)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def rows(sabia: Commands, *words: object) -> list[dict[str, Any]]:
    return [json.loads(line) for line in show(sabia, *words, "--to", "jsonl").splitlines()]


EXPECTED = {
    "raw": ("── document ──", "url     https://a.example/0", "The answer is 7."),
    "long": ("scores", "c4_sentences 3", "more"),
    "poor": ("removed ", "reason", "word_count > 60"),
    "removed": (", exact ──", ", near ──", "kept: https://a.example/0", "the same text",
                "[- omega-]"),
    "decisions": ("cluster_size  2", "kept          no", "as a difference to the first"),
    "kept": ("cluster_size", "made by sabia dedup", " in 2 files"),
    "rewritten": ("rewrite_verdict", "before the rewrite", "First take 3. Then add 4", "[-", "{+"),
    "rows": ("token row", "96 tokens", "document 1 of ", "▌ ", "padding: "),
    "chats.jsonl": ("conversation chat-299", "question 0 ␛[2J", "reply 299", "{broken",
                    "not JSON"),
    "prompts.jsonl": ("answer  answer 7",),
    "preferences.jsonl": ("\nchosen\n\nbetter", "\nrejected\n\nworse"),
    "run": ("prompt chat-7, step 1, 5 samples shown, mean reward 0.5", "sample 4: reward 1, 3",
            "right  unmet, 0 points", "text 59/0"),
    "scores.parquet": ("item task, item-2", "exact   1\nf1      0.25", "wrong one", "long text"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_every_kind_of_row_in_80_columns(made: Path, sabia: Commands, name: str) -> None:
    shown = show(sabia, made / name)
    for expected in EXPECTED[name]:
        assert expected in shown, expected
    assert max(map(cell_len, shown.splitlines())) <= 80
    assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown)
    out = made / f"{name}.html"
    show(sabia, made / name, "-o", out, "--rows", 500)
    page = ElementTree.fromstring(out.read_bytes().replace(b"<!DOCTYPE html>", b""))
    whole = "".join(page.itertext())
    for expected in EXPECTED[name]:
        if not re.search(r"[-─▌{\n]|  |made by", expected):
            assert expected in whole, expected
    assert not re.search(r"(src|href)=|<script|url\(|@import", out.read_text())


def test_samples_of_a_prompt_are_shown_together_with_it(made: Path, sabia: Commands) -> None:
    """Though the rows are read 128 at a time, and 128 is no multiple of 5."""
    shown = show(sabia, made / "run", "--with", made / "prompts.jsonl")
    assert shown.count("5 samples shown") == 60
    assert shown.count("question 42") == 1 and "answer  answer 42" in shown
    first = shown.split("── prompt")[1]
    assert re.findall(r"reward ([\d.]+), 3", first) == ["1", "0.75", "0.5", "0.25", "0"]


def test_token_rows_with_masks(made: Path, sabia: Commands, tmp_path: Path) -> None:
    """Every token is shown once, and those without loss have no bar."""
    tokenizer = load_tokenizer(made / "other" / "_tokenizer")
    ids = tokenizer.encode_ordinary("alpha beta gamma delta alpha beta gamma delta")
    mask = [n >= 5 for n in range(len(ids))]
    row = {"input_ids": [*ids, 0, 0], "document_lengths": [len(ids)]}
    row["loss_mask"] = [*mask, False, False]
    with open_file(str(tmp_path / "rows.parquet"), schemas.KINDS["tokens"], {}) as file:
        file.write(pa.RecordBatch.from_pylist([row], schema=schemas.KINDS["tokens"]))
    path = tmp_path / "rows.parquet"
    shown = show(sabia, path, "--tokenizer", made / "other" / "_tokenizer")
    assert "5 without loss" in shown and "padding: 2 tokens" in shown
    lines = shown.splitlines()
    trained = "".join(line.removeprefix("▌ ") for line in lines if line.startswith("▌ "))
    assert trained.split() == tokenizer.decode(ids[5:]).split()
    masked = [line for line in lines if line.startswith("  ") and line.strip()]
    assert "".join(masked).split() == tokenizer.decode(ids[:5]).split()
    numbers = re.sub("\n▌ ", " ", show(sabia, path))  # no tokenizer next to it
    assert " ".join(map(str, ids[5:])) in numbers and "--tokenizer DIR" in numbers


def test_conversations_as_their_template_renders_them(made: Path, sabia: Commands) -> None:
    given = made / "other" / "_tokenizer"
    shown = show(sabia, made / "chats.jsonl", "-n", 2, "--tokenizer", given)
    if load_tokenizer(given).chat_template:
        assert re.search("▌ reply 1", shown)
    else:
        assert "not rendered" in shown and "reply 1" in shown


def test_where_and_rows(made: Path, sabia: Commands) -> None:
    every = pq.read_table(made / "removed").to_pylist()
    near = [row["id"] for row in every if row["reason"] == "near" and row["similarity"] > 0.9]
    words = "--where", "reason == 'near' and similarity > 0.9"
    assert [row["id"] for row in rows(sabia, made / "removed", *words)] == near and near
    assert len(rows(sabia, made / "removed", "--rows", 3)) == 3
    chosen = rows(sabia, made / "run", "--where", "reward > 0.7 and 'text 1' in text")
    assert {row["text"][:6] for row in chosen} == {"text 1"} and min(
        r["reward"] for r in chosen
    ) > 0.7
    assert len(rows(sabia, made / "chats.jsonl", "--where", "id == 'chat-250'")) == 1
    scored = rows(sabia, made / "long", "--where", "word_count > 80")
    assert scored and all(row["scores"]["word_count"] > 80 for row in scored)
    wrong = sabia("show", made / "raw", "--where", "reward > 1")
    assert wrong.returncode == 2 and b"'reward' is neither a column nor a score" in wrong.stderr
    none = sabia("show", made / "raw", "--where", "url == 'none'")
    assert (none.returncode, none.stdout) == (0, b"") and b"no rows for which" in none.stderr


def test_differences_of_outputs(made: Path, sabia: Commands) -> None:
    """Against a comparison by dictionaries, with shards that are and are not made of each other."""
    for before, after in (("raw", "kept"), ("kept", "rewritten"), ("rewritten", "kept"),
                          ("kept", "kept"), ("raw", "rewritten")):  # fmt: skip
        tables = [pq.read_table(made / name).to_pylist() for name in (before, after)]
        for row in (row for one in tables for row in one if "id" not in row):
            row["id"] = schemas.document_id(row["source"], row["text"])
        ids = [Counter(row["id"] for row in one) for one in tables]
        done = sabia("show", "--diff", made / before, made / after, "--to", "jsonl")
        assert done.returncode == 0, done.stderr
        found = Counter(json.loads(line)["change"] for line in done.stdout.splitlines())
        assert found["removed"] == (ids[0] - ids[1]).total()
        assert found["added"] == (ids[1] - ids[0]).total()
        if (before, after) == ("kept", "kept"):
            assert not found and done.stderr.endswith(b"0 removed, 0 added, 0 changed\n")
    shown = show(sabia, "--diff", made / "kept", made / "rewritten")
    assert "[-The answer is 7. -]" in shown and "rewrite_verdict" in shown
    assert max(map(cell_len, shown.splitlines())) <= 80
    found = rows(sabia, "--diff", made / "kept", made / "rewritten", "--where", "source == 's1'")
    assert found and {one["after"]["source"] for one in found} == {"s1"}
    wrong = sabia("show", "--diff", made / "kept", made / "rewritten", "--where", "none > 1")
    assert wrong.returncode == 2 and b"'none'" in wrong.stderr


def test_rows_with_equal_ids_and_in_another_order(sabia: Commands, tmp_path: Path) -> None:
    draw = random.Random(1)
    old = [{"id": str(draw.randrange(300)), "text": str(n)} for n in range(1500)]
    new = [row | {"text": row["text"] + "!"} if draw.random() < 0.2 else row for row in old]
    new = [row for row in new if draw.random() < 0.7] + [{"id": "new", "text": "?"}] * 3
    draw.shuffle(new)
    for name, one in (("old", old), ("new", new)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in one))
    ids = [Counter(row["id"] for row in one) for one in (old, new)]
    found = rows(sabia, "--diff", tmp_path / "old.jsonl", tmp_path / "new.jsonl")
    kinds = Counter(one["change"] for one in found)
    assert kinds["removed"] == (ids[0] - ids[1]).total()
    assert kinds["added"] == (ids[1] - ids[0]).total() >= 3
    restored = Counter(json.dumps(row, sort_keys=True) for row in old)
    for one in found:  # applying the changes gives the rows after
        for side, sign in (("before", -1), ("after", 1)):
            if one[side] is not None:
                plain = {k: v for k, v in one[side].items() if v is not None}
                restored[json.dumps({k: plain[k] for k in ("id", "text")}, sort_keys=True)] += sign
    assert +restored == Counter(json.dumps(row, sort_keys=True) for row in new)


def test_judging(made: Path) -> None:
    """Its shares and intervals are those of the answers; 'q' and the end of the answers stop it."""

    def judged(answers: str, *words: object) -> tuple[dict[str, Any], bytes]:
        done = run(*words, "--judge", "--json", given=answers.encode())
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    report, said = judged("y\nn\nwhat\ns\nN\ny\nq\ny\n", made / "removed", "--sample", 20)
    counts = [report[name] for name in ("answered", "wrong", "skipped", "rate")]
    assert counts == [4, 2, 1, 0.5] and b"5 of 20" in said and b"y: yes" in said
    interval = report["low"], report["high"]
    assert interval == pytest.approx((0.150, 0.850), abs=1e-3)  # 2 of 4 by Wilson
    of_reasons = report["by_reason"].values()
    assert sum(one["answered"] for one in of_reasons) == 4
    assert sum(one["wrong"] for one in of_reasons) == 2
    report, _ = judged("n\n" * 100, made / "poor")
    assert report["rate"] == 1 == report["high"]
    plain = run(made / "removed", "--judge", given=b"y\n").stdout.decode()
    assert re.search(r"^all +1 +0 +0\.0000 +0\.0000 +0\.7935$", plain, re.M)
    wrong = run(made / "kept", "--judge")
    assert wrong.returncode == 2 and b"expected removed rows" in wrong.stderr


BAD = [
    (["empty"], 2, "no input files"), (["absent"], 2, "No such file"),
    (["cut.parquet"], 65, "corrupt or cut short"), (["cut.arrow"], 65, "end mark"),
    (["program"], 65, "neither Parquet, Arrow nor JSON"), (["run"], 65, "not the record of a run"),
    (["kept", "-o", "page.txt"], 2, "expected FILE.html"), 
    (["--diff", "kept"], 2, "BEFORE and AFTER"), (["kept", "--seed", "-1"], 2, "seed"),
    (["kept", "--to", "jsonl", "-o", "p.html"], 2, "no --out"),
    (["kept", "--where", "import os"], 2, "not an expression"),
    (["kept", "--judge", "--diff"], 2, "not together"),
]  # fmt: skip


@pytest.mark.parametrize("words, code, message", BAD, ids=lambda value: str(value)[:40])
def test_errors_in_one_line(
    made: Path, sabia: Commands, tmp_path: Path, words: list[str], code: int, message: str
) -> None:
    for name in ("empty", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "run.json").write_text("[]")
    (tmp_path / "program").write_bytes(b"\x7fELF\x02\x01")
    shard = (made / "kept" / "part-00000.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(shard[: len(shard) // 2])
    with pa.ipc.new_stream(tmp_path / "whole.arrow", pa.schema([("text", pa.string())])) as file:
        file.write_batch(pa.RecordBatch.from_pydict({"text": ["a"] * 9}))
    (tmp_path / "cut.arrow").write_bytes((tmp_path / "whole.arrow").read_bytes()[:-8])
    there = [made / w if w == "kept" else tmp_path / w if w[0] != "-" and "." not in w[:1] and
             (tmp_path / w).exists() else w for w in words]  # fmt: skip
    done = sabia("show", *there)
    assert done.returncode == code, done.stderr
    assert message in done.stderr.decode() and done.stderr.count(b"\n") == 1


def test_a_shard_that_is_damaged_later_ends_what_is_shown(
    made: Path, sabia: Commands, tmp_path: Path
) -> None:
    for number in range(2):
        path = made / "kept" / f"part-0000{number}.parquet"
        data = path.read_bytes()
        (tmp_path / path.name).write_bytes(data[: len(data) - number * 5000])
    done = sabia("show", tmp_path)
    whole = pq.read_metadata(made / "kept" / "part-00000.parquet").num_rows
    assert done.returncode == 65 and done.stdout.count(b"\nurl ") == whole
    assert b"part-00001.parquet: corrupt" in done.stderr


def test_texts_that_are_not_utf8_and_nulls(sabia: Commands, tmp_path: Path) -> None:
    text_column = pa.array([b"caf\xe9", None, b"ok"], pa.binary()).view(pa.string())
    table = pa.table({"text": text_column, "n": [1, 2, 3]})
    pq.write_table(table, tmp_path / "bad.parquet")
    shown = show(sabia, tmp_path / "bad.parquet")
    assert "caf\ufffd" in shown and "n  2" in shown and "ok" in shown


def run(*words: object, given: bytes = b"", **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sabia.cli.main", "show", *map(str, words)]
    environment = ENVIRONMENT | {"PYTHONPATH": ""} | variables
    return subprocess.run(
        command, input=given, capture_output=True, check=False, env=environment, timeout=120
    )


def test_pipes(made: Path) -> None:
    shard = (made / "kept" / "part-00000.parquet").read_bytes()
    done = run("--rows", 2, given=shard)
    assert done.returncode == 0 and done.stdout.decode().count("── <stdin>, row") == 2
    listed = run("-", "--sample", 1, given=f"{made}/kept/part-00001.parquet\n".encode())
    assert b"part-00001.parquet, row" in listed.stdout
    empty = run(given=b"")
    assert empty.returncode == 65 and b"empty input" in empty.stderr
    words = f"{sys.executable} -m sabia.cli.main show {made}/chats.jsonl | head -1"
    words += "; exit ${PIPESTATUS[0]}"
    closed = subprocess.run(
        ["bash", "-c", words], capture_output=True, check=False, env=ENVIRONMENT
    )
    assert (closed.returncode, closed.stderr) == (141, b"") and b"chat-0" in closed.stdout


def terminal(*words: object, **variables: str) -> tuple[int, str, float]:
    """(exit code, what is on a terminal of 80 columns, CPU seconds)"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child, file = pty.fork()
    if child == 0:
        environment = dict(ENVIRONMENT, TERM="xterm", COLUMNS="80") | variables
        command = [sys.executable, "-m", "sabia.cli.main", "show", *map(str, words)]
        os.execve(sys.executable, command, environment)
    parts = []
    try:
        while part := os.read(file, 1 << 16):
            parts.append(part)
    except OSError:  # the terminal is closed
        pass
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return code, b"".join(parts).decode(), cpu


def test_a_terminal_gets_pages_of_its_width(made: Path) -> None:
    code, shown, _ = terminal(made / "removed", SABIA_PAGER="cat -A")
    assert code == 0 and "^[[31m[- omega-]^[[0m" in shown
    code, shown, _ = terminal(made / "removed", SABIA_PAGER="")
    assert code == 0 and "\x1b[1mremoved" in shown
    for line in re.sub("\x1b\\[\\d+m", "", shown).split("\r\n"):
        assert cell_len(line) <= 80
    code, shown, _ = terminal(made / "removed", NO_COLOR="1", PAGER="cat")
    assert code == 0 and "\x1b" not in shown
    code, shown, _ = terminal(made / "chats.jsonl", SABIA_PAGER="head -3", COLUMNS="40")
    assert code == 0 and shown.count("\r\n") == 3 and "conversation chat-0" in shown
    code, shown, _ = terminal(made / "chats.jsonl", PAGER="no-such-pager", NO_COLOR="1")
    assert code == 0 and "reply 299" in shown


def test_the_first_screen_of_a_terabyte(tmp_path: Path) -> None:
    """Little is read of a sparse file, and no framework for models is imported."""
    shard = tmp_path / "part-00000.arrow"
    sparse_rows(shard, 30)
    for number in range(1, 3000):
        os.link(shard, tmp_path / f"part-{number:05d}.arrow")
    code, shown, _ = terminal(tmp_path, SABIA_PAGER="head -24")
    assert code == 0 and "token row" in shown
    program = (
        "import os, sys; sys.argv = ['sabia', 'show', sys.argv[1], '-n', '2']\n"
        "from sabia.cli import main\n"
        "main.end_process = lambda code: None\n"
        "try: main.program()\n"
        "finally:\n"
        "  read = next(int(l.split()[1]) for l in open('/proc/self/io') if l[:5] == 'rchar')\n"
        "  loaded = [m for m in ('torch', 'jax', 'numba', 'pandas', 'transformers') "
        "if m in sys.modules]\n"
        "  print(read, loaded, file=sys.stderr, flush=True)\n"
        "  os._exit(0)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=True, env=ENVIRONMENT)
    read, loaded = done.stderr.decode().strip().split(" ", 1)
    assert loaded == "[]" and int(read) < 64e6
