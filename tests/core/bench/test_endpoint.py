"""Endpoints that score prompts, and those that only seem to."""

import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from in_process import stage

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


def choice_task(folder: Path) -> Path:
    rows = [{"id": str(n), "q": f"What is {n} and {n + 1}?", "c": ["one", "two"], "a": 0,
             "p": [f"Say {n} plus {n + 1}."]} for n in range(6)]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "t.toml").write_text(
        'name = "t"\nkind = "multiple_choice"\ndata = "rows.jsonl"\nprompt = "{{q}}"\n'
        'chat = false\nchoices = "c"\nanswer = "a"\nparaphrase = "p"\n'
    )
    return folder / "t.toml"


def test_min_k_of_an_endpoint_is_that_of_the_tokens_it_scores(tmp_path: Path) -> None:
    task = choice_task(tmp_path)
    with server(honest) as (url, _):
        stage("eval", task=(str(task),), model=(f"{url}#m",), min_k="20%",
              judge_cache=str(tmp_path / "cache"), out=tmp_path / "s.parquet")  # fmt: skip
    rows = pq.read_table(tmp_path / "s.parquet").to_pylist()
    assert {row["metric"] for row in rows} >= {"acc", "min_k_nats", "paraphrase_gap_bits"}
    assert "min_k_plus_sd" not in {row["metric"] for row in rows}
    for row in rows:
        n = int(row["item_id"])
        texts = [f"What is {n} and {n + 1}?", f"Say {n} plus {n + 1}."]
        question, other = (honest(text)["logprobs"]["token_logprobs"][1:-1] for text in texts)
        least = sorted(question)[: max(1, round(len(question) / 5))]
        if row["metric"] == "min_k_nats":
            assert row["value"] == pytest.approx(sum(least) / len(least))
        if row["metric"] == "paraphrase_gap_bits":
            bits = [-sum(p) / math.log(2) / len(t)
                    for p, t in zip((question, other), texts, strict=True)]  # fmt: skip
            assert row["value"] == pytest.approx(bits[1] - bits[0])
    with server(no_echo) as (url, _), pytest.raises(UsageError, match="local --model DIR"):
        stage("eval", task=(str(task),), model=(f"{url}#m",), min_k="20%",
              judge_cache=str(tmp_path / "other"))  # fmt: skip


def test_a_dry_run_says_what_the_answers_of_an_endpoint_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    task = choice_task(tmp_path)
    words = (
        task.read_text().replace("multiple_choice", "exact_match").replace('choices = "c"\n', "")
    )
    (tmp_path / "u.toml").write_text(words.replace('"t"', '"u"') + "max_new_tokens = 50\n")
    (tmp_path / "prices.toml").write_text("[m]\nprompt = 1.0\ncompletion = 10.0\n")
    given = {"model": ("http://127.0.0.1:9/v1#m",), "dry_run": True, "samples": 3,
             "temperature": 1.0}  # fmt: skip

    def shown(**more: object) -> str:
        stage("eval", task=(str(task), str(tmp_path / "u.toml")), **given, **more)
        return " ".join("".join(capsys.readouterr()).split())

    text = shown(prices=str(tmp_path / "prices.toml"))
    made = re.findall(
        r"([\d,]+) calls at most, ([\d,]+) and ([\d,]+) tokens of prompts and replies, \$(\S+)",
        text,
    )
    (choices, answers) = [[float(x.replace(",", "")) for x in one] for one in made]
    assert choices[0] == 12 and choices[2] == 12  # an option each, and the token that must follow
    assert answers[0] == 18 and answers[2] == 18 * 50
    assert 18 * 10 < answers[1] < 18 * 60
    for _, prompts, replies, usd in (choices, answers):
        assert usd == pytest.approx((prompts + 10 * replies) / 1e6, abs=0.006)
    assert text.count("dollars unknown") == 0 and shown().count("dollars unknown") == 2
