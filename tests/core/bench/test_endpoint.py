"""Endpoints that score prompts, and those that only seem to."""

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sabia.core.bench.endpoint import PromptScorer
from sabia.core.errors import UsageError


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
def server(answer, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made = json.dumps({"choices": [answer(body["prompt"])]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(made)))
            self.end_headers()
            self.wfile.write(made)

        def log_message(self, *_: object) -> None:
            return None

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/v1"
    finally:
        running.shutdown()


def test_continuations_are_the_tokens_that_reach_into_them() -> None:
    with server(honest) as url:
        scorer = PromptScorer(url, "m")
        scorer.probe()
        found = scorer.score("abcdef", ["ghi", "ghijkl"])
    values = honest("abcdefghijkl")["logprobs"]["token_logprobs"]
    assert found == [pytest.approx(values[2]), pytest.approx(values[2] + values[3])]


@pytest.mark.parametrize("answer", [no_echo, all_zero, without])
def test_endpoints_that_ignore_echo_are_refused(answer) -> None:
    with server(answer) as url, pytest.raises(UsageError, match="local --model DIR"):
        PromptScorer(url, "m").probe()


def test_endpoints_without_completions_are_refused_with_their_words() -> None:
    with server(honest, 404) as url, pytest.raises(UsageError, match="HTTP 404"):
        PromptScorer(url, "m").probe()


def test_the_honest_server_prefers_something() -> None:
    logs = honest("The capital of Brazil is")["logprobs"]["token_logprobs"][1:]
    assert len({round(x, 3) for x in logs}) > 3 and all(math.isfinite(x) for x in logs)
