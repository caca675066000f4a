"""`sabia rewrite` as a user runs it: rules in any number of workers, an endpoint with faults."""

import contextlib
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from forked import Command
from kills import left_over, through_kills

STUB = Path(__file__).parents[1] / "openai_stub.py"
spec = importlib.util.spec_from_file_location("openai_stub", STUB)
openai_stub = importlib.util.module_from_spec(spec)
spec.loader.exec_module(openai_stub)
Stub = openai_stub.Stub

SABIA = Command()
PLAIN = [sys.executable, "-m", "sabia.cli.main"]


def sabia(*words, **settings):
    settings = {"capture_output": True, "check": True, "timeout": 60} | settings
    return subprocess.run([*SABIA, *map(str, words)], **settings)


def exercise(draw):
    a, b = draw.randint(10, 99), draw.randint(10, 99)
    units = a % 10 + b % 10
    return (
        f"How much is {a}+{b}? The answer is {a + b}. First add the units: {a % 10}+{b % 10}="
        f"{units}. Then add the tens and the carry: {a + b}."
    )


def rows(count=40, seed=0):
    draw = random.Random(seed)
    for i in range(count):
        parts = [exercise(draw) for _ in range(3)] if i % 2 else [f"Plain page {i} about the sea."]
        yield {"text": "\n\n".join(parts), "source": "web", "quality": i / 10}


@pytest.fixture
def pages(tmp_path):
    pq.write_table(pa.Table.from_pylist(list(rows())), tmp_path / "pages.parquet")
    return tmp_path / "pages.parquet"


def reordered(text):
    """What a good model answers: each exercise with its second sentence last."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        head, sign, rest = paragraph.partition("? ")
        answer, _, steps = rest.partition(". ")
        paragraphs.append(f"{head}{sign}{steps} {answer}." if sign and steps else paragraph)
    return "\n\n".join(paragraphs)


def answer(text):
    return reordered(text.partition("Answer with the text alone.\n")[2])


def endpoint(stub, tmp_path, *more):
    return ("--engine", "endpoint", "--url", stub.url, "--model", "m",
            "--cache", tmp_path / "cache", *more)  # fmt: skip


def test_rules_reorder_count_and_say_where_from(pages, tmp_path):
    stats = tmp_path / "s.json"
    done = sabia("rewrite", pages, "-o", tmp_path / "out.parquet", "--stats", stats)
    old, new = pq.read_table(pages).to_pylist(), pq.read_table(tmp_path / "out.parquet").to_pylist()
    for before, after in zip(old, new, strict=True):
        changed = "answer" in before["text"]
        assert after["text"] == (reordered(before["text"]) if changed else before["text"])
        assert after["rewritten"] == changed and after["quality"] == before["quality"]
        assert after["rewrite_engine"] == "rules" and len(after["rewrite_source_hash"]) == 32
        assert after["rewrite_verdict"] == ("rewritten" if changed else "unchanged")
    words = done.stderr.decode()
    assert "rewritten 20" in words
    assert "answer position 0.00 → 1.00" in words and "over 60 conclusions" in words
    assert json.loads(stats.read_text())["counters"]["conclusions[before]"] == 60


def test_workers_pipes_and_twice_give_the_same(pages, tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    for part in range(3):
        table = pa.Table.from_pylist(list(rows(seed=part)))
        pq.write_table(table, shards / f"p{part}.parquet")
    sabia("rewrite", shards, "-o", tmp_path / "one")
    sabia("rewrite", shards, "-o", tmp_path / "two", "-j", 2)
    for part in range(3):
        name = f"part-{part:05d}.parquet"
        assert pq.read_table(tmp_path / "one" / name).equals(pq.read_table(tmp_path / "two" / name))
    with pages.open("rb") as file:
        first = sabia("rewrite", "-q", stdin=file).stdout
    second = sabia("rewrite", "-q", input=first).stdout
    texts = [pq.read_table(pa.BufferReader(raw)).column("text") for raw in (first, second)]
    assert texts[0].equals(texts[1])
    again = pq.read_table(pa.BufferReader(second))
    assert not any(again.column("rewritten").to_pylist())
    assert len(set(again.schema.names)) == len(again.schema.names)


def test_endpoint_rewrites_through_faults_and_never_pays_twice(pages, tmp_path):
    faults = ["503", "429-ms", "garbage", "reset", "", "", "", "", "", ""]

    def fault(text, attempt):
        return random.Random(text).choice(faults) if attempt == 0 else ""

    with Stub(answer=answer, fault=fault, retry_after_s=0.1) as stub:
        out = tmp_path / "out.parquet"
        done = sabia("rewrite", pages, "-o", out, *endpoint(stub, tmp_path))
        paid = sum(stub.delivered.values())
        sabia("rewrite", pages, "-o", out, "--force", *endpoint(stub, tmp_path))
        assert sum(stub.delivered.values()) == paid == 40 and stub.early == 0
    rewritten = pq.read_table(out).to_pylist()
    assert sum(row["rewritten"] for row in rewritten) == 20
    assert [row["text"] for row in rewritten] == [reordered(row["text"]) for row in rows()]
    assert {row["rewrite_model"] for row in rewritten} == {"stub-1"}
    assert {row["rewrite_finish_reason"] for row in rewritten} == {"stop"}
    assert len({row["rewrite_prompt_hash"] for row in rewritten}) == 1
    words = done.stderr.decode()
    assert "answer position 0.00 → 1.00" in words and "40 calls, 0 from the cache" in words


@pytest.mark.parametrize("policy", ["keep", "reject"])
def test_unfaithful_answers_are_kept_out(pages, tmp_path, policy):
    def wrong(text):
        return answer(text).replace("The answer is", "The answer is 7777, not")

    with Stub(answer=wrong) as stub:
        more = endpoint(stub, tmp_path, "--on-unfaithful", policy, "--stats", tmp_path / "s.json")
        sabia("rewrite", pages, "-o", tmp_path / "out.parquet", *more)
        with_loss = Stub(answer=lambda text: "As an AI I cannot do that.")
        with with_loss as other:
            more = endpoint(other, tmp_path / "b", "--on-unfaithful", policy)
            none = sabia("rewrite", pages, "-o", tmp_path / "none.parquet", *more, check=False)
    assert none.returncode == (0 if policy == "keep" else 65)  # every row was rejected
    kept = pq.read_table(tmp_path / "none.parquet").to_pylist()
    if policy == "keep":
        assert [row["text"] for row in kept] == [row["text"] for row in rows()]
        assert {row["rewrite_verdict"] for row in kept} == {"refusal or talk about the task"}
    else:
        assert kept == []
        rejects = pq.read_table(tmp_path / "none.rejects.parquet").to_pylist()
        assert len(rejects) == 40
        assert {row["reason"] for row in rejects} == {"rewrite: refusal or talk about the task"}


def test_a_killed_run_goes_on_where_it_was(pages, tmp_path):
    with Stub(answer=answer, latency_s=0.1) as stub:
        more = endpoint(stub, tmp_path, "--concurrency", 2)
        command = [*PLAIN, "rewrite", str(pages), "-o", str(tmp_path / "o.parquet")]
        command += [str(word) for word in more]
        for number, code in ((signal.SIGKILL, -9), (signal.SIGTERM, 75)):
            before = sum(stub.delivered.values())
            running = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            deadline = time.time() + 30
            while sum(stub.delivered.values()) < before + 6 and time.time() < deadline:
                time.sleep(0.01)
            running.send_signal(number)
            sent = time.time()
            assert running.wait(10) == code and time.time() - sent < 5
            assert not (tmp_path / "o.parquet").exists()
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        assert len(stub.delivered) == 40
        assert sum(n - 1 for n in stub.delivered.values()) <= 2  # what was in flight at kill -9


@pytest.mark.slow
@pytest.mark.parametrize("out", ["o.parquet", "o"])
def test_twenty_kills_lose_and_double_nothing(tmp_path, out):
    inputs = tmp_path / "in"
    inputs.mkdir()
    for part in range(4):
        table = pa.Table.from_pylist(list(rows(60, seed=part)))
        pq.write_table(table, inputs / f"p{part}.parquet")
    with Stub(answer=answer, latency_s=0.02) as stub:
        more = endpoint(stub, tmp_path / "once", "--concurrency", 4, "-j", 2)
        begun = time.monotonic()
        sabia("rewrite", inputs, "-o", tmp_path / "whole" / out, *more)
        longest_s = time.monotonic() - begun
        calls = sum(stub.delivered.values())
    with Stub(answer=answer, latency_s=0.02) as stub:
        more = endpoint(stub, tmp_path, "--concurrency", 4, "-j", 2)
        words = [*PLAIN, "rewrite", inputs, "-o", tmp_path / "made" / out, *more]
        through_kills(words, 20, random.Random(out), longest_s, tmp_path / "t")
        assert calls <= sum(stub.delivered.values()) <= calls + 20 * 2 * 4  # in flight at kill -9
    made = sorted((tmp_path / "made").rglob("*.parquet"))
    assert len(made) == (1 if out == "o.parquet" else 4)
    for path in made:
        whole = pq.read_table(tmp_path / "whole" / path.relative_to(tmp_path / "made"))
        assert pq.read_table(path).equals(whole)
    assert not left_over(tmp_path)


def test_wrong_key_and_outage_and_budget_end_in_one_line(pages, tmp_path):
    out = ("-o", tmp_path / "o.parquet")
    with Stub(fault=lambda text, attempt: "401") as stub:
        done = sabia("rewrite", pages, *out, *endpoint(stub, tmp_path), check=False)
        line = done.stderr.decode().splitlines()[-1]
        assert done.returncode == 1 and "HTTP 401: planned 401" in line
        assert stub.requests <= 16
    with Stub(answer=answer) as stub:
        more = endpoint(stub, tmp_path, "--max-requests", 5)
        for _ in range(2):  # the cap is that of all starts
            done = sabia("rewrite", pages, "-o", tmp_path / "capped", *more, check=False)
            assert done.returncode == 3 and stub.requests == 5
            assert b"request budget reached: 5 sent" in done.stderr
    assert not (tmp_path / "o.parquet").exists()


def test_a_cap_is_shared_by_the_tasks_of_an_array(tmp_path):
    (tmp_path / "in").mkdir()
    for part in range(2):
        table = pa.Table.from_pylist(list(rows(seed=part)))
        pq.write_table(table, tmp_path / "in" / f"p{part}.parquet")
    with Stub(answer=answer, latency_s=0.01) as stub:
        words = [*PLAIN, "rewrite", tmp_path / "in", "-o", tmp_path / "out"]
        words += endpoint(stub, tmp_path, "--max-requests", 20)
        tasks = [
            subprocess.Popen([*map(str, words), "--shard", f"{part}/2"], stderr=subprocess.PIPE)
            for part in range(2)
        ]
        for task in tasks:
            assert b"request budget reached: 20 sent" in task.communicate()[1]
            assert task.returncode == 3
        assert stub.requests == 20
        words[words.index(20)] = 200
        done = subprocess.run([*map(str, words)], stderr=subprocess.PIPE, check=True, text=True)
        assert f"the run in all: {stub.requests} requests" in done.stderr


def test_dry_run_says_what_it_would_cost(pages, tmp_path):
    (tmp_path / "prices.toml").write_text("[m]\nprompt = 1.0\ncompletion = 2.0\n")
    with Stub(answer=answer) as stub:
        more = endpoint(stub, tmp_path, "--prices", tmp_path / "prices.toml")
        plan = sabia("rewrite", pages, "-o", tmp_path / "o.parquet", "--dry-run", *more)
        assert stub.requests == 0
    first = plan.stdout.decode().splitlines()[0]
    assert "40 requests (0 more are in the cache)" in first and "at most $0.0" in first


@pytest.mark.parametrize("out", ["o.parquet", "o"])
def test_a_terminal_shows_what_a_run_costs_while_it_runs(pages, tmp_path, out):
    (tmp_path / "prices.toml").write_text("[m]\nprompt = 1.0\ncompletion = 2.0\n")
    with Stub(answer=answer, latency_s=0.2) as stub:
        more = endpoint(stub, tmp_path, "--prices", tmp_path / "prices.toml", "--concurrency", 2)
        screen, side = os.openpty()
        words = [*PLAIN, "rewrite", pages, "-o", tmp_path / out, *more]
        env = os.environ | {"COLUMNS": "200", "TERM": "xterm"}
        running = subprocess.Popen([*map(str, words)], stderr=side, env=env)
        os.close(side)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal whose programs have ended
            while piece := os.read(screen, 65536):
                shown += piece
        os.close(screen)
        assert running.wait() == 0
    figures = re.findall(r"([\d,]+) requests, ([\d,]+) tokens, (\$[\d.]+), 0% from", shown.decode())
    counts = [int(requests) for requests, _, _ in figures]
    assert counts == sorted(counts) and len({0, *counts}) > 2 and max(counts) <= 40
    assert len({usd for _, _, usd in figures}) > 1


SHOUT = """
prompt = "Write the text in capitals.\\nAnswer with the text alone."
pieces = {at = "lines", most-chars = 200}
filters = {min-chars = 30, matches = "answer"}
checks = {words = 0.9, names = false, language = false, length = [0.5, 2]}
"""


def test_a_recipe_of_a_file_decides_prompt_pieces_filters_and_checks(pages, tmp_path):
    recipe = tmp_path / "shout.toml"
    recipe.write_text(SHOUT)

    def capitals(text):
        assert text.startswith("Write the text in capitals.")
        return text.partition("Answer with the text alone.\n")[2].upper()

    more = ("--recipe", recipe)
    with Stub(answer=capitals) as stub:
        out = tmp_path / "out.parquet"
        sabia("rewrite", pages, "-o", out, *endpoint(stub, tmp_path, *more))
        sent = stub.requests
        assert all(len(body["messages"][1]["content"]) <= 200 for body in stub.bodies)
        recipe.write_text(SHOUT.replace("0.5, 2]", "2, 3]"))  # the same calls, other checks
        sabia("rewrite", pages, "-o", tmp_path / "b.parquet", *endpoint(stub, tmp_path, *more))
        assert stub.requests == sent
        repeated = sabia("rewrite", pages, "-o", out, *endpoint(stub, tmp_path, *more), check=False)
    assert repeated.returncode == 0  # other checks are another run
    before = list(rows())
    for old, new in zip(before, pq.read_table(tmp_path / "b.parquet").to_pylist(), strict=True):
        asked = "answer" in old["text"]
        assert new["text"] == old["text"] and new["rewrite_recipe"] == "shout"
        verdict = "length ratio 1.00 (expected 2 to 3)" if asked else "left out by "
        assert new["rewrite_verdict"].startswith(verdict)
    assert pq.read_table(out).equals(pq.read_table(tmp_path / "b.parquet"))
    done = sabia("rewrite", pages, *more, check=False)
    assert done.returncode == 2 and b"recipe shout has no rules" in done.stderr


def test_usage_errors(pages, tmp_path):
    cases = [
        (["--engine", "endpoint"], "--url: is missing (--engine endpoint needs it)"),
        (["--engine", "local"], "--model: is missing (--engine local needs it)"),
        (["--engine", "local", "--model", tmp_path], "not a model directory"),
        (["--recipe", "haiku"], "--recipe: 'haiku' (expected best-of, constitution, ensemble, "),
        (["--recipe", "reason-frst"], "did you mean reason-first?"),
        (["--recipe", tmp_path / "none.toml"], "none.toml: No such file"),
        (["--engine", "endpoint", "--url", "here", "--model", "m"], "not an HTTP address"),
        (["--engine", "endpoint", "--url", "http://x/v1", "--model", "m", "--max-usd", "1"],
         "--max-usd: only with --prices"),
    ]  # fmt: skip
    for words, message in cases:
        env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = sabia("rewrite", pages, *words, check=False, env=env)
        assert done.returncode == 2 and message in done.stderr.decode(), words
