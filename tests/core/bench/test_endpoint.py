"""Endpoints that score prompts, and those that only seem to."""

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sabia.core.bench.endpoint import PromptScorer
from sabia.core.errors import UsageError
from sabia.core.generate.budget import Budget, BudgetExceeded
from sabia.core.generate.client import Client


def tokens(text: str) -> list[tuple[int, str]]:
    """Pieces of three characters."""
    return [(i, text[i : i + 3]) for i in range(0, len(text), 3)]


def honest(text: str) -> dict:
    """An echo with a log-probability that depends on the piece."""
    pieces = tokens(text)
    logs = [None] + [-0.1 - sum(map(ord, piece)) % 97 / 10 for _, piece in pieces[1:]]
    offsets = [i for i, _ in pieces] + [len(text)]
    made = {"text_offset": offsets, "token_logprobs": [*logs, -1.0]}
    return {"text": text + "!", "logprobs": made}


def no_echo(text: str) -> dict:
    return {"text": "!", "logprobs": {"text_offset": [0], "token_logprobs": [-1.0]}}


def all_zero(text: str) -> dict:
    made = honest(text)
    made["logprobs"]["token_logprobs"] = [0.0] * len(made["logprobs"]["token_logprobs"])
    return made


def without(text: str) -> dict:
    return {"text": text + "!", "logprobs": None}


@contextmanager
def server(answer, status=lambda prompt, attempt: 200) -> Iterator[tuple[str, Counter]]:
    seen, headers = Counter(), {"Retry-After": "1"}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/completions"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            code = status(body["prompt"], seen[body["prompt"]])
            seen[body["prompt"]] += 1
            made = json.dumps({"choices": [answer(body["prompt"])]}).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(made)))
            for name, value in headers.items() if code == 429 else ():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(made)

        def log_message(self, *_: object) -> None:
            return None

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/v1", seen
    finally:
        running.shutdown()


@contextmanager
def scorer(url: str, folder: Path, **settings: object) -> Iterator[PromptScorer]:
    with Client(url, "m", cache_dir=folder, backoff_s=0.01, refused_after=None, **settings) as one:
        yield PromptScorer(one)


QUESTIONS = [("abcdef", ["ghi", "ghijkl"]), ("xyz", ["uvw", "a"])]


def test_continuations_are_the_tokens_that_reach_into_them(tmp_path: Path) -> None:
    with server(honest) as (url, _), scorer(url, tmp_path) as one:
        one.probe()
        values = one.score_all([("abcdef", ["ghi", "ghijkl"])])
    logs = honest("abcdefghijkl")["logprobs"]["token_logprobs"]
    assert values == [[pytest.approx(logs[2]), pytest.approx(logs[2] + logs[3])]]


@pytest.mark.parametrize("answer", [no_echo, all_zero, without])
def test_endpoints_that_ignore_echo_are_refused_until_they_do(answer, tmp_path: Path) -> None:
    answers = [answer]
    with server(lambda text: answers[0](text)) as (url, _):
        for _ in range(2):
            with scorer(url, tmp_path) as one, pytest.raises(UsageError, match="local --model DIR"):
                one.probe()
        answers[0] = honest
        with scorer(url, tmp_path) as one:
            one.probe()


def test_endpoints_without_completions_are_refused_with_their_words(tmp_path: Path) -> None:
    with (
        server(honest, lambda *_: 404) as (url, _),
        scorer(url, tmp_path) as one,
        pytest.raises(UsageError, match="HTTP 404"),
    ):
        one.probe()


def test_calls_are_cached_and_within_the_budget(tmp_path: Path) -> None:
    with server(honest) as (url, seen):
        with scorer(url, tmp_path) as one:
            one.probe()
            first = one.score_all(QUESTIONS)
        with scorer(url, tmp_path, budget=Budget(max_requests=0)) as one:
            one.probe()
            assert one.score_all(QUESTIONS) == first
            with pytest.raises(BudgetExceeded):
                one.score_all([("new", ["a"])])
        assert set(seen.values()) == {1} and len(seen) == 5


def test_servers_that_ask_to_wait_are_waited_for(tmp_path: Path) -> None:
    answered: list[float] = []

    def status(_prompt: str, attempt: int) -> int:
        answered.append(time.monotonic())
        return 200 if attempt else 429

    with server(honest, status) as (url, _), scorer(url, tmp_path, max_concurrency=1) as one:
        assert one.score_all([("abcdef", ["ghi"])])
    assert answered[1] - answered[0] >= 1


def test_an_item_that_is_refused_has_no_answer_and_the_others_are_scored(tmp_path: Path) -> None:
    def status(prompt: str, _attempt: int) -> int:
        return 400 if prompt == "xyza" else 200

    with server(honest, status) as (url, _), scorer(url, tmp_path) as one:
        scored, refused = one.score_all(QUESTIONS)
        assert len(scored) == 2 and "HTTP 400" in refused


def test_the_honest_server_prefers_something() -> None:
    logs = honest("The capital of Brazil is")["logprobs"]["token_logprobs"][1:]
    assert len({round(x, 3) for x in logs}) > 3 and all(math.isfinite(x) for x in logs)
