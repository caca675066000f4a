"""Rewards and the judge's failures: a judge that fails gives no reward, never a bad one."""

import hashlib
import json
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sabia.core.errors import BadData, Failed, UsageError
from sabia.core.generate.client import Client
from sabia.core.judge.judge_file import JudgeServer
from sabia.core.judge.llm import Judge, Question, majority
from sabia.core.judge.panel import Panel
from sabia.core.judge.rewards import Case, Grader, NullGuard, parse_reward
from sabia.core.judge.rubric import Item, Rubric, parse_rubric
from sabia.core.judge.verdict import Grade, Verdict
from sabia.core.options.model_calls import RubricJudge

MET, UNMET, UNKNOWN = Verdict.MET, Verdict.UNMET, Verdict.UNKNOWN
QUESTION = [{"role": "user", "content": "37+58="}]


def panel_of(judge):
    return Panel([(JudgeServer("judge", (), ""), judge)])


def verdicts(judge, questions):
    return [one.verdicts for one in judge.collect([judge.submit(one) for one in questions])]


@contextmanager
def judge_server(answer):
    """A server whose reply to a judge's prompt is `answer(prompt, number of the call)`."""
    calls: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body["messages"][1]["content"]
            key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
            calls[key] += 1
            status, text = answer(prompt, calls[key])
            choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            raw = json.dumps({"choices": [choice]}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", calls
    finally:
        server.shutdown()
        server.server_close()


def asked_items(prompt):
    return [line.split('"')[1] for line in prompt.splitlines() if line.startswith("- item ")]


def says(prompt, met):
    verdicts = [{"item": i, "evidence": "x", "met": met} for i in asked_items(prompt)]
    return json.dumps({"verdicts": verdicts})


def test_parse_reward():
    assert parse_reward("exact") == {"exact": 1.0}
    assert parse_reward("number=0.8, regex=0.2") == {"number": 0.8, "regex": 0.2}
    for text in ("", "vibes", "exact,exact", "exact=x", "exact=0", "exact=-1"):
        with pytest.raises(UsageError):
            parse_reward(text)


def test_verifier_rewards_mix():
    grader = Grader(parse_reward("exact=3,contains=1"))
    grades = grader.grade([Case(QUESTION, text, "095") for text in ("095", "is 095", "95")])
    assert [grade.score for grade in grades] == [1.0, 0.25, 0.0]
    assert grades[1].items() == [
        {"id": "exact", "verdict": "unmet", "points": 0.0},
        {"id": "contains", "verdict": "met", "points": 1.0},
    ]


def test_records_that_lack_what_the_reward_needs():
    with pytest.raises(BadData, match="no answer"):
        Grader({"exact": 1.0}).check(None, None)
    with pytest.raises(BadData, match="not a number"):
        Grader({"number": 1.0}).check("many", None)
    with pytest.raises(BadData, match="no rubric"):
        Grader({"rubric": 1.0}).check("1", None)
    with pytest.raises(UsageError, match="judge-url"):
        Grader({"rubric": 1.0}).check(None, '[{"text": "is kind"}]')
    assert Grader({"rubric": 1.0}).check(None, '[{"kind": "exact", "reference": "1"}]').id


def test_rubric_with_a_judge_and_its_failures(tmp_path):
    """Items by verifier and by judge; each way of failing leaves the score unset, never 0."""
    items = [
        {"id": "right", "kind": "contains", "reference": "095", "weight": 2},
        {"id": "short", "text": "is short"},
        {"id": "rude", "text": "is rude", "weight": -1},
    ]
    replies = {
        "good": lambda p: says(p, '"short"' in p),
        "garbled": lambda p: says(p, True)[:-5],
        "other": lambda p: says(p, True).replace('"item": "', '"item": "not-'),
        "silent": lambda _: "",
    }

    def answer(prompt, _):
        kind = next(name for name in replies if f"\n{name} " in prompt)
        return 200, replies[kind](prompt)

    rubric = parse_rubric(items)
    cases = [Case(QUESTION, f"{kind} 095", rubric=rubric) for kind in replies]
    cases.append(Case(QUESTION, "good 95", rubric=rubric))
    with judge_server(answer) as (url, calls):
        for _ in range(2):
            with Client(url, "judge", cache_dir=tmp_path) as client:
                grades = Grader({"rubric": 1.0}, panel_of(Judge(client))).grade(cases)
            assert [grade.score for grade in grades] == [
                1.0,
                None,
                None,
                None,
                pytest.approx(1 / 3),
            ]
        # what could be read was paid for once; the rest, half of the calls, twice in each run
        assert sorted(calls.values()) == [1, 1, 1, 1, 4, 4, 4, 4, 4, 4]
    assert [v for _, v, _ in grades[1].verdicts] == [MET, UNKNOWN, UNKNOWN]
    assert sum(verdict is Verdict.UNKNOWN for _, verdict, _ in grades[1].verdicts) == 2


def test_an_outage_stops_the_run_and_a_rare_fault_does_not(tmp_path):
    def flaky(prompt, call):
        return (500, "") if call == 1 else (200, says(prompt, True))

    item = Rubric("r", (Item("a", "is kind"),))
    questions = [Question(QUESTION, f"text {n}", item) for n in range(20)]
    with (
        judge_server(flaky) as (url, _),
        Client(url, "judge", cache_dir=tmp_path / "a", backoff_s=0.001) as client,
    ):
        assert verdicts(Judge(client), questions) == [{"a": MET}] * 20
    with (
        judge_server(lambda *_: (500, "")) as (url, _),
        Client(url, "judge", cache_dir=tmp_path / "b", backoff_s=0.001, max_tries=2) as client,
        pytest.raises(Failed, match="in a row"),
    ):
        verdicts(Judge(client), questions)


def test_votes_and_several_items_a_call(tmp_path):
    def answer(prompt, _):
        return 200, says(prompt, "text a" in prompt)

    items = Rubric("r", tuple(Item(name, f"has {name}") for name in "xyz"))
    with judge_server(answer) as (url, calls), Client(url, "judge", cache_dir=tmp_path) as client:
        asked = {"judge_items_per_call": 2, "judge_votes": 3, "judge_url": url, "judge_model": "m"}
        judge = Judge(client, RubricJudge(**asked))
        found = verdicts(judge, [Question(QUESTION, f"text {n}", items) for n in "ab"])
        assert sum(calls.values()) == 2 * 3 * 2
    assert found == [dict.fromkeys("xyz", MET), dict.fromkeys("xyz", UNMET)]
    assert majority([MET, UNMET]) is UNKNOWN
    assert majority([MET, UNKNOWN]) is MET
    assert majority([]) is UNKNOWN


def test_null_guard():
    guard = NullGuard(0.25)
    guard.add([Grade(1.0)] * 30 + [Grade(None)] * 10)
    with pytest.raises(Failed, match="no verdict on 2"):
        guard.add([Grade(None)] * 2)
    assert (len(guard.recent), sum(guard.recent)) == (42, 12)
