"""`sabia serve` as users start and end it, and other commands that use it as their server."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import sabia as called
from served import little_engine
from training_cases import torchrun

from sabia.core.generate.chat import render
from sabia.core.generate.requests import Request
from sabia.core.judge.prompt import SYSTEM, reply_schema
from sabia.core.judge.rubric import Item
from sabia.core.model.lora import LoraConfig, lora_tensors
from sabia.core.model.storage import hub
from sabia.core.model.storage.peft_adapters import save_adapter
from sabia.core.serve.response_format import ResponseFormats
from sabia.core.spec import from_config, load_spec, new_config
from sabia.core.text.tokenize.tokenizer_training import train_bpe

sys.path.insert(0, str(Path(__file__).parents[1]))
from openai_stub import Stub

SABIA = [sys.executable, "-m", "sabia.cli.main"]
RECORDS = ["the quick brown fox", "olá mundo", "0123 + 4", "é só um teste", "lazy dog"]
LIKELY = [" the", " olá"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, engine = tmp_path_factory.mktemp("served"), little_engine(1024)
    engine.tokenizer.save(root / "t")
    params = {name: value.numpy() for name, value in engine.params.items()}
    hub.save_model(root / "little", engine.spec, params, tokenizer_from=root / "t")
    return root / "little"


class Started:
    """A server process. url: up to /v1. start: the words before serve."""

    def __init__(self, *words: object, start: Sequence[str] = SABIA, **settings: str) -> None:
        command = [*start, "serve", *map(str, words), "--port", "0"]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | settings
        )
        assert self.process.stderr is not None
        self.line = self.process.stderr.readline()
        match = re.search(r"http://\S+/v1", self.line)
        assert match, self.line + self.process.stderr.read()
        self.url = match[0]

    def post(self, path: str, body: dict[str, Any], token: str = "") -> tuple[int, Any]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        data = json.dumps({"model": "little", **body}).encode()
        try:
            with urllib.request.urlopen(
                urllib.request.Request(self.url + path, data, headers), timeout=120
            ) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        _, text = self.process.communicate(timeout=120)
        return self.process.returncode, text


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Started]:
    started = Started("--model", model, "--samples", 8)
    yield started
    assert started.end()[0] == 75


def sabia(*words: object) -> subprocess.CompletedProcess:
    command = [*SABIA, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_rewrite_gives_what_the_engine_in_the_process_gives(
    server: Started, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.toml").write_text('prompt = "say"\n')
    lines = "".join(json.dumps({"id": str(i), "text": t}) + "\n" for i, t in enumerate(RECORDS))
    (tmp_path / "in.jsonl").write_text(lines)
    rows = []
    for name, words in {
        "local": ("--model", model),
        "endpoint": ("--url", server.url, "--model", "little", "--cache", tmp_path / "calls"),
    }.items():
        out = tmp_path / f"{name}.jsonl"
        words = ("rewrite", tmp_path / "in.jsonl", "--engine", name, *words, "-o", out)
        assert sabia(*words, "--recipe", tmp_path / "recipe.toml").returncode == 0
        given = [json.loads(line) for line in out.read_text().splitlines()]
        columns = ("id", "text", "rewrite_verdict", "rewrite_finish_reason")
        rows.append([[row.get(name) for name in columns] for row in given])
    assert len(rows[0]) == len(RECORDS) and rows[0] == rows[1]


def test_options_score_as_in_the_process(server: Started, model: Path, tmp_path: Path) -> None:
    items = [{"id": str(i), "q": t, "gold": 1, "options": LIKELY} for i, t in enumerate(RECORDS)]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "task.toml").write_text(
        'name = "o"\ndata = "items.jsonl"\nkind = "multiple_choice"\nprompt = "{{q}}"\n'
        'choices = "options"\nanswer = "gold"\n'
    )
    scores = []
    for name, where in {"here": model, "there": f"{server.url}#little"}.items():
        out = tmp_path / f"{name}.jsonl"
        words = ("--task", tmp_path / "task.toml", "--model", f"{name}={where}", "-o", out)
        done = sabia("eval", *words, "--judge-cache", tmp_path / "calls")
        assert done.returncode == 0, done.stderr
        given = [json.loads(line) for line in out.read_text().splitlines()]
        scores.append(
            [json.loads(row["detail"])["loglikelihoods"] for row in given if row["detail"]]
        )
    assert len(scores[0]) == len(RECORDS)
    for ours, theirs in zip(*scores, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def policy(root: Path) -> tuple[Path, Path]:
    """A model to train, and prompts whose rubric has two items."""
    tokenizer = train_bpe(["user assistant 37+58=095"] * 4, 300)
    tokenizer.save(root / "t")
    spec = from_config(
        new_config(hidden=32, layers=2, heads=2, vocab=tokenizer.vocab_size, context=64)
    )
    hub.save_model(root / "policy", spec, hub.init_params(spec, 0), tokenizer_from=root / "t")
    items = [{"id": "mark", "text": "has a mark"}, {"id": "vowel", "text": "no vowel"}]
    rows = [{"id": str(n), "messages": [{"role": "user", "content": f"{n}+{n}="}], "rubric": items}
            for n in range(6)]  # fmt: skip
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root / "policy", root / "prompts.jsonl"


@pytest.mark.slow
def test_a_judged_run_ends_as_with_the_engine_in_the_process(tmp_path: Path) -> None:
    engine = little_engine(4096)
    engine.tokenizer.save(tmp_path / "tokenizer")
    params = {name: value.numpy() for name, value in engine.params.items()}
    judge = tmp_path / "little"
    hub.save_model(judge, engine.spec, params, tokenizer_from=tmp_path / "tokenizer")
    model, prompts = policy(tmp_path)
    formats = ResponseFormats(engine.tokenizer, engine.spec.vocab_size)

    def answer(text: str) -> str:
        """What the engine in this process writes, bound to the schema."""
        asked = text.removeprefix(f"{SYSTEM}\n")
        turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
        prompt = render(turns, engine.tokenizer, True)
        item = Item("mark" if 'item "mark"' in text else "vowel", "")
        form = {"type": "json_schema", "json_schema": {"schema": reply_schema([item])}}
        ids, guide = engine.tokenizer.encode(prompt), formats.of_chat(form, prompt)
        return engine.generate([Request(ids, 64, 0.0, guide=guide)])[0].text

    def train(url: str) -> tuple[list[float], bytes]:
        out = tmp_path / f"run{len(list(tmp_path.glob('run?')))}"
        done = sabia(
            "grpo", prompts, "--model", model, "--reward", "rubric", "--steps", 3, "--prompts", 4,
            "--group", 6, "--max-new-tokens", 4, "--lr", "1e-2", "--judge-url", url,
            "--judge-model", "little", "--judge-format", "json-schema", "--judge-tokens", 64,
            "--judge-cache", out.with_suffix(".calls"), "-o", out, "--to", "jsonl",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert not any(row["no_reward"] for row in rows) and any(row["live_groups"] for row in rows)
        return [row["reward"] for row in rows], (out / "final/model.safetensors").read_bytes()

    started = Started("--model", judge, "--samples", 16)
    served = train(started.url)
    assert started.end()[0] == 75
    with Stub(answer) as stub:
        assert train(stub.url) == served


def test_a_signal_finishes_what_runs_and_refuses_what_waits(model: Path) -> None:
    started = Started("--model", model, "--samples", 1)
    body = {"prompt": "the", "max_tokens": 450, "ignore_eos": True}
    replies: list[tuple[int, Any]] = []
    threads = [
        threading.Thread(target=lambda: replies.append(started.post("/completions", body)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    root = started.url.removesuffix("/v1")
    while True:  # until one runs and two wait
        with urllib.request.urlopen(f"{root}/metrics", timeout=60) as page:
            text = page.read().decode()
        if "sabia_samples_running 1\n" in text and "sabia_requests_waiting 2\n" in text:
            break
        assert len(replies) < 2, "the samples ended before the signal"
    code, text = started.end()
    for thread in threads:
        thread.join()
    assert code == 75 and "the running requests were finished" in text
    assert sorted(status for status, _ in replies) == [200, 503, 503]
    whole = next(reply for status, reply in replies if status == 200)
    assert whole["usage"]["completion_tokens"] == 450


@pytest.mark.slow
def test_jax_serves_what_torch_does_with_adapters_and_proposals(
    model: Path, tmp_path: Path
) -> None:
    spec, lora = load_spec(model), LoraConfig(4, 8.0)
    draw = np.random.default_rng(0)
    held = {t.name: draw.standard_normal(t.shape).astype(np.float32) * 0.2
            for t in lora_tensors(spec, lora)}  # fmt: skip
    save_adapter(tmp_path / "a", spec, held, lora)
    words = ("--model", model, "--samples", 4, "--adapter", f"tutor={tmp_path / 'a'}")
    started = {
        "torch": Started(*words), "jax": Started(*words, "--backend", "jax", "--draft", "ngram"),
    }  # fmt: skip
    texts = set()
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 20}
    chat = {**greedy, "messages": [{"role": "user", "content": "fox fox fox"}]}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/completions", {**greedy, "prompt": ["the quick the quick", "olá"], "logprobs": 3,
                          "echo": True}),
        ("/chat/completions", {**chat, "logprobs": True, "top_logprobs": 2}),
        ("/chat/completions", {**chat, "max_tokens": 40,
                               "response_format": {"type": "json_object"}}),
        ("/chat/completions", {**chat, "frequency_penalty": 1.5, "n": 2, "temperature": 0.01}),
    ]  # fmt: skip
    for name in ("little", "tutor"):
        for path, body in calls:
            (status, one), (other_status, other) = (
                server.post(path, {**body, "model": name}) for server in started.values()
            )
            assert status == other_status == 200, (one, other)
            for a, b in zip(one["choices"], other["choices"], strict=True):
                assert (a.get("text"), a.get("message")) == (b.get("text"), b.get("message"))
                assert a["finish_reason"] == b["finish_reason"]
                texts.add(str(a.get("text") or a["message"]))
                for ours, theirs in zip(numbers(a), numbers(b), strict=True):
                    assert ours == pytest.approx(theirs, abs=1e-4)
    assert len(texts) > 6
    for server in started.values():
        assert server.post("/completions", {"prompt": "a", "model": "other"})[0] == 404
        assert server.end()[0] == 75


def numbers(choice: dict[str, Any]) -> list[float]:
    """The log-probabilities of a choice."""
    logs = choice["logprobs"] or {}
    listed = [one["logprob"] for one in logs.get("content", ())]
    return listed + [p for p in logs.get("token_logprobs", ()) if p is not None]


def test_an_address_of_others_needs_a_token(model: Path) -> None:
    done = sabia("serve", "--model", model, "--host", "0.0.0.0")
    assert done.returncode == 2 and "SABIA_SERVE_TOKEN" in done.stderr
    words = ("--model", model, "--host", "0.0.0.0", "--token-env", "OURS", "--context", 64,
             "--name", "n")  # fmt: skip
    started = Started(*words, OURS="secret")
    body = {"model": "n", "prompt": "a", "max_tokens": 1}
    assert started.post("/completions", body)[0] == 401
    assert started.post("/completions", body, "secret")[0] == 200
    assert started.post("/completions", {**body, "max_tokens": 64}, "secret")[0] == 400
    assert started.end(signal.SIGINT)[0] == 130


@pytest.mark.parametrize(("words", "hint"), [
    (("--context", 2048), "at most 1024"),
    (("--cache-memory", "1KiB"), "--cache-memory: 1 KB; a sample of 16 tokens needs"),
    (("--port", 99_999), "--port"),
    (("--draft", "nowhere"), "--draft: nowhere (expected ngram, or a model directory)"),
    (("--draft-tokens", 3), "--draft-tokens"),
    (("--dtype", "int3"), "--dtype"),
])  # fmt: skip
def test_what_cannot_be_is_refused(model: Path, words: tuple[object, ...], hint: str) -> None:
    done = sabia("serve", "--model", model, *words)
    assert done.returncode == 2 and hint in done.stderr and done.stderr.count("\n") == 1


def test_an_address_of_ipv6(model: Path) -> None:
    with contextlib.closing(socket.socket(socket.AF_INET6)) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
    started = Started("--model", model, "--host", "::1")
    assert "//[::1]:" in started.url
    assert started.post("/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
    assert started.end()[0] == 75


def test_a_port_in_use_and_no_model_are_errors(server: Started, model: Path) -> None:
    port = server.url.split(":")[2].split("/")[0]
    done = sabia("serve", "--model", model, "--port", port)
    assert done.returncode == 2 and "cannot listen" in done.stderr
    done = sabia("serve", "--model", model.parent / "t")
    assert done.returncode == 2 and "config.json" in done.stderr


def of_rank(server: Started, rank: int) -> int:
    """The process id of a rank that torchrun has started."""
    call = ["pgrep", "-P", str(server.process.pid)]
    for pid in subprocess.run(call, capture_output=True, text=True).stdout.split():
        if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
            return int(pid)
    raise AssertionError(f"no rank {rank}")


@pytest.mark.slow
def test_processes_that_hold_the_model_together_give_the_same_replies(
    server: Started, model: Path
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    bodies = [
        {"prompt": text, "max_tokens": 24, "seed": seed, "temperature": seed % 2, "n": 1 + seed % 3,
         "logprobs": 2, **more}
        for seed, text in enumerate(RECORDS * 3)
        for more in ({}, {"stop": "o"}, {"structured_outputs": {"json": schema}}, {"echo": True})
    ]  # fmt: skip
    split = Started(
        "--model", model, "--samples", 8, "--mesh", "tensor=2", "--draft", "ngram", "--updates",
        model.parent, start=torchrun(2), OMP_NUM_THREADS="1",
    )  # fmt: skip
    with ThreadPoolExecutor(16) as pool:
        given, ours = (
            list(pool.map(lambda body, to=to: to.post("/completions", body), bodies))
            for to in (split, server)
        )
    equal = 0
    for (status, reply), (_, other) in zip(given, ours, strict=True):
        assert status == 200, reply
        for choice, theirs in zip(reply["choices"], other["choices"], strict=True):
            equal += choice["text"] == theirs["text"]
            logs, others = (one["logprobs"]["token_logprobs"] for one in (choice, theirs))
            if choice["text"] == theirs["text"]:
                pairs = [both for both in zip(logs, others, strict=True) if None not in both]
                # scores of this model are large, and so is their rounding (1.2e-5 of them)
                assert all(a == pytest.approx(b, rel=2e-5, abs=1e-4) for a, b in pairs), pairs
    assert equal >= 0.98 * sum(len(reply["choices"]) for _, reply in given)  # others: near ties
    split.url = split.url.removesuffix("/v1")
    assert split.post("/update_weights", {"path": "little", "model": None}) == (200, {"version": 1})
    again = {**bodies[0], "return_token_ids": True}
    status, reply = split.post("/v1/completions", again)
    assert status == 200 and {*reply["choices"][0]["weight_versions"]} == {1}
    assert reply["choices"][0]["text"] == given[0][1]["choices"][0]["text"]
    os.kill(of_rank(split, 0), signal.SIGTERM)
    _, text = split.process.communicate(timeout=120)
    assert text.count("stopped by a signal; the running requests were finished") == 2, text


@pytest.mark.slow
def test_two_devices_of_jax_give_the_same_replies(server: Started, model: Path) -> None:
    body = {"prompt": RECORDS[0], "max_tokens": 12, "temperature": 0, "logprobs": 0}
    split = Started("--model", model, "--samples", 8, "--mesh", "tensor=2", "--backend", "jax")
    (status, reply), (_, other) = (one.post("/completions", body) for one in (split, server))
    assert status == 200 and split.end()[0] == 75
    (choice,), (theirs,) = reply["choices"], other["choices"]
    logs, others = (one["logprobs"]["token_logprobs"] for one in (choice, theirs))
    assert choice["text"] == theirs["text"] and logs == pytest.approx(others, abs=1e-4)


@pytest.mark.slow
def test_a_process_of_a_split_model_that_dies_ends_the_server(model: Path) -> None:
    split = Started("--model", model, "--mesh", "tensor=2", start=torchrun(2), OMP_NUM_THREADS="1")
    assert split.post("/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
    os.kill(of_rank(split, 1), signal.SIGKILL)
    _, text = split.process.communicate(timeout=120)
    assert "rank      : 1 (local_rank: 1)" in text and split.process.returncode


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mesh", "data=2"), "--mesh: data=2: axis data (expected tensor=N)"),
        (("--mesh", "tensor=2"), "needs 2 devices, there are 1"),
    ],
)
def test_what_a_mesh_cannot_do_is_refused(
    model: Path, words: tuple[str, ...], message: str
) -> None:
    done = called("serve", "--model", model, *words)
    assert done.exit_code == 2 and message in done.output
