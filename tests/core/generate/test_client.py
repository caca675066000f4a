"""The client against a server with scripted faults: pays once, waits as asked, stops at caps."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from waiting import HANG_S, until

from sabia.core.errors import ExitCode, Failed, Unavailable, UsageError
from sabia.core.generate.budget import Budget, BudgetExceeded, load_prices
from sabia.core.generate.cache import CallCache
from sabia.core.generate.calls import (
    ChatRequest,
    Refused,
    Usage,
    limit_reset_s,
    server_message,
    wait_s,
)
from sabia.core.generate.client import Client
from sabia.core.generate.ledger import Ledger

STUB = Path(__file__).parents[2] / "openai_stub.py"
spec = importlib.util.spec_from_file_location("openai_stub", STUB)
openai_stub = importlib.util.module_from_spec(spec)
spec.loader.exec_module(openai_stub)
Stub = openai_stub.Stub


def ask(text: str, **options) -> ChatRequest:
    return ChatRequest([{"role": "user", "content": text}], max_tokens=32, **options)


CACHES = Path()  # of each test its own


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    """Where clients that share no cache keep their own."""
    monkeypatch.setitem(globals(), "CACHES", tmp_path / "caches")


def client(stub, **options) -> Client:
    settings = {"backoff_s": 0.02, "cache_dir": CACHES / uuid.uuid4().hex}
    return Client(stub.url, "m", **(settings | options))


def first_attempt(*faults):
    """Each of the first attempts of any content meets the next fault."""
    return lambda text, attempt: faults[attempt] if attempt < len(faults) else ""


def test_answers_in_order_with_usage():
    with Stub() as stub, client(stub) as one:
        responses = one.chat(ask(f"q {i}") for i in range(50))
    assert [r.text for r in responses] == [f"echo q {i}" for i in range(50)]
    assert responses[0].finish_reason == "stop" and responses[0].model == "stub-1"
    assert responses[0].usage == Usage(2, 3)
    assert one.stats.usage == Usage(100, 150) and one.stats.calls == 50
    assert stub.bodies[0]["max_tokens"] == 32 and stub.bodies[0]["temperature"] == 0.0


def test_never_pays_twice_for_one_content(tmp_path):
    questions = [ask(f"q {i % 10}") for i in range(40)]
    with Stub(latency_s=0.02) as stub:
        with client(stub, cache_dir=tmp_path) as one:
            first = one.chat(questions)
            assert one.stats.calls == 10 and one.stats.cached == 30  # twins in flight are one call
        with client(stub, cache_dir=tmp_path) as two:
            second = two.chat(questions)
        assert two.stats.calls == 0 and all(r.cached for r in second)
    assert [r.text for r in first] == [r.text for r in second]
    assert set(stub.delivered.values()) == {1} and stub.requests == 10


def test_another_process_s_calls_are_seen(tmp_path):
    ours, theirs = CallCache(tmp_path), CallCache(tmp_path)
    theirs.append([("a" * 64, {"x": "é"})])
    ours._refreshed = 0.0
    assert ours.get("a" * 64) == {"x": "é"}


def test_a_torn_last_line_is_not_there_and_harms_nothing(tmp_path):
    cache = CallCache(tmp_path)
    cache.append([("a" * 64, {"n": 1}), ("b" * 64, {"n": 2})])
    cache.close()
    (segment,) = tmp_path.glob("*.log")
    whole = segment.read_bytes()
    for cut in range(len(whole)):
        segment.write_bytes(whole[:cut])
        again = CallCache(tmp_path)
        ends = whole[:cut].count(b"\n")
        kept = [again.get(k * 64) for k in "ab"]
        assert kept == [{"n": 1} if ends >= 1 else None, {"n": 2} if ends >= 2 else None]


@pytest.mark.parametrize("damaged", range(3))
def test_a_damaged_line_hides_no_other_reply_to_its_key(tmp_path, damaged):
    for number in range(3):
        cache = CallCache(tmp_path)
        cache.append([("a" * 64, {"n": number})])
        cache.close()
    path = sorted(tmp_path.glob("*.log"))[damaged]
    path.write_bytes(path.read_bytes().replace(b'"n"', b'"m"'))
    for _ in range(2):
        assert CallCache(tmp_path).get("a" * 64) == {"n": 1 if damaged == 2 else 2}


def test_a_damaged_reply_is_paid_for_again_once(tmp_path):
    with Stub() as stub:
        for requests in (1, 2, 2, 2):
            with client(stub, cache_dir=tmp_path) as one:
                one.chat([ask("q")])
            assert stub.requests == requests
            if (path := min(tmp_path.glob("*.log"))).read_bytes().count(b"echo q"):
                path.write_bytes(path.read_bytes().replace(b"echo q", b"echo x"))


def test_what_its_reader_does_not_accept_is_asked_again_and_not_kept(tmp_path):
    answers = iter(["I cannot say"] * 4 + ["yes"] * 9)
    reader = lambda text: text == "yes"  # noqa: E731
    with Stub(answer=lambda text: next(answers)) as stub:
        for text, requests in (("I cannot say", 2), ("I cannot say", 4), ("yes", 5), ("yes", 5)):
            with client(stub, cache_dir=tmp_path) as one:
                (response,) = one.chat([ask("q")], [reader])
                assert response.text == text and stub.requests == requests
                assert one.stats.requests == one.stats.calls
        with client(stub, cache_dir=tmp_path) as one:  # another reader of the same call
            assert one.chat([ask("q")], [lambda text: "y" not in text])[0].text == "yes"
            assert one.stats.calls == 2 and stub.requests == 7


def test_votes_are_calls_of_their_own():
    with Stub() as stub, client(stub) as one:
        one.chat([ask("q", vote=v, temperature=1.0) for v in (0, 1, 2, 1)])
    assert stub.requests == 3
    assert sorted(body.get("seed", 0) for body in stub.bodies) == [0, 1, 2]


@pytest.mark.parametrize("form", ["429-seconds", "429-date", "503-seconds", "429-ms"])
def test_waits_as_long_as_asked_and_everybody_does(form):
    def fault(text, attempt):
        return form if text == "q 0" and attempt == 0 else ""

    slow = Stub(fault=fault, retry_after_s=1.0, latency_s=0.05)
    with slow as stub, client(stub, max_concurrency=4) as one:
        responses = one.chat(ask(f"q {i}") for i in range(12))
    assert all(r.text for r in responses)
    assert stub.early == 0
    assert stub.early_all <= 3  # only what was already on its way


@pytest.mark.parametrize("fault", ["500", "502", "408", "425", "garbage", "no-choices", "reset"])
def test_transient_faults_are_tried_again(fault):
    with Stub(fault=first_attempt(fault, fault)) as stub, client(stub) as one:
        responses = one.chat(ask(f"q {i}") for i in range(5))
    assert [r.text for r in responses] == [f"echo q {i}" for i in range(5)]
    assert set(stub.attempts.values()) == {3} and set(stub.delivered.values()) == {1}


def test_a_hanging_server_is_left_and_asked_again():
    with Stub(fault=first_attempt("hang")) as stub, client(stub, timeout_s=1.0) as one:
        (response,) = one.chat([ask("q")])
    assert response.text == "echo q" and stub.requests >= 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_refusals_fail_at_once_in_the_server_s_words(status):
    with (
        Stub(fault=lambda text, attempt: str(status)) as stub,
        client(stub) as one,
        pytest.raises(Failed, match=f"HTTP {status}: planned {status}") as caught,
    ):
        one.chat([ask("q")])
    assert stub.requests == 1
    assert "\n" not in str(caught.value)


def test_one_refused_request_does_not_stop_the_others():
    fault = lambda text, attempt: "400" if text == "bad" else ""  # noqa: E731
    with Stub(fault=fault) as stub, client(stub) as one:
        responses = one.chat([ask("good"), ask("bad"), ask("fine")])
    assert [r.text for r in responses] == ["echo good", None, "echo fine"]
    assert responses[1].refused and "HTTP 400" in responses[1].error
    assert stub.requests == 3


def test_moderation_refuses_one_request_and_any_other_403_all():
    texts = ["bad 1", "bad 2", "bad 3", "bad 4", "good"]
    fault = lambda text, attempt: "403-flagged" if "bad" in text else ""  # noqa: E731
    with Stub(fault=fault) as stub, client(stub, max_concurrency=1) as one:
        responses = one.chat(map(ask, texts))
    assert [r.refused for r in responses] == [True] * 4 + [False] and stub.requests == 5


def test_a_parameter_nobody_accepts_stops_soon():
    with (
        Stub(fault=lambda text, attempt: "422", latency_s=0.01) as stub,
        client(stub, max_concurrency=2) as one,
        pytest.raises(Refused),
    ):
        one.chat(ask(f"q {i}") for i in range(200))
    assert stub.requests < 20


def test_gives_one_call_up_without_making_up_an_answer():
    fault = lambda text, attempt: "500" if text == "bad" else ""  # noqa: E731
    with Stub(fault=fault) as stub, client(stub, max_tries=3, backoff_s=0.001) as one:
        good, bad = one.chat([ask("good"), ask("bad")])
        assert (good.text, bad.text) == ("echo good", None)
        assert "failed after 3 attempts" in bad.error and not bad.refused
        assert one.stats.failed == 1 and stub.requests == 4


def test_an_outage_stops_the_run():
    with (
        Stub(fault=lambda text, attempt: "500") as stub,
        client(stub, max_tries=2, backoff_s=0.001) as one,
        pytest.raises(Failed, match="8 calls in a row"),
    ):
        one.chat(ask(f"q {i}") for i in range(100))
    assert stub.requests < 180  # of 200


def test_nobody_listening_is_one_line(tmp_path):
    with (
        Client(
            "http://127.0.0.1:9/v1", "m", cache_dir=tmp_path, max_tries=3, backoff_s=0.001
        ) as one,
        pytest.raises(Failed, match=r"no server: http://127.0.0.1:9/v1") as caught,
    ):
        one.chat(ask(f"q {i}") for i in range(20))
    assert "\n" not in str(caught.value) and one.stats.requests < 20


def test_a_short_outage_loses_nothing():
    refused = []

    def fault(text, attempt):
        if sum(stub.delivered.values()) < 150 or len(refused) == 20:
            return ""
        refused.append(text)
        return "503"

    with Stub(fault=fault, latency_s=0.01) as stub, client(stub) as one:
        responses = one.chat(ask(f"q {i}") for i in range(400))
    assert all(response.text for response in responses)
    assert set(stub.delivered.values()) == {1}
    assert stub.requests == 400 + 20


def test_a_long_outage_ends_the_run():
    fault = lambda text, attempt: "503" if sum(stub.delivered.values()) > 20 else ""  # noqa: E731
    with (
        Stub(fault=fault, latency_s=0.01) as stub,
        client(stub, max_tries=100, outage_s=0.5) as one,
        pytest.raises(Unavailable, match=r"no answer for 0.5 s; finished calls are kept") as caught,
    ):
        one.chat(ask(f"q {i}") for i in range(3_000))
    assert caught.value.exit_code == ExitCode.INTERRUPTED  # train.sbatch queues the job again


def test_a_failure_after_an_idle_time_is_no_outage():
    """A client that stands idle while a policy trains has had no reply for as long."""
    seen = []
    fault = lambda text, attempt: "503" if text == "late" and seen.append(1) is None else ""  # noqa: E731
    with Stub(fault=fault) as stub, client(stub, outage_s=0.5, max_tries=2) as one:
        one.chat([ask("early")])
        time.sleep(0.6)
        (late,) = one.chat([ask("late")])
        assert late.error and "failed after 2 attempts" in late.error and len(seen) == 2


def test_an_outage_of_a_restart_ends_with_75_and_of_a_first_start_with_1(tmp_path):
    """A server that never answered this run has probably a wrong address."""
    with Stub() as stub:
        with client(stub, budget=Budget(ledger=Ledger(tmp_path / "spent"))) as one:
            one.chat([ask("q")])
        url = stub.url
    for path, code in (("spent", ExitCode.INTERRUPTED), ("other", ExitCode.FAILED)):
        budget = Budget(ledger=Ledger(tmp_path / path))
        options = {"cache_dir": tmp_path / "c", "max_tries": 2, "backoff_s": 0.001}
        with Client(url, "m", budget=budget, **options) as one, pytest.raises(Failed) as caught:
            one.chat([ask("r")])
        assert caught.value.exit_code == code


def test_a_wait_too_long_is_not_waited():
    busy = Stub(fault=lambda text, attempt: "429-seconds", retry_after_s=3600)
    with busy as stub, client(stub, max_wait_s=10) as one:
        (response,) = one.chat([ask("q")])
    assert "HTTP 429" in response.error and stub.requests == 1


def test_concurrency_is_bounded_cut_on_overload_and_grows_back():
    with Stub(latency_s=0.01, hold=5) as stub, client(stub, max_concurrency=5) as one:
        one.chat(ask(f"q {i}") for i in range(40))
        assert stub.most_in_flight == 5
        assert one._limiter.limit == 5
        stub.fault = lambda text, attempt: "429" if attempt == 0 else ""
        one.chat(ask(f"r {i}") for i in range(5))
        assert one._limiter.cuts >= 1 and one._limiter.limit < 5
        stub.fault = lambda text, attempt: ""
        one.chat(ask(f"s {i}") for i in range(60))
        assert one._limiter.limit == 5


def test_several_servers_share_the_calls_and_one_may_fail(tmp_path):
    budget = Budget(max_requests=200)
    with Stub() as gone:
        lost = gone.url
    with Stub(latency_s=0.02) as one, Stub(latency_s=0.02) as two:
        options = {"cache_dir": tmp_path, "max_concurrency": 8, "budget": budget}
        urls = [one.url, two.url, lost]
        with Client(urls, "m", backoff_s=0.02, **options) as both:
            responses = both.chat(ask(f"q {i}") for i in range(100))
            assert all(response.text for response in responses)
            assert one.requests + two.requests == 100 and min(one.requests, two.requests) > 25
            assert max(one.most_in_flight, two.most_in_flight) <= 8
            two.fault = lambda text, attempt: "500"
            with pytest.raises(BudgetExceeded):
                both.chat(ask(f"r {i}") for i in range(1000))
        assert budget.spent.requests == 200 >= one.requests + two.requests


def test_a_limit_that_is_used_up_pauses_until_its_reset():
    """Of every five calls the last one leaves none; the server refuses those that are too early."""
    answered, refused, until_s = [], [], [0.0]

    def fault(text, attempt):
        if time.monotonic() < until_s[0]:
            refused.append(text)
            return "429"
        answered.append(text)
        left = -len(answered) % 5
        if not left:
            until_s[0] = time.monotonic() + 0.4
        stub.more_headers = {
            "x-ratelimit-remaining-requests": str(left), "x-ratelimit-reset-requests": "400ms"
        }  # fmt: skip
        return ""

    with Stub(fault=fault) as stub, client(stub, max_concurrency=1) as one:
        responses = one.chat(ask(f"q {i}") for i in range(15))
    assert all(response.text for response in responses)
    assert len(answered) == 15 and not refused


def test_key_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "secret-123")
    with Stub(fault=lambda text, attempt: "401") as stub:
        with client(stub, api_key_env="SOME_KEY") as one, pytest.raises(Refused) as caught:
            one.chat([ask("q")])
        assert stub.headers[0]["Authorization"] == "Bearer secret-123"
        assert "secret" not in str(caught.value)
        monkeypatch.delenv("SOME_KEY")
        with client(stub, api_key_env="SOME_KEY") as two, pytest.raises(Refused):
            two.chat([ask("q")])
        assert "Authorization" not in stub.headers[1]


def test_budgets_stop_hard_and_keep_what_is_paid(tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text("[m]\nprompt = 10\ncompletion = 30\n")
    table = load_prices(prices)
    caps = ({"max_requests": 7}, {"max_tokens": 400}, {"max_usd": 0.009, "prices": table})
    for number, cap in enumerate(caps):
        place = tmp_path / f"cache{number}"
        with Stub(latency_s=0.01) as stub:
            options = {"cache_dir": place, "budget": Budget(**cap)}
            with client(stub, **options) as one, pytest.raises(BudgetExceeded) as e:
                one.chat(ask(f"q {i}") for i in range(300))
            assert e.value.exit_code == ExitCode.INFEASIBLE
            stats, paid = one.stats, sum(stub.delivered.values())
            assert 0 < paid < 300
            assert len(CallCache(place)) == paid == stats.calls
            assert stats.requests <= cap.get("max_requests", 300)
            assert stats.usage.total_tokens <= cap.get("max_tokens", 10**9)
            assert (stats.usd or 0) <= cap.get("max_usd", 10**9)
            with client(stub, cache_dir=place) as two:
                two.chat(ask(f"q {i}") for i in range(300))
            assert set(stub.delivered.values()) == {1}


def test_a_dollar_cap_needs_a_price(tmp_path):
    with pytest.raises(UsageError, match="no price for model m"):
        Client("http://127.0.0.1:9/v1", "m", cache_dir=tmp_path, budget=Budget(max_usd=1.0))
    (tmp_path / "prices.toml").write_text("[m]\nprompt = 1\n")
    with pytest.raises(UsageError, match="--prices: "):
        load_prices(tmp_path / "prices.toml")


def test_estimate_knows_the_cache_and_sends_nothing(tmp_path):
    (tmp_path / "p.json").write_text('{"m": {"prompt": 1000000, "completion": 1000000}}')
    budget = Budget(load_prices(tmp_path / "p.json"))
    options = {"cache_dir": tmp_path / "c", "budget": budget}
    with Stub() as stub, client(stub, **options) as one:
        one.chat([ask("a")])
        estimate = one.estimate([ask("a"), ask("b"), ask("b"), ask("c" * 700)])
        assert stub.requests == 1
    assert (estimate.requests, estimate.cached) == (2, 2)
    assert estimate.usage.completion_tokens == 64
    assert estimate.usage.prompt_tokens > 200
    assert estimate.usd == estimate.usage.total_tokens


def test_reads_what_servers_say():
    assert server_message(b'{"error": {"message": "a\\n b"}}') == "a b"
    assert server_message(b'{"detail": [{"loc": 1}]}') == '[{"loc": 1}]'
    assert server_message(b"<html>\noops") == "<html> oops"
    assert wait_s({"Retry-After": "2.5"}) == 2.5
    assert wait_s({"retry-after-ms": "1500", "Retry-After": "9"}) == 1.5
    assert wait_s({"Retry-After": "Thu, 01 Jan 1970 00:01:40 GMT"}, now=40.0) == 60.0
    assert wait_s({"Retry-After": "Thu, 01 Jan 1970 00:01:40 GMT"}, now=400.0) == 0.0
    assert wait_s({"Retry-After": "soon"}) is None and wait_s({}) is None
    spent = {"X-RateLimit-Remaining-Requests": "0", "X-RateLimit-Reset-Requests": "1m30.5s"}
    assert wait_s(spent) == limit_reset_s(spent) == 90.5
    assert wait_s(spent | {"Retry-After": "2"}) == 2
    tokens = {"x-ratelimit-remaining-tokens": "99", "x-ratelimit-reset-tokens": "120ms"}
    assert limit_reset_s(tokens, Usage(40, 60)) == 0.12
    assert limit_reset_s(tokens, Usage(40, 59)) is None
    assert limit_reset_s(spent | tokens | {"x-ratelimit-reset-tokens": "7"}, Usage(100)) == 90.5
    for odd in ("soon", "-1", "1x", "", "s"):
        assert limit_reset_s(spent | {"X-RateLimit-Reset-Requests": odd}) is None


CHILD = """
import sys
from sabia.core import stop
from sabia.core.generate.client import Client
from sabia.core.generate.ledger import Ledger
from sabia.core.generate.calls import ChatRequest
stop.install()
with Client(sys.argv[1], "m", cache_dir=sys.argv[2], max_concurrency=2) as one:
    one.chat(ChatRequest([{"role": "user", "content": f"q {i}"}]) for i in range(60))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_pays_at_most_for_what_was_in_flight(number, tmp_path):
    with Stub(latency_s=0.05) as stub:
        child = [sys.executable, "-c", CHILD, stub.url, str(tmp_path)]
        first = subprocess.Popen(child, stderr=subprocess.DEVNULL)
        until(lambda: sum(stub.delivered.values()) >= 8, first)
        first.send_signal(number)
        assert first.wait(HANG_S) != 0
        paid = sum(stub.delivered.values())
        subprocess.run(child, check=True, timeout=HANG_S)
    assert 8 <= paid < 60
    twice = sum(n - 1 for n in stub.delivered.values())
    assert twice <= (2 if number == signal.SIGKILL else 0)
    kept = [json.loads(line[65:]) for p in tmp_path.glob("*.log") for line in p.open("rb")]
    assert len(kept) == 60
